"""Files of other programs belong to the images that they are named after, in whatever split these are."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import resolve
from mcis.platform.outputs.imported_files import match_files
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import localization, predict, pseudo_masks

NO_CLASSIFIER = "segmenter.init=pretrained"
IDS = ["train/001.jpg", "train/002.jpg", "val/001.jpg", "val/003.png"]
FILES = {name: f"{name}.png" for name in ("001", "003", "val/001")}


def test_a_file_name_of_images_in_two_splits_belongs_to_neither() -> None:
    assert match_files(IDS[:2], FILES, IDS) == [None, None]
    assert match_files(IDS[2:], {"001": "001.png", "003": "003.png"}, IDS) == [None, "003.png"]
    assert match_files(IDS[2:], FILES, IDS) == ["val/001.png", "003.png"]
    assert match_files(IDS[:2], FILES) == ["001.png", None]


def test_a_name_with_a_suffix_is_that_of_no_image_if_another_one_has_the_stem() -> None:
    ids = ["a/001.png", "b/001.jpg", "c/002.tif"]
    assert match_files(ids, {"001.png": "1", "002.tif": "2"}) == [None, None, "2"]
    assert match_files(ids[:1], {"001.png": "1"}, iter(ids)) == [None]
    assert match_files(ids, {"a/001.jpg": "1"}) == ["1", None, None]
    assert match_files(["a/001.png", "a/001.jpg"], {"a/001": "1"}) == [None, None]


@pytest.mark.parametrize(
    ("stage", "file", "overrides"),
    [
        (predict, "001.png", ["predict.masks=FOLDER"]),
        (pseudo_masks, "001.png", ["pseudo_masks.rule=imported", "pseudo_masks.masks=FOLDER", NO_CLASSIFIER]),
        (localization, "001.npy", ["localize.maps=FOLDER", NO_CLASSIFIER]),
    ],
)
def test_a_file_of_an_image_in_another_split_is_refused_before_a_run(
    tmp_path: Path, stage: Any, file: str, overrides: list[str]
) -> None:
    """The only file is named after an image of train and one of val."""
    rows = ["image,tags,split", "train/001.jpg,cat,train", "train/002.jpg,dog,train", "val/001.jpg,cat,val"]
    for row in rows[1:]:
        path = tmp_path / row.split(",")[0]
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 40)).save(path)
    (tmp_path / "photos.csv").write_text("\n".join(rows))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / file).touch()

    values = [text.replace("FOLDER", str(theirs)) for text in overrides]
    config = resolve(str(tmp_path / "photos.csv"), "scratch", {}, values).config
    with pytest.raises(UserError, match=r"none of the 1 .* in .*theirs belongs to one of the"):
        stage.check(config, list_images(config), Workspace(tmp_path / "w"))
