"""The embedded data set: one seed, one set of bytes; truth agrees with itself; the world is as hard as intended."""

import json
from colorsys import rgb_to_hsv
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from mcis.datasets import synthetic
from mcis.datasets.classes import IGNORE, palette, read_classes
from mcis.datasets.decode import decode_labels, decode_rgb, decode_saliency, decode_square, resize_labels
from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import KINDS, SPLITS, Scene, body_group, draw, draw_scene

TRAIN, VAL, SEED = 40, 12, 5


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedded") / "VOC2012"
    draw(root, train=TRAIN, val=VAL, seed=SEED)
    return root


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(0, "train_aug", index) for index in range(160)]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def tags_of(root: Path, split: str) -> dict[str, tuple[int, ...]]:
    lines = (root / "ImageSets/Segmentation" / f"{split}_cls.txt").read_text().splitlines()
    return {line.split()[0]: tuple(map(int, line.split()[1:])) for line in lines}


def as_trained_on(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Picture (96, 96, 3) and labels (96, 96) after JPEG and squashing."""
    stream = BytesIO()
    Image.fromarray(scene.rgb).save(stream, "JPEG", quality=92, subsampling=0)
    return decode_square(stream.getvalue(), 96), resize_labels(scene.labels, 96, 96)


# --- the folder


def test_layout_is_a_devkits(devkit: Path):
    lists = devkit / "ImageSets/Segmentation"
    train, val = ((lists / f"{split}.txt").read_text().splitlines() for split in SPLITS)
    assert (len(train), len(val)) == (TRAIN, VAL)
    assert len({*train, *val}) == TRAIN + VAL
    assert list(tags_of(devkit, "train_aug")) == train
    assert list(tags_of(devkit, "val")) == val
    expected = {f"JPEGImages/{name}.jpg" for name in train + val}
    expected |= {f"SegmentationClassAug/{name}.png" for name in train + val}
    expected |= {f"SaliencyMaps/{name}.png" for name in train}
    expected |= {f"ImageSets/Segmentation/{split}{kind}.txt" for split in SPLITS for kind in ("", "_cls")}
    assert set(contents(devkit)) == expected | {"classes.txt", "drawn.json"}
    assert read_classes(devkit / "classes.txt") == tuple(kind.name for kind in KINDS)
    assert len({kind.name for kind in KINDS}) == 8


def test_files_are_the_scenes(devkit: Path):
    shapes = set()
    for split, prefix in (("train_aug", "train"), ("val", "val")):
        for index in range(VAL):
            name, scene = f"{prefix}_{index:06d}", draw_scene(SEED, split, index)
            rgb = decode_rgb((devkit / "JPEGImages" / f"{name}.jpg").read_bytes())
            assert rgb.shape == scene.rgb.shape == (*scene.labels.shape, 3)
            assert np.abs(rgb.astype(int) - scene.rgb).mean() < 4
            mask = (devkit / "SegmentationClassAug" / f"{name}.png").read_bytes()
            np.testing.assert_array_equal(decode_labels(mask), scene.labels)
            np.testing.assert_array_equal(decode_rgb(mask), palette()[scene.labels])
            if split == "train_aug":
                saliency = decode_saliency((devkit / "SaliencyMaps" / f"{name}.png").read_bytes())
                np.testing.assert_array_equal(saliency, scene.saliency)
            shapes.add(rgb.shape[:2])
    assert shapes == {(96, 96), (72, 96), (96, 72)}


def test_tags_agree_with_masks_and_cover_every_class(devkit: Path):
    for split in SPLITS:
        tags = tags_of(devkit, split)
        for name, classes in tags.items():
            labels = decode_labels((devkit / "SegmentationClassAug" / f"{name}.png").read_bytes())
            assert {k + 1 for k in classes} == set(np.unique(labels).tolist()) - {0, IGNORE}, name
        assert {k for classes in tags.values() for k in classes} == set(range(8))


def test_the_same_seed_draws_the_same_bytes_and_a_shorter_list_is_its_beginning(devkit: Path, tmp_path: Path):
    draw(tmp_path / "again", train=TRAIN, val=VAL, seed=SEED)
    assert contents(tmp_path / "again") == contents(devkit)
    draw(tmp_path / "fewer", train=9, val=3, seed=SEED)
    whole = contents(devkit)
    part = {name: data for name, data in contents(tmp_path / "fewer").items() if name.endswith((".jpg", ".png"))}
    assert len(part) == 9 * 3 + 3 * 2
    assert all(whole[name] == data for name, data in part.items())
    assert list(tags_of(tmp_path / "fewer", "train_aug").items()) == list(tags_of(devkit, "train_aug").items())[:9]


def test_another_seed_or_split_draws_others(devkit: Path, tmp_path: Path):
    draw(tmp_path / "other", train=9, val=3, seed=SEED + 1)
    whole, other = contents(devkit), contents(tmp_path / "other")
    assert all(whole[name] != data for name, data in other.items() if name.endswith(".jpg"))
    one, two = (draw_scene(SEED, split, 0) for split in SPLITS)
    assert one.rgb.shape != two.rgb.shape or (one.rgb != two.rgb).any()


def test_a_scene_depends_on_no_other_and_on_no_global_state():
    late = draw_scene(3, "val", 17)
    np.random.seed(1)
    for index in (4, 30):
        draw_scene(3, "val", index)
    again = draw_scene(3, "val", 17)
    for field in ("rgb", "labels", "saliency"):
        np.testing.assert_array_equal(getattr(late, field), getattr(again, field))


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path):
    root = tmp_path / "devkit"
    draw(root, train=2, val=1)
    (root / "classes.txt").write_text("touched\n")
    draw(root, train=2, val=1)
    assert (root / "classes.txt").read_text() == "touched\n"
    before = contents(root)
    with pytest.raises(UserError, match=r"already holds .*'train': 2.*\n.*'train': 3"):
        draw(root, train=3, val=1)
    assert contents(root) == before


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for root in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(UserError, match="already holds something else"):
            draw(root, train=1, val=1)
    assert contents(tmp_path) == {"mine/thesis.txt": b"years of work", "file": b"a file"}
    (tmp_path / "empty").mkdir()
    draw(tmp_path / "empty", train=1, val=1)
    assert (tmp_path / "empty/classes.txt").exists()


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(seed: int, split: str, index: int, **options: int) -> Scene:
        if index == 3:
            raise KeyboardInterrupt
        return draw_scene(seed, split, index, **options)

    monkeypatch.setattr(synthetic, "draw_scene", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw(tmp_path / "deep/devkit", train=5, val=1)
    assert list((tmp_path / "deep").iterdir()) == []


def test_two_at_once_make_one_folder(tmp_path: Path):
    with ThreadPoolExecutor(4) as pool:
        for made in [pool.submit(draw, tmp_path / "devkit", train=3, val=2) for _ in range(4)]:
            made.result()
    assert [path.name for path in tmp_path.iterdir()] == ["devkit"]
    assert json.loads((tmp_path / "devkit/drawn.json").read_text())["train"] == 3


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"train": 0}, "at least 1"),
        ({"val": 0}, "at least 1"),
        ({"size": 47}, "at least 48"),
        ({"classes": 9}, "2 to 8"),
        ({"classes": 1}, "2 to 8"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path: Path, argument: dict[str, int], expected: str):
    (name,) = argument
    with pytest.raises(UserError, match=f"{name} = {argument[name]}") as raised:
        draw(tmp_path / "devkit", **argument)
    assert raised.value.expected == expected
    assert not (tmp_path / "devkit").exists()


# --- the world


def test_each_tagged_class_is_visible_and_the_border_is_thin(scenes: list[Scene]):
    for scene in scenes:
        assert scene.tags == tuple(sorted(set(scene.tags)))
        assert len(scene.tags) >= 1
        for k in scene.tags:
            assert (scene.labels == k + 1).sum() >= 60
        # Thin: no block of 4 x 4 pixels is border alone, even where small parts lie close together.
        border = np.lib.stride_tricks.sliding_window_view(scene.labels == IGNORE, (4, 4))
        assert not border.all((-2, -1)).any()
    ignored = np.mean([(scene.labels == IGNORE).mean() for scene in scenes])
    assert 0.01 < ignored < 0.06


def test_scenes_hold_about_one_and_a_half_classes_in_uneven_company(scenes: list[Scene]):
    assert 1.35 < np.mean([len(scene.tags) for scene in scenes]) < 1.75
    together = np.zeros((8, 8), int)
    for scene in scenes:
        for k in scene.tags:
            together[k, list(scene.tags)] += 1
    assert together.diagonal().min() >= len(scenes) // 16
    neighbours = sum(together[k, k ^ 1] for k in range(8)) / 8
    others = (together.sum() - together.diagonal().sum() - 8 * neighbours) / (8 * 6)
    assert neighbours > 2 * others
    areas = [(scene.labels == k + 1).mean() for scene in scenes for k in scene.tags]
    assert min(areas) < 0.04
    assert max(areas) > 0.3


def test_saliency_is_useful_soft_and_imperfect(scenes: list[Scene]):
    recall, precision, missed, clutter, soft = [], [], 0, 0, 0
    for scene in scenes:
        sure = scene.labels != IGNORE
        truth, found = (scene.labels > 0) & sure, (scene.saliency > 127) & sure
        recall.append((truth & found).sum() / truth.sum())
        precision.append((truth & found).sum() / max(found.sum(), 1))
        missed += any(found[scene.labels == k + 1].mean() < 0.05 for k in scene.tags)
        near = np.asarray(Image.fromarray(scene.labels > 0).convert("L").filter(ImageFilter.MaxFilter(9))) > 0
        clutter += (found & ~near).sum() > 20
        soft += ((scene.saliency > 20) & (scene.saliency < 235)).mean() > 0.02
    assert 0.7 < np.mean(recall) < 0.95
    assert 0.75 < np.mean(precision) < 0.97
    assert 0.02 < missed / len(scenes) < 0.3
    assert 0.1 < clutter / len(scenes) < 0.5
    assert soft / len(scenes) > 0.8


def test_heads_are_unmistakable_after_jpeg_and_squashing(scenes: list[Scene]):
    """Both colours of a class's checker cover some of its own pixels, together about a fifth, and hardly any others."""
    own, elsewhere = np.zeros((8, 2)), np.zeros(8)
    totals = np.zeros((8, 2))
    for scene in scenes:
        rgb, labels = as_trained_on(scene)
        for k, kind in enumerate(KINDS):
            distances = [np.linalg.norm(rgb - np.array(colour, float), axis=-1) for colour in kind.colours]
            mine, bright = labels == k + 1, int(np.argmax([np.ptp(colour) for colour in kind.colours]))
            own[k] += [(distance[mine] < 90).sum() for distance in distances]
            elsewhere[k] += (distances[bright][(labels != k + 1) & (labels != IGNORE)] < 60).sum()
            totals[k] += mine.sum(), ((labels != k + 1) & (labels != IGNORE)).sum()
    shares = own / totals[:, :1]
    assert (shares > 0.03).all(), shares
    assert ((shares.sum(1) > 0.1) & (shares.sum(1) < 0.3)).all(), shares
    assert (elsewhere / totals[:, 1] < 0.005).all()


def test_bodies_keep_their_hue_and_share_it_with_a_partner(scenes: list[Scene]):
    hues: dict[int, list[float]] = {k: [] for k in range(8)}
    for scene in scenes:
        rgb, labels = as_trained_on(scene)
        for k in scene.tags:
            hues[k].append(rgb_to_hsv(*np.median(rgb[labels == k + 1], axis=0) / 255)[0])
    for k in range(8):
        partners = [other for other in range(8) if other != k and body_group(other, 8) == body_group(k, 8)]
        strangers = [other for other in range(8) if body_group(other, 8) != body_group(k, 8)]
        assert 1 <= len(partners) <= 2
        middle = {other: np.median(values) for other, values in hues.items()}
        assert all(abs(middle[k] - middle[other]) < 0.05 for other in partners)
        assert all(abs(middle[k] - middle[other]) > 0.12 for other in strangers)


@pytest.mark.parametrize("classes", range(2, 9))
def test_every_class_has_a_partner_and_appears_in_the_first_scenes(classes: int):
    groups = [body_group(k, classes) for k in range(classes)]
    assert min(groups.count(group) for group in groups) >= 2
    seen = {k for index in range(classes) for k in draw_scene(0, "val", index, classes=classes).tags}
    assert seen == set(range(classes))


@pytest.mark.parametrize("size", [48, 192])
def test_other_sizes(size: int):
    for index in range(8):
        scene = draw_scene(0, "train_aug", index, size=size)
        assert sorted(scene.labels.shape) in ([size, size], [size * 3 // 4, size])
        assert all((scene.labels == k + 1).sum() >= 60 * (size / 96) ** 2 for k in scene.tags)
