"""Photographs that are given as files, folders and tables: each is listed once, under a unique name."""

import os
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.sources.lists import relative_name
from mcis.datasets.sources.photographs import Photograph, list_photographs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder `photos` with empty files, in it and in two subfolders; some have the same name."""
    for name in ("a.jpg", "b.png", "x/a.jpg", "x/b.JPG", "x/.hidden", "y/no suffix", "y/two.dots.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return tmp_path


def listed(root: Path, *items: str, out: str = "out") -> tuple[list[Photograph], list[str]]:
    """Lists photographs; items and `out` are relative to the root."""
    return list_photographs([str(root / item) for item in items], excluded=root / out)


def names_of(root: Path, *items: str, out: str = "out") -> dict[str, str]:
    """Returns path below the root -> name of the photograph."""
    photographs, _ = listed(root, *items, out=out)
    return {os.path.relpath(photograph.uri, root): photograph.name for photograph in photographs}


# --- names


def test_names_are_paths_below_the_given_folder(root: Path) -> None:
    assert names_of(root, "photos") == {
        "photos/a.jpg": "a",
        "photos/b.png": "b",
        "photos/x/a.jpg": "x/a",
        "photos/x/b.JPG": "x/b",
        "photos/y/no suffix": "y/no suffix",
        "photos/y/two.dots.jpg": "y/two.dots",
    }


def test_dot_in_the_name_of_a_folder_is_no_suffix(root: Path) -> None:
    (root / "photos").rename(root / "v1.2")
    assert names_of(root, ".")["v1.2/y/no suffix"] == "v1.2/y/no suffix"


def test_parameters_of_a_uri_are_no_part_of_the_name() -> None:
    uri = "s3://bucket/photos/a.jpg?endpoint_override=storage.example.org:9000&scheme=http"
    photographs, _ = list_photographs([uri], excluded=Path("out"))
    assert photographs == [Photograph(uri, "a")]


def test_photographs_of_one_name_keep_their_suffix(root: Path) -> None:
    (root / "photos" / "a.png").write_bytes(b"")
    assert names_of(root, "photos/a.jpg", "photos/a.png") == {"photos/a.jpg": "a.jpg", "photos/a.png": "a.png"}


def test_photographs_of_one_name_and_suffix_have_their_whole_path(root: Path) -> None:
    whole = str(root).lstrip("/")
    assert names_of(root, "photos/a.jpg", "photos/x/a.jpg", "photos/b.png") == {
        "photos/a.jpg": f"{whole}/photos/a.jpg",
        "photos/x/a.jpg": f"{whole}/photos/x/a.jpg",
        "photos/b.png": "b",
    }


def test_names_that_differ_only_in_case_keep_their_suffix(root: Path) -> None:
    (root / "A.jpeg").write_bytes(b"")
    assert set(names_of(root, "A.jpeg", "photos/a.jpg").values()) == {"A.jpeg", "a.jpg"}


def test_name_that_another_photograph_takes_on_is_distinguished_too(root: Path) -> None:
    for name in ("a.png", "a.jpg.gif"):
        (root / "photos" / name).write_bytes(b"")
    names = names_of(root, "photos/a.jpg", "photos/a.png", "photos/a.jpg.gif")
    assert len({name.casefold() for name in names.values()}) == 3


def test_photographs_of_a_table_are_named_by_its_paths(root: Path) -> None:
    table = root / "photos" / "t.csv"
    table.write_text(f"image,tags\nx/a.jpg,cat\n{root}/photos/b.png,\ns3://bucket/c/d.jpg,\n")

    photographs, _ = listed(root, "photos/t.csv")

    assert photographs == [
        (f"{root}/photos/x/a.jpg", "x/a"),
        (f"{root}/photos/b.png", "b"),
        ("s3://bucket/c/d.jpg", "d"),
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("2007_000032", "2007_000032"),
        ("web/cat/a.jpg", "web/cat/a.jpg"),
        ("/data/a.jpg", "data/a.jpg"),
        ("s3://bucket/key.jpg", "s3/bucket/key.jpg"),
        ("a/../b", "b"),
        ("../b", "b"),
        ("/../../b", "b"),
        ("s3://../../b", "b"),
        ("a/../../b", "b"),
        ("..", None),
    ],
)
def test_relative_name_never_leads_out(path: str, name: str | None) -> None:
    assert relative_name(path) == name


def test_a_name_that_is_too_long_is_refused_before_the_prediction(tmp_path: Path) -> None:
    (tmp_path / f"{'a' * 251}.png").touch()
    photographs, _ = list_photographs([str(tmp_path)], excluded=tmp_path / "out")
    assert [photograph.name for photograph in photographs] == ["a" * 251]

    (tmp_path / ("b" * 255)).touch()
    with pytest.raises(UserError, match="the longest has 255 bytes") as caught:
        list_photographs([str(tmp_path)], excluded=tmp_path / "out")
    assert "at most 251 bytes" in caught.value.expected


# --- what is left out


def test_hidden_files_are_left_out(root: Path) -> None:
    _, notes = listed(root, ".")
    assert notes == ["photographs: left out 1 hidden file(s)"]


def test_paths_with_control_characters_are_left_out(root: Path) -> None:
    for name in ("c\a.jpg", "d\ne.jpg"):
        (root / "photos" / name).write_bytes(b"")
    photographs, notes = listed(root, "photos", "photos/c\a.jpg")
    assert len(photographs) == 6
    assert "left out 3 file(s) whose path has line breaks or control characters" in " ".join(notes)


def test_file_that_is_given_twice_counts_once(root: Path) -> None:
    photographs, notes = list_photographs([f"{root}/photos", f"{root}/photos/../photos/x/a.jpg"], excluded=root / "out")
    assert len(photographs) == 6
    assert "photographs: left out 1 file(s) that are given more than once" in notes


def test_file_that_is_given_through_a_linked_folder_counts_once(root: Path) -> None:
    (root / "linked").symlink_to(root / "photos")
    (root / "photos/t.csv").write_text("image,tags\na.jpg,cat\n")
    for other in ("photos/t.csv", "photos/a.jpg"):
        photographs, _ = listed(root, "linked/a.jpg", other)
        assert photographs == [Photograph(f"{root}/photos/a.jpg", "a")]


def test_predictions_below_the_photographs_are_left_out(root: Path) -> None:
    (root / "photos" / "out" / "masks").mkdir(parents=True)
    (root / "photos" / "out" / "masks" / "a.png").write_bytes(b"")
    assert "photos/out/masks/a.png" not in names_of(root, "photos", out="photos/out")


def test_links_to_folders_are_not_followed(root: Path) -> None:
    (root / "photos" / "loop").symlink_to(root / "photos", target_is_directory=True)
    assert len(names_of(root, "photos")) == 6


# --- errors


@pytest.mark.parametrize("uri", ["s3://AKIA:hunter2@bucket/a.jpg", "s3://bucket/a.csv?X-Amz-Signature=hunter2"])
def test_uri_with_credentials_is_refused_and_not_repeated(root: Path, uri: str) -> None:
    with pytest.raises(UserError, match=r"password, key, token or signature in s3://bucket/a\.(jpg|csv)") as caught:
        list_photographs([str(root / "photos"), uri], excluded=root / "out")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "message"), [("empty", "no file in"), ("no.csv", "no table"), ("other.csv", "has no column 'image'")]
)
def test_item_without_photographs_is_an_error(root: Path, item: str, message: str) -> None:
    (root / "empty").mkdir()
    (root / "other.csv").write_text("photo\na.jpg\n")
    with pytest.raises(UserError, match=message) as caught:
        listed(root, item)
    assert "data.tags" not in caught.value.remedy  # a key that `mcis predict` refuses
