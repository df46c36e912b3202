"""Names of classes and files: commas, two Unicode forms of the same text, and lengths at the limit."""

import csv
import json
import unicodedata
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.classes import read_classes, split_names
from mcis.datasets.errors import UserError
from mcis.datasets.formats.importing import import_data_set
from mcis.datasets.index import Listing, check_images, merge
from mcis.datasets.sources.lists import listing_table, map_paths
from mcis.datasets.sources.tagged import list_tagged
from mcis.datasets.sources.web import list_web
from mcis.datasets.storage.folders import TEMPORARY_NAME, atomic_write
from mcis.platform.cli import app

TENCH = "tench, Tinca tinca"
LION_NFC = "L\N{LATIN SMALL LETTER O WITH DIAERESIS}we"
LION_NFD = "Lo\N{COMBINING DIAERESIS}we"


def draw(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40), (90, 120, 30)).save(path)


def write_table(path: Path, *rows: tuple[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "tags"), *rows])
    return path


def write_coco(folder: Path, names: dict[str, str]) -> Path:
    """Writes a COCO file with a box of one class for each image, by file name."""
    categories = [{"id": number, "name": name} for number, name in enumerate(sorted(set(names.values())))]
    number_of = {category["name"]: category["id"] for category in categories}
    images = []
    annotations = []
    for number, (name, category) in enumerate(names.items()):
        images.append({"id": number, "file_name": name, "height": 40, "width": 40})
        box = {"id": number, "image_id": number, "category_id": number_of[category], "bbox": [0, 0, 9, 9]}
        annotations.append(box | {"segmentation": [[1, 1, 20, 1, 20, 20]], "iscrowd": 0, "area": 190})
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = folder / "coco.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# --- separators


def test_a_json_list_holds_tags_with_separators(tmp_path: Path) -> None:
    table = write_table(
        tmp_path / "t.csv", ("a.png", json.dumps([TENCH, "cat"])), ("b.png", "cat;dog"), ("c.png", ""), ("d.png", "[]")
    )
    listing = list_tagged(table)
    assert listing.classes == ("cat", "dog", TENCH)
    assert listing.table["tags"].to_pylist() == [[0, 2], [0, 1], [], []]


def test_brackets_that_are_no_json_stay_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names without brackets or quotes") as caught:
        list_tagged(write_table(tmp_path / "t.csv", ("a.png", "[cat, dog")))
    assert "[cat" in caught.value.found


