"""Photographs that are given as files, folders and tables: each is found once, under a name that no other has."""

import os
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.sources.lists import relative_name
from mcis.datasets.sources.photographs import list_photographs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`photos` with files in two folders, some of the same name."""
    for name in ("a.jpg", "b.png", "x/a.jpg", "x/b.JPG", "x/.hidden", "y/no suffix", "y/two.dots.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


def named(root: Path, *given: str, out: str = "out") -> dict[str, str]:
    """Name by path below `root` of what is found."""
    found = list_photographs([str(root / item) for item in given], excluded=root / out)[0]
    return {os.path.relpath(photograph.uri, root): photograph.name for photograph in found}


def test_a_folder_is_read_with_its_sub_folders_and_names_are_paths_in_it(root: Path) -> None:
    paths = ("a.jpg", "b.png", "x/a.jpg", "x/b.JPG", "y/no suffix", "y/two.dots.jpg")
    names = ("a", "b", "x/a", "x/b", "y/no suffix", "y/two.dots")
    assert named(root, "photos") == {f"photos/{path}": name for path, name in zip(paths, names, strict=True)}
    assert list_photographs([str(root)], excluded=root / "out")[1] == ["photographs: left out 1 hidden file(s)"]


def test_photographs_of_one_name_keep_their_suffix_or_else_their_whole_path(root: Path) -> None:
    (root / "photos" / "a.png").write_bytes(b"")
    assert named(root, "photos/a.jpg", "photos/a.png") == {"photos/a.jpg": "a.jpg", "photos/a.png": "a.png"}
    whole = str(root).lstrip("/")
    assert named(root, "photos/a.jpg", "photos/x/a.jpg", "photos/b.png") == {
        "photos/a.jpg": f"{whole}/photos/a.jpg",
        "photos/x/a.jpg": f"{whole}/photos/x/a.jpg",
        "photos/b.png": "b",
    }
    (root / "A.jpeg").write_bytes(b"")
    assert set(named(root, "A.jpeg", "photos/a.jpg").values()) == {"A.jpeg", "a.jpg"}


@pytest.mark.parametrize("given", ["s3://AKIA:hunter2@bucket/a.jpg", "s3://bucket/a.csv?X-Amz-Signature=hunter2"])
def test_a_uri_with_credentials_is_refused_and_not_repeated(root: Path, given: str) -> None:
    with pytest.raises(UserError, match=r"password, key, token or signature in s3://bucket/a\.(jpg|csv)") as caught:
        list_photographs([str(root / "photos"), given], excluded=root / "out")
    assert "hunter2" not in str(caught.value)


def test_a_name_that_another_takes_on_is_told_apart_too(root: Path) -> None:
    for name in ("a.png", "a.jpg.gif"):
        (root / "photos" / name).write_bytes(b"")
    names = named(root, "photos/a.jpg", "photos/a.png", "photos/a.jpg.gif")
    assert len({name.casefold() for name in names.values()}) == 3


def test_a_table_names_images_as_it_has_them(root: Path) -> None:
    (root / "photos" / "t.csv").write_text(f"image,tags\nx/a.jpg,cat\n{root}/photos/b.png,\ns3://bucket/c/d.jpg,\n")
    assert list_photographs([str(root / "photos" / "t.csv")], excluded=root / "out")[0] == [
        (f"{root}/photos/x/a.jpg", "x/a"),
        (f"{root}/photos/b.png", "b"),
        ("s3://bucket/c/d.jpg", "d"),
    ]


def test_a_file_that_is_given_twice_counts_once(root: Path) -> None:
    found, notes = list_photographs([f"{root}/photos", f"{root}/photos/../photos/x/a.jpg"], excluded=root / "out")
    assert len(found) == 6
    assert "photographs: left out 1 file(s) that are given more than once" in notes


def test_predictions_below_the_photographs_are_not_predicted_again(root: Path) -> None:
    (root / "photos" / "out" / "masks").mkdir(parents=True)
    (root / "photos" / "out" / "masks" / "a.png").write_bytes(b"")
    assert "photos/out/masks/a.png" not in named(root, "photos", out="photos/out")
    (root / "photos" / "loop").symlink_to(root / "photos", target_is_directory=True)
    assert len(named(root, "photos", out="photos/out")) == 6


@pytest.mark.parametrize(
    ("given", "found"), [("empty", "no file in"), ("no.csv", "no table"), ("other.csv", "has no column 'image'")]
)
def test_what_holds_no_photograph_is_an_error(root: Path, given: str, found: str) -> None:
    (root / "empty").mkdir()
    (root / "other.csv").write_text("photo\na.jpg\n")
    with pytest.raises(UserError, match=found):
        list_photographs([str(root / given)], excluded=root / "out")


def test_a_name_lies_below_the_folder_or_nowhere() -> None:
    names = {"2007_000032": "2007_000032", "web/cat/a.jpg": "web/cat/a.jpg", "/data/a.jpg": "data/a.jpg"}
    names |= {"s3://bucket/key.jpg": "s3/bucket/key.jpg", "a/../b": "b"}
    assert {path: relative_name(path) for path in names} == names
    assert [relative_name(path) for path in ("../b", "/../b", "s3://../../b")] == [None] * 3
