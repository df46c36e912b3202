"""Masks of other methods on the page of a comparison: columns, numbers, and checks of names, ids and sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import encode_labels, read_label_mask
from mcis.models.counts import confusion
from mcis.models.metrics import iou, mean
from mcis.platform.cli import app
from mcis.platform.reporting.other_methods import OtherMethod, find_masks, parse_methods


@pytest.fixture(scope="module")
def folder(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on eight images, and a method with masks of six of them: squares in a corner."""
    folder = tmp_path_factory.mktemp("methods")
    for name in ("a", "b"):
        scored(folder / "workspace", name, data=folder / "data")
    (folder / "psa").mkdir()
    for number in range(6):
        (folder / "psa" / f"val{number}.png").write_bytes(encode_labels(square_of(number)))
    return folder


def square_of(number: int) -> np.ndarray:
    mask = np.zeros((40, 56), np.uint8)
    mask[:20, : 20 + number] = 1 + number % 2
    return mask


def invoke(folder: Path, *arguments: str) -> Result:
    command = ["compare", *arguments, "--workspace", str(folder / "workspace"), "--html", str(folder / "page.html")]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def test_a_method_is_a_column_next_to_the_runs(folder: Path, parsed: Callable[..., Any]) -> None:
    done = invoke(folder, "a", "b", "--with", f"PSA={folder}/psa", "--images", "8")
    assert done.exit_code == 0, done.output
    assert "note:  PSA has no mask of 2 of 8 images: val6, val7" in done.output

    page = parsed(folder / "page.html")
    assert "PSA has no mask of 2 of 8 images: val6, val7" in page.text
    assert "6 of the 6 images that all runs and methods have" in page.text
    assert "8 of the 8 images that all runs have" in page.text  # the pseudo masks
    shown = {attrs["alt"] for attrs in page.of("img")}
    for number in range(6):
        assert f"PSA: mask of val{number}" in shown
        truth = np.array(Image.open(folder / "data" / f"0-val{number}.png"))
        assert f"PSAmIoU here {mean(iou(confusion(truth, square_of(number), 2))):.1f}" in page.text
    assert not any("val6" in text and "prediction" in text for text in shown)


def test_one_run_is_enough_next_to_a_method(folder: Path, parsed: Callable[..., Any]) -> None:
    done = invoke(folder, "a", "--with", f"PSA={folder}/psa", "--images", "3")
    assert done.exit_code == 0, done.output
    page = parsed(folder / "page.html")
    assert "3 of the 6 images that all runs and methods have" in page.text
    assert "No image is common" not in page.text
    assert "shown withPSA" in page.text
    assert invoke(folder, "a").exit_code != 0


def test_masks_are_named_like_imported_files(tmp_path: Path) -> None:
    names = ["a.PNG", "b.jpg.png", "cafe\u0301.png", "d.png"]
    for name in names:
        (tmp_path / name).write_bytes(encode_labels(square_of(0)))
    image_ids = ["photos/a.jpg", "photos/b.jpg", "photos/caf\u00e9.jpg", "photos/e.jpg"]
    found = find_masks(OtherMethod("PSA", tmp_path), image_ids)
    assert list(found.files) == image_ids[:3]
    assert [path.name for path in found.files.values()] == names[:3]
    assert (found.missing, found.unused) == (["photos/e.jpg"], ["d"])


def test_masks_named_after_images_in_two_splits_belong_to_neither(tmp_path: Path) -> None:
    (tmp_path / "001.png").write_bytes(encode_labels(square_of(0)))
    method = OtherMethod("PSA", tmp_path)
    assert list(find_masks(method, ["val/001.jpg"]).files) == ["val/001.jpg"]
    with pytest.raises(UserError, match="has no mask of an image that all runs predict; it has 001"):
        find_masks(method, ["val/001.jpg"], ["train/001.jpg", "val/001.jpg"])


def test_ignored_pixels_are_shown_without_a_score(folder: Path, tmp_path: Path, parsed: Callable[..., Any]) -> None:
    mask = square_of(0)
    mask[30:] = 255
    (tmp_path / "val0.png").write_bytes(encode_labels(mask))
    (tmp_path / "2007_000001.png").write_bytes(encode_labels(mask))
    done = invoke(folder, "a", "--with", f"OAA+={tmp_path}")
    assert done.exit_code == 0, done.output
    assert "OAA+ has no mask of 7 of 8 images" in done.output
    assert "1 masks of OAA+ belong to no predicted image: 2007_000001" in done.output
    page = parsed(folder / "page.html")
    assert "OAA+mIoU here" not in page.text


@pytest.mark.parametrize("argument", ["psa", "=psa", "PSA=", "PSA=nowhere"])
def test_a_value_that_is_no_name_and_folder_is_refused(argument: str, folder: Path) -> None:
    with pytest.raises(UserError, match="NAME=FOLDER"):
        parse_methods([argument], ["a"])


def test_two_columns_have_different_names(folder: Path) -> None:
    with pytest.raises(UserError, match="a is given twice"):
        parse_methods([f"a={folder}"], ["a"])
    assert parse_methods([f"b=c={folder}"[2:]], ["a"]) == [OtherMethod("c", folder)]


def test_masks_of_other_images_sizes_or_labels_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no mask of an image that all runs predict; it has val0"):
        find_masks(OtherMethod("PSA", folder / "psa"), ["train0", "train1"])
    file = tmp_path / "val0.png"
    file.write_bytes(encode_labels(square_of(1)))
    with pytest.raises(UserError, match=r"40x56 pixels \(height x width\), expected 40x55|40x56 pixels"):
        read_label_mask(str(file), (40, 55), 2)
    with pytest.raises(UserError, match="has label 2"):
        read_label_mask(str(file), (40, 56), 1)
    Image.new("RGB", (56, 40), (1, 2, 3)).save(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_label_mask(str(file), (40, 56), 2)
    mask = read_label_mask(str(folder / "psa" / "val3.png"), (40, 56), 2)
    np.testing.assert_array_equal(mask.labels, square_of(3))


def test_methods_are_shown_with_images_of_a_segmentation(folder: Path) -> None:
    done = invoke(folder, "a", "b", "--with", f"PSA={folder}/psa", "--images", "0")
    assert done.exit_code != 0
    assert "--with and --images 0" in done.output
