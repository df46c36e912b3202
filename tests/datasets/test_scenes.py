"""Tests of synthetic scenes: reproducibility, consistent ground truth and the intended difficulty."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.label_masks import resize_labels
from mcis.datasets.synthetic.scenes import Scene, body_group, draw_scene
from mcis.datasets.synthetic.silhouettes import DRAWN_CLASSES


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(0, "train_aug", index) for index in range(160)]


def as_trained_on(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Returns the picture (96, 96, 3) and labels (96, 96) after JPEG compression and resizing."""
    stream = BytesIO()
    Image.fromarray(scene.rgb).save(stream, "JPEG", quality=92, subsampling=0)
    return decode_square(stream.getvalue(), 96), resize_labels(scene.labels, 96, 96)


def test_a_scene_depends_only_on_its_arguments():
    late = draw_scene(3, "val", 17)
    np.random.seed(1)
    for index in (4, 30):
        draw_scene(3, "val", index)
    again = draw_scene(3, "val", 17)
    for field in ("rgb", "labels", "saliency"):
        np.testing.assert_array_equal(getattr(late, field), getattr(again, field))


def test_each_tagged_class_is_visible_and_the_border_is_thin(scenes: list[Scene]):
    for scene in scenes:
        assert scene.tags == tuple(sorted(set(scene.tags)))
        assert len(scene.tags) >= 1
        for k in scene.tags:
            assert (scene.labels == k + 1).sum() >= 60
        # Thin: no block of 4 x 4 pixels is all border, even where small parts are close together.
        border = np.lib.stride_tricks.sliding_window_view(scene.labels == IGNORE, (4, 4))
        assert not border.all((-2, -1)).any()
    ignored = np.mean([(scene.labels == IGNORE).mean() for scene in scenes])

    assert 0.01 < ignored < 0.06


def test_scenes_have_about_one_and_a_half_classes_with_frequent_partners(scenes: list[Scene]):
    assert 1.35 < np.mean([len(scene.tags) for scene in scenes]) < 1.75
    together = np.zeros((8, 8), int)
    for scene in scenes:
        for k in scene.tags:
            together[k, list(scene.tags)] += 1

    assert together.diagonal().min() >= len(scenes) // 16

    neighbors = sum(together[k, k ^ 1] for k in range(8)) / 8
    others = (together.sum() - together.diagonal().sum() - 8 * neighbors) / (8 * 6)
    assert neighbors > 2 * others

    areas = []
    for scene in scenes:
        areas += [(scene.labels == k + 1).mean() for k in scene.tags]
    assert min(areas) < 0.04
    assert max(areas) > 0.3


def test_heads_are_recognizable_after_jpeg_and_resizing(scenes: list[Scene]):
    """Both colors of a checker cover about a fifth of the pixels of their class, and almost no others."""
    own = np.zeros((8, 2))
    elsewhere = np.zeros(8)
    totals = np.zeros((8, 2))
    for scene in scenes:
        rgb, labels = as_trained_on(scene)
        for k, kind in enumerate(DRAWN_CLASSES):
            distances = [np.linalg.norm(rgb - np.array(color, float), axis=-1) for color in kind.colors]
            of_class = labels == k + 1
            bright = int(np.argmax([np.ptp(color) for color in kind.colors]))
            own[k] += [(distance[of_class] < 90).sum() for distance in distances]
            elsewhere[k] += (distances[bright][(labels != k + 1) & (labels != IGNORE)] < 60).sum()
            totals[k] += of_class.sum(), ((labels != k + 1) & (labels != IGNORE)).sum()
    shares = own / totals[:, :1]

    assert (shares > 0.03).all(), shares
    assert ((shares.sum(1) > 0.1) & (shares.sum(1) < 0.3)).all(), shares
    assert (elsewhere / totals[:, 1] < 0.005).all()


@pytest.mark.parametrize("classes", range(2, 9))
def test_every_class_has_a_partner_and_appears_in_the_first_scenes(classes: int):
    groups = [body_group(k, classes) for k in range(classes)]
    assert min(groups.count(group) for group in groups) >= 2
    tags: set[int] = set()
    for index in range(classes):
        tags.update(draw_scene(0, "val", index, classes=classes).tags)
    assert tags == set(range(classes))


@pytest.mark.parametrize("size", [48, 192])
def test_scenes_of_other_sizes_have_visible_objects(size: int):
    for index in range(8):
        scene = draw_scene(0, "train_aug", index, size=size)
        assert sorted(scene.labels.shape) in ([size, size], [size * 3 // 4, size])
        assert all((scene.labels == k + 1).sum() >= 60 * (size / 96) ** 2 for k in scene.tags)
