"""PASCAL VOC 2012 devkit, with SBD's augmentation -> listing: images, their tags, the paths of masks and saliency maps.

What the whole data set comes to: train_aug 10,582 images, val 1,449, test 1,456. Masks are the PNGs of a folder
SegmentationClassAug, or the devkit's own PNGs together with the MATLAB files of the Semantic Boundaries Dataset (SBD;
Hariharan et al., "Semantic contours from inverse detectors", ICCV 2011).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pyarrow as pa

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.files import read_bytes
from mcis.datasets.index import LISTING_SCHEMA, Listing, shown
from mcis.datasets.masks import read_tags
from mcis.datasets.sources.lists import class_indices, read_lines

MASKS = "SegmentationClassAug"
"""The folder of masks whose absence the devkit's own masks and SBD's make up for."""

SBD_HOME = "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours"
"""Where SBD is from, as benchmark.tgz."""

_MAX_XML = 2**20
"""Largest annotation that is parsed, bytes; VOC's have a few thousand."""


class _Devkit(NamedTuple):
    """What the ways to an image's tags need: folders of the devkit and the K class names."""

    root: Path
    lists: Path
    classes: tuple[str, ...]


def list_voc(
    root: Path,
    *,
    classes: Path | None = None,
    train_list: str = "train_aug",
    val_list: str = "val",
    test_list: str | None = None,
    saliency: str = "SaliencyMaps",
    masks: str = MASKS,
    sbd: Path | None = None,
    tags_from: str = "auto",
) -> Listing:
    """Reads the lists of a devkit folder; no image is opened.

    Args:
        root: the folder VOC2012 with JPEGImages and ImageSets/Segmentation.
        classes: file with one class name a line; None = VOC's 20 names.
        train_list, val_list, test_list: list names; <name>.txt holds ids. Without a train_aug.txt, that list is made
            of SBD's ids and train.txt without val.txt. Images of the test list have neither tags nor masks.
        saliency, masks: folders with <id>.png, inside root or absolute. Each may be absent as a whole; where the
            saliency folder is there, it has a map for every training image. What the default folder of masks lacks
            is looked for in SegmentationClass and in SBD; a split that is not covered then has no masks at all.
        sbd: the unpacked SBD, the folder benchmark_RELEASE or the one around it.
        tags_from: a name in TAGS. `lists`: <name>_cls.txt, `<id> <class index from 0> ...`. `xml`: the objects of
            Annotations/<id>.xml. `masks`: the ground truth, which nothing else opens here. `auto`: lists, else xml.

    Raises:
        UserError: a folder or list is missing, empty or contradictory, a class is unknown, a listed image, annotation
            or single saliency map is absent, a class has no training image.
    """
    if tags_from not in TAGS:
        raise UserError(f"tags_from {tags_from!r}", f"one of {', '.join(TAGS)}", "name one of them")
    root = root.expanduser().resolve()
    names = read_classes(classes) if classes else VOC_CLASSES
    remedy = "point `root` at the folder VOC2012"
    images = _folder(root / "JPEGImages", "the images of a VOC 2012 devkit", remedy)
    lists = _folder(root / "ImageSets" / "Segmentation", "the lists of a VOC 2012 devkit", remedy)
    devkit, bounds = _Devkit(root, lists, names), _sbd_folder(sbd) if sbd else None
    masked, notes = _masks(root, masks, bounds)
    salient = _within(root / saliency)
    present = _within(images)
    rows: list[dict[str, object]] = []
    seen: dict[str, str] = {}
    named = {"train": train_list, "val": val_list} | ({"test": test_list} if test_list else {})
    for split, list_name in named.items():
        path = lists / f"{list_name}.txt"
        if split == "train" and list_name == "train_aug" and not path.is_file():
            ids = _train_aug(lists, val_list, bounds)
            notes.append(f"{path.name} is made of SBD's ids and train.txt without val.txt: {len(ids)} images")
        else:
            ids = _ids(path, f"add it, or name another list by `{split}_list`")
        if not ids:
            raise UserError(f"{path} lists no image", "at least one image id", f"name another list by `{split}_list`")
        absent = [i for i in ids if f"{i}.jpg" not in present]
        if absent:
            raise UserError(
                f"{path.name} names {len(absent)} image(s) that are not in {images}: {shown(absent)}",
                f"<id>.jpg for each of the {len(ids)} ids",
                "add the images or take their ids off the list",
            )
        mask_uris: list[str | None] = [None for _ in ids]
        tags: list[list[int]] = [[] for _ in ids]
        if split != "test":
            mask_uris = masked(ids)
            tags = TAGS[tags_from](devkit, list_name, ids, mask_uris, notes)
            lacking = mask_uris.count(None)
            if lacking and not any("nothing is scored" in note for note in notes):
                notes.append(
                    f"no ground-truth mask for {lacking} of {len(ids)} images of {path.name}: split {split} is not "
                    f"scored (a folder {MASKS}, or SBD by `sbd`, would change that)"
                )
                mask_uris = [None] * len(ids)
        for image_id in ids:
            if image_id in seen:
                where = f"twice in {path}" if seen[image_id] == path.name else f"in {path} and in {seen[image_id]}"
                raise UserError(
                    f"image {image_id} is listed {where}", "each image once, in one split", "delete one of the lines"
                )
            seen[image_id] = path.name
        without = [i for i in ids if f"{i}.png" not in salient]
        if without and split == "train" and (root / saliency).is_dir():
            raise UserError(
                f"no saliency map in {root / saliency} for {len(without)} of {len(ids)} training images: "
                f"{shown(without)}",
                "<id>.png for each of them",
                "add the maps, or point `saliency` at a folder that does not exist, which means that there are none",
            )
        for image_id, image_tags, mask_uri in zip(ids, tags, mask_uris, strict=True):
            rows.append(
                {
                    "image_id": image_id,
                    "uri": str(images / f"{image_id}.jpg"),
                    "domain": "target",
                    "split": split,
                    "tags": image_tags,
                    "mask_uri": mask_uri,
                    "saliency_uri": str(root / saliency / f"{image_id}.png") if f"{image_id}.png" in salient else None,
                }
            )
    table = pa.Table.from_pylist(rows, schema=LISTING_SCHEMA)
    _check_classes(table, names, train_list)
    return Listing(table, names, tuple(notes))


