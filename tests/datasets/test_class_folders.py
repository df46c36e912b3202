"""The sources of class folders, `single` and `web`: their classes, and what they leave out."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing, merge
from mcis.datasets.sources.class_names import ClassNames, voc_folders
from mcis.datasets.sources.single_label import list_single_label
from mcis.datasets.sources.web import list_web

CLASSES = ("cat", "cow", "dog")
DOG = "n02099601"  # golden retriever
CAT = "n02123045"  # tabby
TENCH = "n01440764"  # a fish, which is no VOC class


def fill(folder: Path, *names: str) -> None:
    """Creates empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def ids(listing: Listing) -> list[str]:
    return listing.table["image_id"].to_pylist()


def tags(listing: Listing) -> list[list[int]]:
    return listing.table["tags"].to_pylist()


def has_note(listing: Listing, text: str) -> bool:
    return any(text in note for note in listing.notes)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Three empty files of two VOC classes, and two of a fish."""
    root = tmp_path / "ILSVRC"
    images = root / "Data/CLS-LOC/train"
    names = (f"{DOG}/{DOG}_10", f"{DOG}/{DOG}_2", f"{CAT}/{CAT}_1", f"{TENCH}/a", f"{TENCH}/b")
    fill(images, *[f"{name}.JPEG" for name in names])
    return root


def listed(*roots: Path, **options: Any) -> Listing:
    return list_single_label(roots, VOC_CLASSES, **options)


# --- the table of folders


def synsets() -> dict[str, str]:
    """Returns synset of ImageNet -> name of its VOC class."""
    return {folder: name for folder, name in voc_folders().items() if "." not in folder}


def test_every_voc_class_has_synsets() -> None:
    assert set(synsets().values()) == set(VOC_CLASSES)
    assert all(re.fullmatch(r"n\d{8}", synset) for synset in synsets())


def test_the_number_of_synsets_of_each_class_is_unchanged() -> None:
    classes = list(synsets().values())
    assert classes.count("dog") == 118 + 1  # the breeds of ILSVRC, and dog itself
    assert classes.count("bird") == 59 + 1
    assert len(classes) == 258


@pytest.mark.parametrize(
    "synset", [TENCH, "n02115641", "n02687172", "n03930630"], ids=["fish", "dingo", "aircraft carrier", "pickup"]
)
def test_doubtful_synsets_are_no_class(synset: str) -> None:
    assert synset not in synsets()


# --- ImageNet and Caltech-256


@pytest.mark.parametrize("above", [".", "Data", "Data/CLS-LOC", "Data/CLS-LOC/train"])
def test_imagenet_is_listed_from_any_folder_above(imagenet: Path, above: str) -> None:
    listing = listed(imagenet / above)

    assert listing.classes == VOC_CLASSES
    assert listing.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    names = (f"{DOG}/{DOG}_10", f"{DOG}/{DOG}_2", f"{CAT}/{CAT}_1")
    assert ids(listing) == [f"single/{name}.JPEG" for name in names]
    assert tags(listing) == [[11], [11], [7]]
    for row, name in zip(listing.table.to_pylist(), names, strict=True):
        assert row["uri"] == str(imagenet / f"Data/CLS-LOC/train/{name}.JPEG")
        assert row["domain"] == "source"
        assert row["split"] == "train"
        assert row["mask_uri"] is None
        assert row["saliency_uri"] is None


def test_imagenet_notes_other_folders_and_absent_classes(imagenet: Path) -> None:
    listing = listed(imagenet)
    assert has_note(listing, f"left out 1 folder(s) that match no class: {TENCH}")
    (absent,) = (note for note in listing.notes if "no image of class aeroplane, " in note)
    assert "dog" not in absent


@pytest.mark.parametrize("root", [".", "256_ObjectCategories"])
def test_caltech_is_listed(tmp_path: Path, root: str) -> None:
    fill(tmp_path / "256_ObjectCategories", "145.motorbikes-101/145_0001.jpg", "056.dog/056_0001.jpg", "056.dog/greg/x")
    fill(tmp_path / "256_ObjectCategories", "257.clutter/257_0001.jpg")

    listing = listed(tmp_path / root)

    assert ids(listing) == ["single/056.dog/056_0001.jpg", "single/145.motorbikes-101/145_0001.jpg"]
    assert tags(listing) == [[11], [13]]
    assert has_note(listing, "left out 1 folder(s) that match no class: 257.clutter")
    assert has_note(listing, "left out 1 file(s) or folder(s) that are not images")


# --- plain class folders


def test_folders_named_after_the_classes_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, "dog/b.png", "dog/a.JPG", "cat/x.webp", "cat/.notes", "zebra/z.jpg", "classes.txt")

    listing = listed(tmp_path)

    assert ids(listing) == ["single/cat/x.webp", "single/dog/a.JPG", "single/dog/b.png"]
    assert tags(listing) == [[7], [11], [11]]
    assert listing.table["uri"][1].as_py() == str(tmp_path / "dog/a.JPG")
    assert set(listing.table["domain"].to_pylist()) == {"source"}
    assert set(listing.table["split"].to_pylist()) == {"train"}
    assert has_note(listing, "left out 1 folder(s) that match no class: zebra")
    assert has_note(listing, "left out 2 file(s) or folder(s) that are not images")


def test_class_file_gives_folders_of_any_name_a_class(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "chats/1.png", "chiens/2.png", "dog/3.png")
    (tmp_path / "names").write_text("chats cat\nchiens dog\n")

    listing = listed(tmp_path / "photos", classes=tmp_path / "names")

    assert ids(listing) == ["single/chats/1.png", "single/chiens/2.png"]
    assert tags(listing) == [[7], [11]]
    assert has_note(listing, "left out 1 folder(s) that match no class: dog")


def test_folders_of_several_data_sets_can_be_mixed(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", "056.dog/2.jpg", "cat/3.png")
    assert ids(listed(tmp_path)) == ["single/056.dog/2.jpg", "single/cat/3.png", f"single/{DOG}/1.JPEG"]


def test_classes_may_be_named_like_synsets(tmp_path: Path) -> None:
    fill(tmp_path, f"{DOG}/1.JPEG", f"{CAT}/2.png")
    listing = list_single_label([tmp_path], (CAT, DOG))
    assert ids(listing) == [f"single/{DOG}/1.JPEG", f"single/{CAT}/2.png"]
    assert tags(listing) == [[1], [0]]


def test_class_train_is_a_folder_of_images(tmp_path: Path) -> None:
    """ImageNet has its class folders in a folder with the same name."""
    fill(tmp_path / "plain", "train/locomotive.jpg")
    assert tags(listed(tmp_path / "plain")) == [[18]]


def test_class_file_replaces_the_table(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "wnids").write_text(f"{TENCH} cat\r\n\nn00000001\tdog\n")

    listing = listed(imagenet, classes=tmp_path / "wnids")

    assert ids(listing) == [f"single/{TENCH}/a.JPEG", f"single/{TENCH}/b.JPEG"]
    assert tags(listing) == [[7], [7]]
    (note,) = (note for note in listing.notes if "names 1 folder(s) that are not in" in note)
    assert "n00000001" in note


def test_class_file_may_have_any_unicode_form(tmp_path: Path) -> None:
    fill(tmp_path / "photos", "a/1.jpg")
    (tmp_path / "names").write_text("a cafe\u0301\n")
    listing = list_single_label([tmp_path / "photos"], ("caf\u00e9",), classes=tmp_path / "names")
    assert tags(listing) == [[0]]


INVALID_CLASS_FILES = [
    (f"{DOG} dgo", r"names unknown classes: dgo\n", "did you mean dog?"),
    (f"\n{DOG}", f"line 2: no class name for {DOG}", "name its class"),
    (f"{DOG} dog\n{DOG} cat", f"line 2: {DOG} is listed twice", "delete"),
    (f"{DOG}\tdog\n{DOG} \tcat", f"line 2: {DOG} is listed twice", "delete"),
    ("caf\u00e9 dog\ncafe\u0301 cat", "line 2: caf\u00e9 is listed twice", "delete"),
    ("", "is empty", "leave it empty"),
]


@pytest.mark.parametrize(("text", "message", "remedy"), INVALID_CLASS_FILES)
def test_invalid_class_file_has_a_remedy(imagenet: Path, tmp_path: Path, text: str, message: str, remedy: str) -> None:
    (tmp_path / "classes").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        listed(imagenet, classes=tmp_path / "classes")
    assert remedy in caught.value.remedy


def test_class_file_that_is_no_text_is_an_error(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="binary cannot be read"):
        listed(imagenet, classes=tmp_path / "binary")


@pytest.mark.parametrize(("option", "kind"), [("saliency", "folder"), ("classes", "file")])
def test_missing_saliency_maps_or_classes_are_an_error(imagenet: Path, tmp_path: Path, option: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"no {kind} .*/none"):
        listed(imagenet, **{option: tmp_path / "none"})


def test_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        listed(tmp_path / "none")


def test_folders_without_images_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty/dog").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no folder with images in .* matches one of the 20 classes; there are dog"):
        listed(tmp_path / "empty")


def test_folders_of_no_class_are_an_error(imagenet: Path) -> None:
    with pytest.raises(UserError, match=rf"of the 1 classes; there are {TENCH}, {DOG}, {CAT}\n.*ImageNet"):
        list_single_label([imagenet / "Data/CLS-LOC/train"], ("teapot",))


# --- several folders, lists and limits


@pytest.fixture
def caltech(tmp_path: Path) -> Path:
    root = tmp_path / "256_ObjectCategories"
    fill(root, "056.dog/056_0001.jpg", "056.dog/056_0002.jpg")
    return root


def test_folders_of_several_data_sets_are_listed_together(imagenet: Path, caltech: Path) -> None:
    listing = listed(imagenet, caltech)

    assert ids(listing)[-2:] == ["single/056.dog/056_0001.jpg", "single/056.dog/056_0002.jpg"]
    assert ids(listing)[:-2] == ids(listed(imagenet))
    assert tags(listing)[-2:] == [[11], [11]]
    (absent,) = (note for note in listing.notes if "no image of class" in note)
    assert f"{imagenet / 'Data/CLS-LOC/train'} and {caltech}" in absent
    assert "dog" not in absent.partition("class")[2]


def test_images_with_the_same_path_in_two_folders_have_different_ids(tmp_path: Path) -> None:
    fill(tmp_path / "bing", "dog/1.jpg", "dog/2.jpg")
    fill(tmp_path / "flickr", "dog/1.jpg", "cat/1.jpg")

    listing = list_web([tmp_path / "bing", tmp_path / "flickr"], CLASSES)

    assert ids(listing) == ["web/dog/1.jpg", "web/dog/2.jpg", "web/cat/1.jpg", "web/2/dog/1.jpg"]
    assert listing.table["uri"].to_pylist()[-1] == str(tmp_path / "flickr/dog/1.jpg")


def test_a_second_layout_below_a_root_is_noted(tmp_path: Path, imagenet: Path) -> None:
    fill(imagenet, "256_ObjectCategories/056.dog/1.jpg")
    listing = listed(imagenet)
    assert len(listing.table) == 3
    other = imagenet / "256_ObjectCategories"
    assert has_note(listing, f"left out the class folders in {other}; add --single {other} to use both")


def test_every_folder_needs_images(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no folder with images in .*/empty"):
        listed(imagenet, tmp_path / "empty")


@pytest.mark.parametrize(
    "lines",
    [
        f"{DOG}/{DOG}_10.JPEG\n056.dog/056_0002.jpg",
        f"{DOG}/{DOG}_10 1\n056.dog/056_0002 2",  # as ImageNet's train_cls.txt
        f"./{DOG}/{DOG}_10\r\n\n056.dog/056_0002\n",
    ],
)
def test_a_list_chooses_images(imagenet: Path, caltech: Path, tmp_path: Path, lines: str) -> None:
    (tmp_path / "list.txt").write_text(lines)

    listing = listed(imagenet, caltech, list=tmp_path / "list.txt")

    assert ids(listing) == [f"single/{DOG}/{DOG}_10.JPEG", "single/056.dog/056_0002.jpg"]
    assert has_note(listing, f"2 of 5 images are in {tmp_path / 'list.txt'}, the others are left out")


def test_listed_images_of_no_class_are_noted(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{DOG}/{DOG}_10\n{TENCH}/a\n{TENCH}/b\n")
    listing = listed(imagenet, list=tmp_path / "list.txt")
    assert len(listing.table) == 1
    assert has_note(listing, f"names 2 image(s) in folders that match no class: {TENCH}/a, {TENCH}/b")


@pytest.mark.parametrize("others", ["", "cat/1\n"])
def test_numbers_at_the_end_of_names_are_part_of_them(tmp_path: Path, others: str) -> None:
    fill(tmp_path / "all", "dog/photo.jpg", "dog/photo 2.jpg", "cat/1.jpg")
    (tmp_path / "list.txt").write_text(f"{others}dog/photo 2\n")
    listing = listed(tmp_path / "all", list=tmp_path / "list.txt")
    assert [name for name in ids(listing) if "dog" in name] == ["single/dog/photo 2.jpg"]

    (tmp_path / "list.txt").write_text(f"{others}dog/photo 2\ndog/photo 3\n")
    with pytest.raises(UserError, match=r"names 1 image\(s\) that are not in .*: dog/photo 3\n"):
        listed(tmp_path / "all", list=tmp_path / "list.txt")

    (tmp_path / "all/dog/photo 2.jpg").unlink()
    (tmp_path / "list.txt").write_text("cat/1\ndog/photo 2\n")
    with pytest.raises(UserError, match=r"names 1 image\(s\) that are not in .*: dog/photo 2\n"):
        listed(tmp_path / "all", list=tmp_path / "list.txt")


def test_listed_images_that_are_absent_are_an_error(imagenet: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{DOG}/{DOG}_10\n{DOG}/{DOG}_11 7\n")
    with pytest.raises(UserError, match=rf"names 1 image\(s\) that are not in .*: {DOG}/{DOG}_11 7\n"):
        listed(imagenet, list=tmp_path / "list.txt")


def test_the_number_of_images_per_class_is_limited(tmp_path: Path) -> None:
    fill(tmp_path / "all", *[f"{folder}/{i}.jpg" for folder in (DOG, "056.dog") for i in range(40)], "cat/1.jpg")
    listing = listed(tmp_path / "all", max_per_class=20)

    assert tags(listing).count([11]) == 20
    assert tags(listing).count([7]) == 1
    assert 4 < sum("056.dog" in name for name in ids(listing)) < 16  # of both folders
    assert has_note(listing, "60 image(s) are left out, because the number per class is limited to 20: dog (80)")
    assert set(ids(listed(tmp_path / "all", max_per_class=10))) < set(ids(listing))


def test_the_chosen_images_depend_on_their_names_alone(tmp_path: Path) -> None:
    """They do not depend on the place of the folder or on other classes."""
    fill(tmp_path / "a", *[f"dog/{i}.jpg" for i in range(30)])
    fill(tmp_path / "b", *[f"dog/{i}.jpg" for i in reversed(range(30))], "cat/1.jpg")
    chosen = ids(listed(tmp_path / "a", max_per_class=7))
    assert [name for name in ids(listed(tmp_path / "b", max_per_class=7)) if "dog" in name] == chosen


def test_links_are_followed_on_request(tmp_path: Path) -> None:
    fill(tmp_path / "data", f"{DOG}/1.JPEG", f"{CAT}/2.JPEG")
    chosen = tmp_path / "chosen"
    (chosen / "cat").mkdir(parents=True)
    (chosen / "dog").symlink_to(tmp_path / "data" / DOG)
    (chosen / "cat/2.JPEG").symlink_to(tmp_path / "data" / CAT / "2.JPEG")
    (chosen / "cat/3.JPEG").symlink_to(tmp_path / "absent")

    listing = listed(chosen, follow_links=True)

    assert ids(listing) == ["single/cat/2.JPEG", "single/dog/1.JPEG"]
    assert has_note(listing, "left out 1 pipe(s) or broken link(s)")
    with pytest.raises(UserError, match="no folder with images"):
        listed(chosen)


def test_saliency_maps_of_several_folders_share_a_folder(imagenet: Path, caltech: Path, tmp_path: Path) -> None:
    fill(tmp_path / "maps", f"{CAT}/{CAT}_1.png", "056.dog/056_0001.png")
    listing = listed(imagenet, caltech, saliency=tmp_path / "maps")
    maps = [Path(uri).name if uri else None for uri in listing.table["saliency_uri"].to_pylist()]
    assert maps == [None, None, f"{CAT}_1.png", "056_0001.png", None]


# --- merging


@pytest.fixture
def two_listings(imagenet: Path, tmp_path: Path) -> tuple[Listing, Listing]:
    fill(tmp_path / "caltech", "056.dog/a.jpg")
    return listed(imagenet), listed(tmp_path / "caltech")


def test_listings_are_merged(two_listings: tuple[Listing, Listing]) -> None:
    first, second = two_listings

    merged = merge(first, second)

    assert ids(merged) == sorted([*ids(first), *ids(second)])
    assert merged.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    assert merged.notes == first.notes + second.notes


def test_a_listing_is_sorted_by_id(two_listings: tuple[Listing, Listing]) -> None:
    first, _ = two_listings
    assert ids(first) == sorted(ids(first))
    assert merge(first).table.equals(first.table)
    for order in ([2, 0, 1], [1, 2, 0]):
        rows = first.table.slice(0, 3).take(order)
        assert merge(Listing(rows, first.classes)).table.equals(first.table.slice(0, 3))


def test_image_in_two_listings_is_an_error(two_listings: tuple[Listing, Listing]) -> None:
    first, second = two_listings
    with pytest.raises(UserError, match=rf"3 image\(s\) in two sources: single/{DOG}/{DOG}_10"):
        merge(first, second, first)


# --- web


def test_crawl_is_listed_with_any_suffixes(tmp_path: Path) -> None:
    fill(tmp_path, "dog/b.jpg", "dog/b.gif", "dog/page", "cat/a b.JPG", "cat/x.html")

    listing = list_web([tmp_path], CLASSES)

    assert listing.classes == CLASSES
    assert listing.table.schema.equals(LISTING_SCHEMA, check_metadata=True)
    names = ["cat/a b.JPG", "cat/x.html", "dog/b.gif", "dog/b.jpg", "dog/page"]
    assert ids(listing) == [f"web/{name}" for name in names]
    assert tags(listing) == [[0], [0], [2], [2], [2]]
    assert listing.notes == (f"web images in {tmp_path}: no image of class cow",)
    for row, name in zip(listing.table.to_pylist(), names, strict=True):
        assert row["uri"] == str(tmp_path / name)
        assert row["domain"] == "web"
        assert row["split"] == "train"
        assert row["mask_uri"] is None
        assert row["saliency_uri"] is None


def fail_scans(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, times: int) -> None:
    """Lets the next calls of `os.scandir` for a folder raise an error."""
    scan = os.scandir
    failures = [OSError(number, os.strerror(number)) for _ in range(times)]

    def scandir(at: Any = ".") -> Any:
        if str(at) == str(folder) and failures:
            raise failures.pop()
        return scan(at)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_transient_error_of_a_folder_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "cat/a.jpg")
    fail_scans(monkeypatch, tmp_path / "cat", errno.EIO, 1)
    assert ids(list_web([tmp_path], CLASSES)) == ["web/cat/a.jpg"]


@pytest.mark.parametrize(
    ("number", "found", "remedy"),
    [
        (errno.EACCES, "access to .*/cat is refused: Permission denied", "correct its permissions"),
        (errno.EIO, "cat cannot be read, after several attempts: Input/output error", "repeat the command"),
        (errno.ENOENT, "folder .*/cat cannot be read: No such file or directory", "correct the folder"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None, number: int, found: str, remedy: str
) -> None:
    fill(tmp_path, "cat/a.jpg")
    fail_scans(monkeypatch, tmp_path / "cat", number, 99)
    with pytest.raises(UserError, match=found) as caught:
        list_web([tmp_path], CLASSES)
    assert remedy in caught.value.remedy


def test_entries_that_are_left_out_are_counted(tmp_path: Path) -> None:
    root = tmp_path / "web"
    fill(root, "cat/a.jpg", "dog/a.jpg", "kitten/a.jpg", "dog/.b.jpg", "dog/inner/c.jpg", "list.txt")
    fill(tmp_path, "secret", "other/a.jpg")
    (root / "dog/link.jpg").symlink_to(tmp_path / "secret")
    (root / "dog/gone.jpg").symlink_to("absent")
    (root / "dog/loop.jpg").symlink_to("loop.jpg")
    (root / "cow").symlink_to(tmp_path / "other")
    (root / "dog/inside.jpg").symlink_to("a.jpg")
    os.mkfifo(root / "cat/pipe.jpg")
    (root / "cat" / os.fsdecode(b"\xff.jpg")).touch()

    listing = list_web([root], CLASSES)

    names = ["web/cat/a.jpg", "web/dog/a.jpg", "web/dog/inside.jpg", "web/dog/inner/c.jpg"]
    assert ids(listing) == names
    assert set(listing.notes) == {
        f"web images in {root}: left out 2 file(s) or folder(s) that are not images",
        f"web images in {root}: left out 2 link(s) that lead out of {root}; "
        "to use them, set data.web.follow_links=true",
        f"web images in {root}: left out 3 pipe(s) or broken link(s)",
        f"web images in {root}: left out 1 name(s) that are not UTF-8",
        f"web images in {root}: left out 1 folder(s) that match no class: kitten",
        f"web images in {root}: no image of class cow",
    }


def test_saliency_map_is_used_if_the_stem_of_its_image_is_unique(tmp_path: Path) -> None:
    fill(tmp_path / "web", "dog/b.jpg", "dog/b.gif", "dog/c.jpg", "cat/b.jpg", "cat/d", "cow/e.jpg")
    fill(tmp_path / "maps", "dog/b.png", "dog/c.png", "cat/b.png", "cat/d.png")

    listing = list_web([tmp_path / "web"], CLASSES, saliency=tmp_path / "maps")

    maps = dict(zip(ids(listing), listing.table["saliency_uri"].to_pylist(), strict=True))
    assert maps == {
        "web/cat/b.jpg": str(tmp_path / "maps/cat/b.png"),
        "web/cat/d": str(tmp_path / "maps/cat/d.png"),
        "web/dog/c.jpg": str(tmp_path / "maps/dog/c.png"),
        "web/cow/e.jpg": None,
        "web/dog/b.gif": None,
        "web/dog/b.jpg": None,
    }
    assert has_note(listing, "2 share a stem with another image")
    assert f"web images in {tmp_path / 'web'}: no saliency map for 3 of 6" in listing.notes


def test_saliency_maps_of_images_with_the_same_stem_have_longer_names(tmp_path: Path) -> None:
    fill(tmp_path / "web", "dog/b.jpg", "dog/b.gif")
    fill(tmp_path / "more", "dog/b.jpg", "dog/c.jpg")
    fill(tmp_path / "maps", "dog/b.jpg.png", "dog/b.gif.png", "2/dog/b.png", "dog/c.png")

    listing = list_web([tmp_path / "web", tmp_path / "more"], CLASSES, saliency=tmp_path / "maps")

    maps = dict(zip(ids(listing), listing.table["saliency_uri"].to_pylist(), strict=True))
    assert maps == {
        "web/dog/b.jpg": str(tmp_path / "maps/dog/b.jpg.png"),
        "web/dog/b.gif": str(tmp_path / "maps/dog/b.gif.png"),
        "web/2/dog/b.jpg": str(tmp_path / "maps/2/dog/b.png"),
        "web/dog/c.jpg": str(tmp_path / "maps/dog/c.png"),
    }
    assert not has_note(listing, "saliency map")


def test_missing_folders_of_a_crawl_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*/none"):
        list_web([tmp_path / "none"], CLASSES)

    fill(tmp_path, "dog/a.jpg")
    with pytest.raises(UserError, match=r"no folder .*/none"):
        list_web([tmp_path], CLASSES, saliency=tmp_path / "none")


def test_empty_crawl_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds an image; there are none"):
        list_web([tmp_path], CLASSES)


def test_crawl_of_other_folders_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    fill(tmp_path, "dogs/a.jpg")
    with pytest.raises(UserError, match="holds an image; there are dogs") as caught:
        list_web([tmp_path], CLASSES)
    assert "cat, cow, dog" in caught.value.expected
    assert "rename" in caught.value.remedy


def test_crawl_of_hidden_files_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "dogs/a.jpg", "dog/.a.jpg")
    with pytest.raises(UserError, match="holds an image; there are dog, dogs"):
        list_web([tmp_path], CLASSES)


def test_folders_may_have_other_spellings_and_synonyms(tmp_path: Path) -> None:
    fill(tmp_path, "Potted Plant/1.jpg", "potted_plant/2.jpg", "tv/3.jpg", "tvmonitor/4.jpg", "AIRPLANE/5.jpg", "gnu/6")
    for listing, source in ((list_web([tmp_path], VOC_CLASSES), "web"), (listed(tmp_path), "single")):
        found = dict(zip(ids(listing), tags(listing), strict=True))
        assert found == {
            f"{source}/Potted Plant/1.jpg": [VOC_CLASSES.index("pottedplant")],
            f"{source}/potted_plant/2.jpg": [VOC_CLASSES.index("pottedplant")],
            f"{source}/tv/3.jpg": [VOC_CLASSES.index("tvmonitor")],
            f"{source}/tvmonitor/4.jpg": [VOC_CLASSES.index("tvmonitor")],
            f"{source}/AIRPLANE/5.jpg": [VOC_CLASSES.index("aeroplane")],
        }
        (note,) = (note for note in listing.notes if "names are not those of classes" in note)
        assert "AIRPLANE = aeroplane, Potted Plant = pottedplant, potted_plant = pottedplant, tv = tvmonitor" in note
        assert has_note(listing, "left out 1 folder(s) that match no class: gnu")


@pytest.mark.parametrize(
    ("names", "folder", "found"),
    [
        (("tv", "cat"), "TV", 0),
        (("tv", "tvmonitor"), "tv", 0),
        (("tv", "tvmonitor"), "TV", 0),
        (("dining table", "cat"), "diningtable", 0),
        (("pottedplant", "potted plant"), "potted plant", 1),
        (("pottedplant", "potted plant"), "Potted Plant", None),  # either
        (("cat", "dog"), "tv", None),
    ],
)
def test_a_name_that_fits_two_classes_is_none_of_them(names: tuple[str, ...], folder: str, found: int | None) -> None:
    assert ClassNames(names, {name: name for name in names}, spellings=True).find(folder) == found


def test_a_class_file_gives_web_folders_a_class(tmp_path: Path) -> None:
    fill(tmp_path / "web", "cute kittens/1.jpg", "dog/2.jpg")
    (tmp_path / "names").write_text("cute kittens\tcat\n")
    listing = list_web([tmp_path / "web"], CLASSES, classes=tmp_path / "names")
    assert ids(listing) == ["web/cute kittens/1.jpg"]
    (tmp_path / "names").write_text("dog hound\n")
    with pytest.raises(UserError, match="unknown classes: hound"):
        list_web([tmp_path / "web"], CLASSES, classes=tmp_path / "names")


def test_folders_below_class_folders_are_read(tmp_path: Path) -> None:
    fill(tmp_path / "web", "dog/2018/a.jpg", "dog/2018/b/c.jpg", "dog/d.jpg", "dog/.hidden/e.jpg")
    fill(tmp_path / "more", "f.jpg")
    (tmp_path / "web/dog/loop").symlink_to(tmp_path / "web/dog")
    (tmp_path / "web/dog/more").symlink_to(tmp_path / "more")

    listing = list_web([tmp_path / "web"], CLASSES)
    names = ["web/dog/d.jpg", "web/dog/2018/a.jpg", "web/dog/2018/b/c.jpg"]
    assert ids(listing) == names
    assert has_note(listing, "left out 1 link(s) to folders that were read already")
    assert has_note(listing, "left out 1 link(s) that lead out of")

    followed = list_web([tmp_path / "web"], CLASSES, follow_links=True)
    assert ids(followed) == [*names, "web/dog/more/f.jpg"]


def test_files_may_be_named_by_the_number_of_their_class(tmp_path: Path) -> None:
    """As the web images of Shen et al. (CVPR 2018) are."""
    fill(
        tmp_path / "flat", "12_abc.jpg", "8_x_1.jpg", "21_none.jpg", "0_none.jpg", "12.jpg", "readme.txt", "1_plane.jpg"
    )
    listing = list_web([tmp_path / "flat"], CLASSES)
    assert ids(listing) == ["web/12_abc.jpg", "web/8_x_1.jpg"]
    assert tags(listing) == [[2], [0]]
    assert has_note(listing, "files are named by the number of their VOC class, such as 12_abc.jpg")
    assert has_note(listing, "left out 5 file(s) or folder(s) that are not named after a class")


# --- tables


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "crawl"
    fill(folder, "1.jpg", "2.jpg", "3.jpg", "4.jpg", "maps/1.png")
    lines = (
        "image,tags,url,license,saliency,page",
        '1.jpg,"dog, Cat",https://a.example/1,CC BY 2.0,maps/1.png,5',
        "2.jpg,cow;tree,http://b.example/2,,,6",
        "3.jpg,tree,https://a.example/3,CC BY 2.0,,7",
        "4.jpg,,https://a.example/4,,,8",
    )
    (folder / "crawl.csv").write_text("\n".join(lines) + "\n")
    return folder / "crawl.csv"


def test_a_table_gives_several_tags_and_where_images_come_from(table: Path) -> None:
    listing = list_web([table], CLASSES)

    assert ids(listing) == ["web/1.jpg", "web/2.jpg"]
    assert tags(listing) == [[0, 2], [1]]
    assert listing.table["uri"].to_pylist() == [str(table.parent / "1.jpg"), str(table.parent / "2.jpg")]
    assert listing.table["saliency_uri"].to_pylist() == [str(table.parent / "maps/1.png"), None]
    assert set(listing.table["domain"].to_pylist()) == {"web"}
    assert listing.provenance is not None
    assert listing.provenance.to_pylist() == [
        {"image_id": "web/1.jpg", "url": "https://a.example/1", "license": "CC BY 2.0"},
        {"image_id": "web/2.jpg", "url": "http://b.example/2", "license": None},
    ]
    assert has_note(listing, "left out tags that match no class: tree")
    assert has_note(listing, "left out 2 of 4 images, which have no class")
    assert has_note(listing, "columns that are not read: page")


def test_tables_and_folders_are_listed_together(table: Path, tmp_path: Path) -> None:
    fill(tmp_path / "web", "dog/1.jpg", "dog/5.jpg")
    fill(tmp_path / "flat", "1.jpg")
    (tmp_path / "flat/t.jsonl").write_text('{"image": "1.jpg", "tags": ["dog"]}\n')

    listing = list_web([table, tmp_path / "web", tmp_path / "flat/t.jsonl"], CLASSES, max_per_class=2)

    assert set(ids(listing)) <= {"web/1.jpg", "web/2.jpg", "web/dog/1.jpg", "web/dog/5.jpg", "web/3/1.jpg"}
    assert sum(2 in row for row in tags(listing)) == 2
    assert "web/2.jpg" in ids(listing)
    merged = merge(listed(tmp_path / "web"), listing)
    assert merged.provenance is not None
    assert merged.provenance.equals(listing.provenance)


def test_a_table_gives_single_label_images(table: Path) -> None:
    listing = list_single_label([str(table)], CLASSES)
    assert ids(listing) == ["single/1.jpg", "single/2.jpg"]
    assert set(listing.table["domain"].to_pylist()) == {"source"}


def test_a_trusted_table_names_files_anywhere(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    path = tmp_path / "tables/t.csv"
    path.write_text(f"image,tags\n{tmp_path}/a/1.jpg,dog\ns3://bucket/2.jpg,cat\n")
    listing = list_web([path], CLASSES, allow_absolute=True)
    assert set(ids(listing)) == {f"web{tmp_path}/a/1.jpg", "web/s3/bucket/2.jpg"}


INVALID_TABLES = [
    ("image,tags\na.jpg,gnu\n", r"no image has a tag that is a class; there are gnu\n"),
    ("image,tags\na.jpg,dog\na.jpg,cat\n", r"1 image\(s\) are listed more than once: a.jpg"),
    ("image\na.jpg\n", "has no column 'tags'"),
    ("image,tags\n../a.jpg,dog\n", "are outside of the table's folder"),
]


@pytest.mark.parametrize(("text", "message"), INVALID_TABLES)
def test_invalid_tables_are_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        list_web([tmp_path / "t.csv"], CLASSES)
