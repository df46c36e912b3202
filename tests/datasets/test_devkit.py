"""Tests of the synthetic devkit: layout, reproducible files, atomic writing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mcis.datasets.classes import palette, read_classes
from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.saliency_maps import decode_saliency
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.synthetic.scenes import SPLITS, Scene, draw_scene
from mcis.datasets.synthetic.silhouettes import DRAWN_CLASSES

TRAIN = 40
VAL = 12
SEED = 5


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedded") / "VOC2012"
    draw(root, train=TRAIN, val=VAL, seed=SEED)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def tags_of(root: Path, split: str) -> dict[str, tuple[int, ...]]:
    lines = (root / "ImageSets/Segmentation" / f"{split}_cls.txt").read_text().splitlines()
    return {line.split()[0]: tuple(map(int, line.split()[1:])) for line in lines}


def test_the_layout_is_that_of_a_voc_devkit(devkit: Path):
    lists = devkit / "ImageSets/Segmentation"
    train, val = ((lists / f"{split}.txt").read_text().splitlines() for split in SPLITS)

    assert (len(train), len(val)) == (TRAIN, VAL)
    assert len({*train, *val}) == TRAIN + VAL
    assert list(tags_of(devkit, "train_aug")) == train
    assert list(tags_of(devkit, "val")) == val

    expected = {f"JPEGImages/{name}.jpg" for name in train + val}
    expected |= {f"SegmentationClassAug/{name}.png" for name in train + val}
    expected |= {f"SaliencyMaps/{name}.png" for name in train}
    for split in SPLITS:
        expected |= {f"ImageSets/Segmentation/{split}.txt", f"ImageSets/Segmentation/{split}_cls.txt"}

    assert set(contents(devkit)) == expected | {"classes.txt"}
    assert read_classes(devkit / "classes.txt") == tuple(kind.name for kind in DRAWN_CLASSES)
    assert len({kind.name for kind in DRAWN_CLASSES}) == 8


def test_files_contain_the_scenes(devkit: Path):
    shapes = set()
    for split, prefix in (("train_aug", "train"), ("val", "val")):
        for index in range(VAL):
            name = f"{prefix}_{index:06d}"
            scene = draw_scene(SEED, split, index)
            rgb = decode_picture((devkit / "JPEGImages" / f"{name}.jpg").read_bytes()).rgb
            assert rgb.shape == scene.rgb.shape == (*scene.labels.shape, 3)
            assert np.abs(rgb.astype(int) - scene.rgb).mean() < 4
            mask = (devkit / "SegmentationClassAug" / f"{name}.png").read_bytes()
            np.testing.assert_array_equal(decode_labels(mask), scene.labels)
            np.testing.assert_array_equal(decode_picture(mask).rgb, palette()[scene.labels])
            if split == "train_aug":
                saliency = decode_saliency((devkit / "SaliencyMaps" / f"{name}.png").read_bytes())
                np.testing.assert_array_equal(saliency, scene.saliency)
            shapes.add(rgb.shape[:2])

    assert shapes == {(96, 96), (72, 96), (96, 72)}


def test_files_are_reproducible_and_a_smaller_split_is_a_prefix(devkit: Path, tmp_path: Path):
    draw(tmp_path / "again", train=TRAIN, val=VAL, seed=SEED)
    assert contents(tmp_path / "again") == contents(devkit)

    draw(tmp_path / "fewer", train=9, val=3, seed=SEED)
    whole = contents(devkit)
    part = {name: data for name, data in contents(tmp_path / "fewer").items() if name.endswith((".jpg", ".png"))}
    assert len(part) == 9 * 3 + 3 * 2
    assert all(whole[name] == data for name, data in part.items())
    assert list(tags_of(tmp_path / "fewer", "train_aug").items()) == list(tags_of(devkit, "train_aug").items())[:9]


def test_seeds_and_splits_give_different_scenes(devkit: Path, tmp_path: Path):
    draw(tmp_path / "other", train=9, val=3, seed=SEED + 1)
    whole = contents(devkit)
    other = contents(tmp_path / "other")
    assert all(whole[name] != data for name, data in other.items() if name.endswith(".jpg"))
    one, two = (draw_scene(SEED, split, 0) for split in SPLITS)
    assert one.rgb.shape != two.rgb.shape or (one.rgb != two.rgb).any()


def test_an_existing_folder_is_not_changed(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.txt").write_text("years of work")
    draw(tmp_path / "work", train=1, val=1)
    assert contents(tmp_path) == {"work/thesis.txt": b"years of work"}


def test_an_interrupted_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(seed: int, split: str, index: int, **options: int) -> Scene:
        if index == 3:
            raise KeyboardInterrupt
        return draw_scene(seed, split, index, **options)

    monkeypatch.setattr(synthetic, "draw_scene", interrupted)

    with pytest.raises(KeyboardInterrupt):
        draw(tmp_path / "deep/devkit", train=5, val=1)
    assert list((tmp_path / "deep").iterdir()) == []


def test_concurrent_calls_create_one_folder(tmp_path: Path):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(draw, tmp_path / "devkit", train=3, val=2) for _ in range(4)]
        for future in futures:
            future.result()
    assert [path.name for path in tmp_path.iterdir()] == ["devkit"]
    assert len(tags_of(tmp_path / "devkit", "train_aug")) == 3