def _folder(path: Path, what: str, remedy: str) -> Path:
    """The folder itself.

    Raises:
        UserError: it is not there.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}", what, remedy)
    return path


def _lines(path: Path, remedy: str) -> list[tuple[int, list[str]]]:
    """The lines that are not blank, each with its number from 1 and cut into words.

    Raises:
        UserError: no such file, or no UTF-8.
    """
    expected = "a UTF-8 text file with one image id a line"
    if not path.is_file():
        raise UserError(f"no list {path}", expected, remedy)
    return [(number, line.split()) for number, line in read_lines(path, expected, remedy, may_be_empty=True)]


def _ids(path: Path, remedy: str) -> list[str]:
    """The image ids of a list, one a line, in its order.

    Raises:
        UserError: no such file, no UTF-8, or a line of several words.
    """
    lines = _lines(path, remedy)
    for number, words in lines:
        if len(words) > 1:
            raise UserError(
                f"{path}, line {number}: {shown(words)}", "one image id a line", "leave the id alone on its line"
            )
    return [words[0] for _, words in lines]


def _tags(path: Path, classes: tuple[str, ...], remedy: str | None = None) -> dict[str, list[int]]:
    """Image id -> ascending class indices, of lines `<id> <class index from 0> ...`.

    Args:
        path: the file.
        classes: K class names.
        remedy: what to do where there is no such file; None = write it.

    Raises:
        UserError: no such file, no UTF-8, an unknown index, or an id a second time.
    """
    line = f"lines '<id> <class index> ...' with indices 0..{len(classes) - 1}"
    correct = "correct the list, or name the right class file by `classes`"
    tags: dict[str, list[int]] = {}
    for number, (image_id, *indices) in _lines(path, remedy or f"write {line} into {path.name}"):
        where = f"{path}, line {number}"
        if image_id in tags:
            raise UserError(f"{where}: {image_id} a second time", "one line an image", "merge the lines")
        tags[image_id] = class_indices(where, image_id, indices, len(classes), correct)
    return tags


def _within(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} if path.is_dir() else set()


def _sbd_folder(sbd: Path) -> Path:
    """SBD's folder with cls, train.txt and val.txt, wherever above it the user points."""
    sbd = sbd.expanduser().resolve()
    for place in (sbd, sbd / "dataset", sbd / "benchmark_RELEASE" / "dataset"):
        if (place / "cls").is_dir():
            return place
    raise UserError(
        f"no folder benchmark_RELEASE/dataset/cls in {sbd}",
        "the unpacked benchmark.tgz of SBD",
        f"unpack {SBD_HOME}/benchmark.tgz and point `sbd` at its folder benchmark_RELEASE",
    )


