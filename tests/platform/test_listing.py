"""Listing of configured sources: each lister gets its section, and errors name configuration keys and options."""

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sources import SOURCES
from mcis.datasets.synthetic.devkit import draw
from mcis.platform.config.resolve import resolve
from mcis.platform.runs.listing import list_images


def listed(sources: str, options: dict[str, Any]) -> Listing:
    return list_images(resolve(sources, "scratch", {key: str(value) for key, value in options.items()}).config)


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def remedy(found: str, sources: str, options: dict[str, Any]) -> str:
    """The remedy of the error that listing these sources raises."""
    with pytest.raises(UserError, match=found) as caught:
        listed(sources, options)
    return caught.value.remedy


@pytest.fixture
def devkit(tmp_path: Path) -> dict[str, Path]:
    root = tmp_path / "VOC2012"
    draw(root, train=6, val=3, size=48, classes=3)
    return {"data.voc": root, "data.classes": root / "classes.txt"}


@pytest.mark.parametrize("source", SOURCES)
def test_every_argument_of_a_lister_has_its_own_key(source: str) -> None:
    arguments = list(inspect.signature(SOURCES[source].lister).parameters)
    given_by_the_first_source = [] if SOURCES[source].defines_classes else ["names"]
    assert sorted(arguments) == sorted([*SOURCES[source].keys(source), *given_by_the_first_source])
    assert arguments[0] == SOURCES[source].location


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_without_its_images_names_its_flag(source: str) -> None:
    with pytest.raises(UserError, match=f"sources {source} without the images of {source}") as caught:
        listed(source, {})
    assert f"--{source} " in caught.value.remedy
    assert caught.value.expected == SOURCES[source].help


def test_sources_are_listed_with_the_classes_of_the_first(devkit: dict[str, Path], tmp_path: Path) -> None:
    single = fill(tmp_path / "single", "fish/1.png", "cactus/2.jpg", "dog/3.jpg")
    web = fill(tmp_path / "web", "kite/4")
    found = listed("voc+single+web", devkit | {"data.single.root": single, "data.web.root": web})
    assert found.classes == ("cactus", "fish", "kite")
    assert Counter(found.table["domain"].to_pylist()) == {"target": 9, "source": 2, "web": 1}
    ids = found.table["image_id"].to_pylist()
    assert ids == sorted(ids)
    assert {"single/cactus/2.jpg", "single/fish/1.png", "web/kite/4"} < set(ids)
    assert {SOURCES[source].domain for source in ("voc", "single", "web")} == {"target", "source", "web"}
    alone = listed("single", {"data.single.root": single, "data.classes": devkit["data.classes"]})
    assert len(alone.table) == 2


def test_lists_of_the_challenge_can_be_inside_its_folder_or_elsewhere(tmp_path: Path) -> None:
    root = fill(tmp_path / "lid", "a.JPEG", "b.JPEG")
    (root / "train.txt").write_text("a.JPEG 0\n")
    (root / "classes.txt").write_text("cat\n")
    (tmp_path / "val.txt").write_text("b.JPEG\n")
    fill(tmp_path / "masks", "b.png")
    options = {"data.lid.val_list": tmp_path / "val.txt", "data.lid.truth_masks": tmp_path / "masks"}
    found = listed("lid", {"data.lid.root": root, **options})
    assert found.table["mask_uri"].to_pylist() == [None, str(tmp_path / "masks/b.png")]


def test_errors_of_the_voc_lists_name_keys_and_flags(devkit: dict[str, Path]) -> None:
    root = devkit["data.voc"]

    def with_values(**options: Any) -> str:
        return remedy(".", "voc", devkit | {f"data.{key}": value for key, value in options.items()})

    assert "--voc" in with_values(voc=root / "JPEGImages")
    assert "data.train_list" in with_values(train_list="absent")
    assert "data.val_list" in with_values(val_list="absent")
    assert "data.test_list" in with_values(test_list="absent")
    assert "data.sbd" in with_values(sbd=root)
    (root / "two.txt").write_text("cactus\nfish\n")
    assert "data.classes" in with_values(classes=root / "two.txt")
    next((root / "SaliencyMaps").iterdir()).unlink()
    assert "data.saliency" in with_values()
    (root / "ImageSets/Segmentation/train_aug.txt").unlink()
    assert "data.sbd" in with_values()
    assert "data.train_list" in with_values()


def test_notes_of_the_voc_lists_name_keys(devkit: dict[str, Path]) -> None:
    root = devkit["data.voc"]
    (root / "SegmentationClassAug").rename(root / "SegmentationClass")
    next((root / "SegmentationClass").glob("train_*")).unlink()
    (note,) = listed("voc", devkit).notes
    assert "no ground-truth mask for 1 of 6 images of split train" in note
    assert "data.sbd" in note


def test_errors_of_tables_and_folders_name_keys_and_flags(devkit: dict[str, Path], tmp_path: Path) -> None:
    table = tmp_path / "photos.csv"
    of_table = {"data.tags.table": table}
    table.write_text("photo,tags\na.jpg,cat\n")
    assert "data.tags.image=COLUMN" in remedy("has no column 'image'", "tags", of_table)
    table.write_text("image,tags\na.jpg,cat\n")
    with_classes = of_table | {"data.classes": devkit["data.classes"]}
    assert "data.tags.ignore_others=true" in remedy("are not among the classes: cat", "tags", with_classes)
    table.write_text(f"image,tags\na.jpg,{';'.join(map(str, range(300)))}\n")
    both = "data.classes=FILE data.tags.ignore_others=true"
    assert both in remedy("names 300 classes", "tags", of_table)
    unknown = remedy("there are gnu", "single", {"data.single.root": fill(tmp_path / "single", "gnu/1.JPEG")})
    assert "data.single.classes" in unknown
    assert "--single" in unknown
    assert "--single" in remedy(r"no folder .*/absent", "single", {"data.single.root": tmp_path / "absent"})
    assert "--web" in remedy("is named as a class", "web", {"data.web.root": tmp_path})