@pytest.mark.parametrize(
    "texts", [[TENCH, "cat"], [f'"{TENCH}",cat'], [f'cat, "{TENCH}"'], [json.dumps(["cat", TENCH])], ["FILE"]]
)
def test_lists_of_names_are_read_in_every_way(texts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text(f"{TENCH}\ncat\n", encoding="utf-8")
    texts = [str(file) if text == "FILE" else text for text in texts]
    assert sorted(split_names(texts, {TENCH, "cat", "dog"})) == ["cat", TENCH]


def test_a_list_that_is_no_json_is_refused() -> None:
    with pytest.raises(UserError, match="class names"):
        split_names(['["cat", 3]'], {"cat"})


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        ([], ["cat", "dog", TENCH]),
        (["--classes", TENCH], [TENCH]),
        (["--classes", f'"{TENCH}",cat'], ["cat", TENCH]),
        (["--classes", TENCH, "--classes", "cat"], ["cat", TENCH]),
        (["--classes", "cat,dog"], ["cat", "dog"]),
    ],
)
def test_names_with_commas_are_imported(options: list[str], classes: list[str], tmp_path: Path) -> None:
    names = {"a.png": TENCH, "b.png": "cat", "c.png": "dog"}
    for name in names:
        draw(tmp_path / "photos" / name)
    source = write_coco(tmp_path, names)
    command = ["import", "coco", str(source), "--images", str(tmp_path / "photos"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    assert read_classes(tmp_path / "out" / "classes.txt") == tuple(classes)
    assert list_tagged(tmp_path / "out" / "photos.csv").classes == tuple(classes)

    again = CliRunner().invoke(app, [*command, *options, "--split", "val"])
    assert again.exit_code == 0, again.output
    assert list_tagged(tmp_path / "out" / "photos.csv").classes == tuple(classes)


def test_a_class_that_does_not_occur_is_shown_with_its_commas(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    source = write_coco(tmp_path, {"a.png": TENCH})
    with pytest.raises(UserError, match="cannot be imported: goldfish") as caught:
        import_data_set("coco", source, tmp_path / "out", images=tmp_path, classes=["goldfish"])
    assert f'"{TENCH}"' in caught.value.expected


# --- Unicode forms


def test_two_forms_of_a_tag_are_one_class(tmp_path: Path) -> None:
    listing = list_tagged(write_table(tmp_path / "t.csv", ("a.png", LION_NFC), ("b.png", f"{LION_NFD};cat")))
    assert listing.classes == tuple(sorted((LION_NFC, "cat")))
    assert sorted(map(len, listing.table["tags"].to_pylist())) == [1, 2]
    assert not [note for note in listing.notes if "misspelling" in note]


def test_a_class_file_may_have_another_form_than_the_table(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text(f"{LION_NFD}\ncat\n", encoding="utf-8")
    table = write_table(tmp_path / "t.csv", ("a.png", LION_NFC), ("b.png", "cat"))
    listing = list_tagged(table, classes=tmp_path / "classes.txt")
    assert listing.classes == (LION_NFC, "cat")
    assert listing.table["tags"].to_pylist() == [[0], [1]]


@pytest.mark.parametrize(("on_disk", "in_table"), [(LION_NFD, LION_NFC), (LION_NFC, LION_NFD)])
def test_files_are_found_in_the_other_form_with_one_note(on_disk: str, in_table: str, tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / on_disk / f"{on_disk}-{number}.png")
    rows = [(f"{in_table}/{in_table}-{number}.png", "cat") for number in range(3)]
    listing = list_tagged(write_table(tmp_path / "t.csv", *rows, ("absent-ä.png", "cat")))
    reasons = check_images(listing.table)["reason"].to_pylist()
    assert reasons[:3] == [None] * 3
    assert "No such file" in reasons[3]
    (note,) = [note for note in listing.notes if "another spelling" in note]
    assert "3 file(s)" in note


def test_paths_of_other_systems_are_found(tmp_path: Path) -> None:
    """A file with the written name comes first; `..` that only another spelling has leads nowhere."""
    for name in ("my photos/a b.png", "c%20d.png", "c d.png", "ä.png"):
        draw(tmp_path / "data" / name)
    draw(tmp_path / "outside.png")
    names = ["my photos\\a b.png", "c%20d.png", "%C3%A4.png", "..\\outside.png", "%2E%2E/outside.png", "absent%20.png"]
    listing = list_tagged(write_table(tmp_path / "data" / "t.csv", *((name, "cat") for name in names)))

    found = ["my photos/a b.png", "c%20d.png", "ä.png"]
    assert listing.table["image_id"].to_pylist() == [*found, *names[3:]]
    reasons = check_images(listing.table)["reason"].to_pylist()
    assert reasons[:3] == [None] * 3
    assert all("No such file" in reason for reason in reasons[3:])
    (note,) = [note for note in listing.notes if "another spelling" in note]
    assert "2 file(s)" in note


def test_a_folder_of_a_class_is_found_in_the_other_form(tmp_path: Path) -> None:
    draw(tmp_path / LION_NFD / "a.png")
    listing = list_web([tmp_path], (LION_NFC, "cat"))
    assert listing.table["tags"].to_pylist() == [[0]]
    assert listing.table["uri"].to_pylist() == [str(tmp_path / LION_NFD / "a.png")]


def test_an_import_finds_the_other_form(tmp_path: Path) -> None:
    draw(tmp_path / "photos" / f"{LION_NFD}.png")
    source = write_coco(tmp_path, {f"{LION_NFC}.png": LION_NFD})
    lines = import_data_set("coco", source, tmp_path / "out", images=tmp_path / "photos")
    listing = list_tagged(tmp_path / "out" / "photos.csv")
    assert listing.classes == (unicodedata.normalize("NFC", LION_NFD),)
    assert check_images(listing.table)["reason"].to_pylist() == [None]
    assert lines[1:] == [
        f"note: 1 image(s) were found under another path or spelling: {LION_NFC}.png -> {LION_NFD}.png"
    ]


# --- lengths


def list_table(table: Path) -> Listing:
    """Lists a table as a run does."""
    return merge(list_tagged(table))


@pytest.mark.parametrize(("name", "num_bytes"), [("a" * 248 + ".jpg", 252), ("ä" * 126 + ".jpg", 256)])
def test_a_name_that_is_too_long_is_refused_with_its_length_and_the_limit(
    name: str, num_bytes: int, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"the longest has {num_bytes} bytes") as caught:
        list_table(write_table(tmp_path / "t.csv", (f"below/{name}", "cat")))
    assert "at most 251 bytes" in caught.value.expected
    assert "255" in caught.value.expected


def test_the_longest_name_of_a_file_system_is_accepted(tmp_path: Path) -> None:
    name = "a" * 247 + ".png"
    draw(tmp_path / name)
    listing = list_table(write_table(tmp_path / "t.csv", (name, "cat")))
    assert check_images(listing.table)["reason"].to_pylist() == [None]
    import_data_set("coco", write_coco(tmp_path, {name: "cat"}), tmp_path / "out")
    assert (tmp_path / "out" / "masks" / "train" / f"{name}.png").is_file()


def test_a_temporary_name_is_never_too_long(tmp_path: Path) -> None:
    with atomic_write(tmp_path / ("b" * 251 + ".png")) as temporary:
        assert TEMPORARY_NAME.fullmatch(temporary.name)
        temporary.write_bytes(b"mask")
    assert (tmp_path / ("b" * 251 + ".png")).read_bytes() == b"mask"


def test_a_list_of_another_source_states_the_length(tmp_path: Path) -> None:
    rows = listing_table(
        image_id=["x"], uri=[f"{tmp_path}/{'a' * 300}.jpg"], domain="target", split="train", tags=[[0]]
    )
    (reason,) = check_images(rows)["reason"].to_pylist()
    length = len(str(tmp_path)) + 305
    assert reason.startswith(f"cannot be read: the longest name in it has 304 bytes and the whole path {length}; ")
    assert "255 and 4095" in reason


def test_an_import_refuses_a_name_whose_mask_would_be_too_long(tmp_path: Path) -> None:
    name = "a" * 250 + ".png"
    draw(tmp_path / name)
    with pytest.raises(UserError, match="the longest has 254 bytes") as caught:
        import_data_set("coco", write_coco(tmp_path, {name: "cat"}), tmp_path / "out", images=tmp_path)
    assert "at most 251 bytes" in caught.value.expected


@pytest.mark.parametrize("names", [("x.png", "x.PNG"), (f"{LION_NFC}.png", f"{LION_NFD}.png")])
def test_two_masks_of_an_image_are_named(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        draw(tmp_path / name)
    with pytest.raises(UserError, match=f"two predictions of {names[0][:-4]}: ") as caught:
        map_paths(tmp_path, "prediction")
    for name in names:
        assert f"{tmp_path}/{name}" in caught.value.found