def _train_aug(lists: Path, val_list: str, sbd: Path | None) -> list[str]:
    """10,582 ids, ascending: those of SBD and of VOC's train without those of VOC's val, nor of the val list in use."""
    if sbd is None:
        raise UserError(
            f"no list {lists / 'train_aug.txt'}",
            "the list of VOC 2012 and SBD images, which is no part of the devkit",
            f"point `sbd` at the unpacked {SBD_HOME}/benchmark.tgz, which the list is made from, or name another list, "
            "such as train, by `train_list`",
        )
    ids = [i for path in (sbd / "train.txt", sbd / "val.txt") for i in _ids(path, "unpack benchmark.tgz again")]
    ids += _ids(lists / "train.txt", "restore the devkit's own list")
    held_out = {i for name in {"val", val_list} for i in _ids(lists / f"{name}.txt", "name another list by `val_list`")}
    return sorted(set(ids) - held_out)


def _masks(root: Path, masks: str, sbd: Path | None) -> tuple[Callable[[list[str]], list[str | None]], list[str]]:
    """A function of ids to the paths of their masks, and a note where there are none."""
    places = [(root / masks, ".png")]
    if masks == MASKS:
        places += [(root / "SegmentationClass", ".png")] + ([(sbd / "cls", ".mat")] if sbd else [])
    held = [(path, suffix, _within(path)) for path, suffix in places if path.is_dir()]
    # A folder that was named for all masks is expected to hold them all: evaluation names the ones it lacks.
    named = root / masks if (root / masks).is_dir() else None

    def uri(image_id: str) -> str | None:
        for path, suffix, names in held:
            if f"{image_id}{suffix}" in names:
                return str(path / f"{image_id}{suffix}")
        return str(named / f"{image_id}.png") if named else None

    note = f"no folder of ground-truth masks {Path(masks).name}: nothing is scored"
    return lambda ids: [uri(i) for i in ids], [] if held else [note]


def _tags_auto(
    devkit: _Devkit, list_name: str, ids: list[str], masks: Sequence[str | None], notes: list[str]
) -> list[list[int]]:
    listed = (devkit.lists / f"{list_name}_cls.txt").is_file() or not (devkit.root / "Annotations").is_dir()
    return (_tags_listed if listed else _tags_annotated)(devkit, list_name, ids, masks, notes)


