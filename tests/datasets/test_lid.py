"""The source `lid`: lists with class indices, paths below the root or the folder of the split, and masks for val."""

import time
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.datasets.sources.lid import list_lid

LISTS = {
    "train": "ILSVRC2013_train/n01/n01_1.JPEG 0 2\nILSVRC2013_train/n02/n02_5.JPEG 1\nextra/x.JPEG\n",
    "val": "val/v_1.JPEG\nval/v_2.JPEG 2 0\n",
    "test": "test/t_1.JPEG\n",
}


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def challenge(tmp_path: Path) -> Path:
    """Three classes; empty files for three training images, two val images with masks, and one test image."""
    root = tmp_path / "LID"
    (tmp_path / "classes.txt").write_text("cat\ndog\ncow\n")
    for split, text in LISTS.items():
        (tmp_path / f"{split}.txt").write_text(text)
        fill(root, *[line.split()[0] for line in text.splitlines()])
    fill(tmp_path / "masks", "val/v_1.png", "val/v_2.png")
    return root


def listed(root: Path, **options: Any) -> Listing:
    lists: dict[str, Any] = {f"{split}_list": root.parent / f"{split}.txt" for split in LISTS}
    lists |= {"truth_masks": root.parent / "masks", "classes": root.parent / "classes.txt"}
    return list_lid(root, **(lists | options))


def test_lists_become_rows(challenge: Path) -> None:
    listing = listed(challenge)

    assert listing.classes == ("cat", "dog", "cow")
    assert listing.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    assert listing.notes == ()
    paths = [
        "ILSVRC2013_train/n01/n01_1.JPEG",
        "ILSVRC2013_train/n02/n02_5.JPEG",
        "extra/x.JPEG",
        "val/v_1.JPEG",
        "val/v_2.JPEG",
        "test/t_1.JPEG",
    ]
    columns = listing.table.to_pydict()
    assert columns["image_id"] == [f"lid/{path}" for path in paths]
    assert columns["uri"] == [str(challenge / path) for path in paths]
    assert columns["tags"] == [[0, 2], [1], [], [], [0, 2], []]
    assert columns["split"] == ["train"] * 3 + ["val"] * 2 + ["test"]
    assert columns["domain"] == ["target"] * 6
    assert columns["saliency_uri"] == [None] * 6
    masks = [str(challenge.parent / f"masks/val/v_{number}.png") for number in (1, 2)]
    assert columns["mask_uri"] == [None, None, None, *masks, None]


def test_paths_may_be_relative_to_the_folder_of_the_split_without_suffix(challenge: Path) -> None:
    (challenge.parent / "val.txt").write_text("v_1\nv_2 1\n")
    (challenge.parent / "masks/val").rename(challenge.parent / "flat")

    listing = listed(challenge, truth_masks=challenge.parent / "flat", test_list=None)

    columns = listing.table.slice(3).to_pydict()
    assert columns["image_id"] == ["lid/val/v_1.JPEG", "lid/val/v_2.JPEG"]
    assert columns["mask_uri"] == [str(challenge.parent / f"flat/v_{number}.png") for number in (1, 2)]


def test_indices_may_count_from_one(challenge: Path) -> None:
    (challenge.parent / "train.txt").write_text("extra/x.JPEG 1 3\n")
    listing = listed(challenge, first_index=1, val_list=challenge.parent / "test.txt", test_list=None)
    assert listing.table["tags"].to_pylist() == [[0, 2], []]


def test_absent_folder_of_masks_is_noted(challenge: Path) -> None:
    assert listed(challenge, truth_masks=None).notes == ("no folder of ground-truth masks: nothing is scored",)


def test_missing_masks_are_noted(challenge: Path) -> None:
    (challenge.parent / "masks/val/v_2.png").unlink()
    listing = listed(challenge)
    assert listing.notes == ("no ground-truth mask for 1 of 2 images of split val: these are not scored",)
    assert listing.table["mask_uri"].null_count == 5


INVALID_LISTS = [
    ("train", "extra/x.JPEG 3\n", r"train\.txt, line 1: class index 3 of image extra/x", "data.lid.first_index"),
    ("train", "\nextra/x.JPEG 1 cat -1\n", r"train\.txt, line 2: class index cat, -1 of image", "by data.lid.classes"),
    ("train", "extra/x.JPEG 0\nextra//x.JPEG 1", r"line 2: extra//x\.JPEG is listed twice", "merge"),
    ("train", "extra/y.JPEG 0\n", r"train\.txt names 1 image\(s\) that are not in .*: extra/y\.JPEG", "remove them"),
    ("train", "n" * 300 + "/x.JPEG 0\n", r"names 1 image\(s\) that are not in", "add the images"),
    ("train", "../secret.JPEG 0\n", r"line 1: \.\./secret\.JPEG is outside of the folder of images", "remove it"),
    ("train", "extra/../../secret.JPEG 0\n", "is outside of the folder of images", "remove it"),
    ("train", "/etc/hostname 0\n", "line 1: /etc/hostname is outside of the folder of images", "remove it"),
    ("train", "out/secret.JPEG 0\n", r"names 1 image\(s\) that are not in .*: out/secret\.JPEG", "remove them"),
    ("train", "extra/link.JPEG 0\n", r"names 1 image\(s\) that are not in .*: extra/link\.JPEG", "remove them"),
    ("train", "a\0b 0\n", "is outside of the folder of images", "remove it"),
    ("val", "extra/x.JPEG 0\n", r"extra/x\.JPEG is listed in .*/val\.txt and in .*/train\.txt", "a line"),
    ("val", "\n", r"val\.txt is empty", "name a list"),
    ("classes", "", r"classes\.txt is empty", "add the class names"),
]


@pytest.mark.parametrize(("name", "text", "message", "remedy"), INVALID_LISTS)
def test_invalid_lists_have_a_remedy(challenge: Path, name: str, text: str, message: str, remedy: str) -> None:
    fill(challenge.parent, "secret.JPEG")
    (challenge / "out").symlink_to(challenge.parent)
    (challenge / "extra/link.JPEG").symlink_to(challenge.parent / "secret.JPEG")
    (challenge.parent / f"{name}.txt").write_text(text)

    with pytest.raises(UserError, match=message) as caught:
        listed(challenge)

    assert remedy in caught.value.remedy


@pytest.mark.parametrize("option", ["train_list", "test_list", "classes", "truth_masks"])
def test_missing_files_and_folders_are_errors(challenge: Path, option: str) -> None:
    with pytest.raises(UserError, match=r"no (file|folder) .*none"):
        listed(challenge, **{option: challenge.parent / "none"})


def test_missing_root_is_an_error(tmp_path: Path) -> None:
    none = tmp_path / "none"
    with pytest.raises(UserError, match=r"no folder .*none"):
        list_lid(none, train_list=none, val_list=none, classes=none)


def test_folder_of_many_images_is_read_once(challenge: Path) -> None:
    """20,000 images take a fraction of a second, so the challenge's 364,009 take seconds rather than minutes."""
    folder = challenge / "many"
    folder.mkdir()
    names = [f"{number:05}.JPEG" for number in range(20_000)]
    (folder / names[0]).touch()
    for name in names[1:]:
        (folder / name).hardlink_to(folder / names[0])
    (challenge.parent / "train.txt").write_text("".join(f"many/{name} 0 1\n" for name in names))

    started = time.process_time()
    listing = listed(challenge)

    assert len(listing.table) == 20_003
    assert time.process_time() - started < 5