def _tags_listed(
    devkit: _Devkit, list_name: str, ids: list[str], masks: Sequence[str | None], notes: list[str]
) -> list[list[int]]:
    path = devkit.lists / f"{list_name}_cls.txt"
    remedy = f"write {path.name} with lines '<id> <class index from 0> ...', or add the devkit's folder Annotations"
    tags = _tags(path, devkit.classes, remedy)
    untagged = [i for i in ids if i not in tags]
    if untagged:
        raise UserError(
            f"{path.name} has no line for {shown(untagged)}",
            f"a line for each of the {len(ids)} images of {list_name}.txt",
            "add the missing lines; an image without any class gets a line with its id alone",
        )
    return [tags[i] for i in ids]


def _tags_annotated(
    devkit: _Devkit, list_name: str, ids: list[str], masks: Sequence[str | None], notes: list[str]
) -> list[list[int]]:
    remedy = f"restore the devkit's, or write {list_name}_cls.txt"
    path = _folder(devkit.root / "Annotations", "<id>.xml for each image, as in a VOC 2012 devkit", remedy)
    names = _within(path)
    without = [i for i in ids if f"{i}.xml" not in names]
    if without:
        found = f"no annotation in {path} for {len(without)} of {len(ids)} images of {list_name}.txt: {shown(without)}"
        raise UserError(found, "<id>.xml for each of them", remedy)
    notes.append(f"tags of {list_name}.txt are those of the objects in {path.name}")
    return [_annotated(path / f"{i}.xml", devkit.classes) for i in ids]


def _tags_masked(
    devkit: _Devkit, list_name: str, ids: list[str], masks: Sequence[str | None], notes: list[str]
) -> list[list[int]]:
    without = [i for i, uri in zip(ids, masks, strict=True) if uri is None]
    if without:
        raise UserError(
            f"no ground-truth mask for {len(without)} of {len(ids)} images of {list_name}.txt: {shown(without)}",
            "a mask for each image whose tags are to come from masks",
            "add the masks, or take tags from lists or xml",
        )
    notes.append(f"tags of {list_name}.txt were read off ground-truth masks: the truth of every image was opened")
    return [read_tags(uri, len(devkit.classes)) for uri in masks if uri is not None]


TAGS = {"auto": _tags_auto, "lists": _tags_listed, "xml": _tags_annotated, "masks": _tags_masked}
"""Where an image's tags come from."""


class _Annotation(ElementTree.TreeBuilder):
    """Refuses a document type, the one place where XML declares entities: a few bytes of them unfold to gigabytes."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a document type, which annotations have not")


def _annotated(path: Path, classes: tuple[str, ...]) -> list[int]:
    """The class indices of the objects of an annotation, difficult ones too; parts of objects do not count."""
    try:
        data = read_bytes(str(path))
        if len(data) > _MAX_XML:
            raise ValueError(f"more than {_MAX_XML} bytes")
        tree = ElementTree.fromstring(data, ElementTree.XMLParser(target=_Annotation()))
        if tree.tag != "annotation":
            raise ValueError(f"its root is {tree.tag!r}")
    except (OSError, SyntaxError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise UserError(f"{path}: {error}", "an XML file <annotation> of VOC", "replace the file") from None
    names = {(entry.findtext("name") or "").strip() for entry in tree.iterfind("object")}
    if unknown := sorted(names - set(classes)):
        raise UserError(
            f"{path}: an object of class {shown([repr(name) for name in unknown])}",
            f"one of the {len(classes)} classes",
            "correct the file, or name the right class file by `classes`",
        )
    return sorted(classes.index(name) for name in names)


def _check_classes(table: pa.Table, names: tuple[str, ...], train_list: str) -> None:
    tagged = {
        tag
        for tags, split in zip(table["tags"].to_pylist(), table["split"].to_pylist(), strict=True)
        if split == "train"
        for tag in tags
    }
    empty = [name for index, name in enumerate(names) if index not in tagged]
    if empty:
        raise UserError(
            f"no training image of class {shown(empty)} in {train_list}.txt",
            "at least one tagged image for each class",
            "add images, or take the class out of the class file (`classes`)",
        )
