"""The lists of a VOC 2012 devkit, and the tags of their images: from <list>_cls.txt, XML or, on request, masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.images.masks import read_tags
from mcis.datasets.index import shown
from mcis.datasets.sources.lists import read_lines, read_tag_list, source_folder
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import names_in

Tags = list[list[int]]
"""The class indices of each image of a list, ascending."""
_MAX_XML = 2**20
"""Largest annotation that is parsed, bytes; VOC's have a few thousand."""


class Devkit(NamedTuple):
    """Folders of a devkit, the names in the folder of its images, and the K class names."""

    root: Path
    images: Path
    image_names: set[str]
    lists: Path
    classes: tuple[str, ...]


class DevkitList(NamedTuple):
    """A list of the devkit.

    Attributes:
        split: that its images are of.
        path: of the file `<name>.txt`.
        ids: of its images, in its order.
        notes: about the list; what reads its tags adds to them.
    """

    split: str
    path: Path
    ids: list[str]
    notes: list[str]

    @property
    def tags_path(self) -> Path:
        """Path of the file with the tags of the list's images."""
        return self.path.with_name(f"{self.path.stem}_cls.txt")

    def check_each(self, what: str, absent: Sequence[str], expected: str, remedy: str) -> None:
        """Raises a UserError where images of the list lack something that each has to have."""
        if absent:
            found = f"no {what} for {len(absent)} of {len(self.ids)} images of {self.path.name}: {shown(absent)}"
            raise UserError(found, expected, remedy)


def read_ids(path: Path, remedy: str) -> list[str]:
    """The image ids of a list, one per line, in its order.

    Raises:
        UserError: no such file, no UTF-8, or a line of several words.
    """
    lines = read_lines(path, "a UTF-8 text file with one image id per line", remedy)
    for number, line in lines:
        if len(words := line.split()) > 1:
            raise UserError(
                f"{path}, line {number}: {shown(words)}", "one image id per line", "leave the id alone on its line"
            )
    return [line for _, line in lines]


def _tags_listed(devkit: Devkit, listed: DevkitList) -> Tags:
    path = listed.tags_path
    remedy = f"write {path.name} with lines '<id> <class index from 0> ...', or add the devkit's folder Annotations"
    correct = "correct the list, or name the right class file by `classes`"
    tags = read_tag_list(path, len(devkit.classes), remedy, correct)
    if untagged := [image_id for image_id in listed.ids if image_id not in tags]:
        raise UserError(
            f"{path.name} has no line for {shown(untagged)}",
            f"a line for each of the {len(listed.ids)} images of {listed.path.name}",
            "add the missing lines; an image without any class gets a line with its id alone",
        )
    return [tags[image_id] for image_id in listed.ids]


def _tags_annotated(devkit: Devkit, listed: DevkitList, difficult: bool) -> Tags:
    remedy = f"restore the devkit's, or write {listed.tags_path.name}"
    folder = source_folder(devkit.root / "Annotations", "<id>.xml for each image, as in a VOC 2012 devkit", remedy)
    names = set(names_in(folder))
    listed.check_each("annotation", [i for i in listed.ids if f"{i}.xml" not in names], f"<id>.xml in {folder}", remedy)
    images = [_annotated(folder / f"{image_id}.xml", devkit.classes) for image_id in listed.ids]
    every, plain = ([image.tags(difficult=count) for image in images] for count in (True, False))
    listed.notes.append(f"tags of {listed.path.name} are those of the objects in {folder.name}")
    if marked := sum(len(image.difficult) for image in images):
        found = f"{marked} object(s) of {listed.path.name} are marked difficult"
        lost = sum(map(len, every)) - sum(map(len, plain))
        untagged = sum(bool(of_all) and not tags for of_all, tags in zip(every, plain, strict=True))
        listed.notes.append(
            f"{found} and count as tags"
            if difficult
            else f"{found} and do not count: {lost} tag(s) are left out, {untagged} image(s) have no tag for that "
            "reason (`difficult` would count them)"
        )
    return every if difficult else plain


def _tags_masked(devkit: Devkit, listed: DevkitList, masks: Sequence[str | None]) -> Tags:
    absent = [image_id for image_id, uri in zip(listed.ids, masks, strict=True) if uri is None]
    remedy = "add the masks, or take tags from lists or xml by `tags_from`"
    listed.check_each("ground-truth mask", absent, "a mask for each image whose tags are to come from masks", remedy)
    name = listed.path.name
    listed.notes.append(f"tags of {name} were read off ground-truth masks: the truth of every image was opened")
    return [read_tags(uri, len(devkit.classes)) for uri in masks if uri is not None]


def read_list_tags(
    tags_from: str, devkit: Devkit, listed: DevkitList, masks: Sequence[str | None], *, difficult: bool
) -> Tags:
    """The tags of a list's images; adds to the list's notes.

    Args:
        tags_from: `lists`, `xml`, `masks`, or `auto`: the list's own file of tags, or annotations where it has none.
        masks: of the images.
        difficult: whether objects marked difficult count.

    Raises:
        UserError: as of `voc.list_voc`.
    """
    if tags_from == "auto":
        by_list = listed.tags_path.is_file() or not (devkit.root / "Annotations").is_dir()
        tags_from = "lists" if by_list else "xml"
    if difficult and tags_from != "xml":
        raise UserError(
            f"`difficult` is set, but the tags of {listed.path.name} come from {tags_from}",
            "annotations, which alone say what is difficult",
            "name xml by `tags_from`, or leave `difficult` out",
        )
    if tags_from == "lists":
        return _tags_listed(devkit, listed)
    return _tags_annotated(devkit, listed, difficult) if tags_from == "xml" else _tags_masked(devkit, listed, masks)


class _Annotation(ElementTree.TreeBuilder):
    """Refuses a document type, the only part of XML that declares entities: a few bytes of them expand to gigabytes."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a document type, which annotations have not")


class _Objects(NamedTuple):
    """The class index of each of an image's objects: of the plain ones, and of those marked difficult."""

    plain: list[int]
    difficult: list[int]

    def tags(self, *, difficult: bool) -> list[int]:
        """The class indices that count, ascending."""
        return sorted({*self.plain, *(self.difficult if difficult else ())})


def _annotated(path: Path, classes: tuple[str, ...]) -> _Objects:
    """The objects of an annotation; parts of objects do not count."""
    try:
        data = read_bytes(str(path))
        if len(data) > _MAX_XML:
            raise ValueError(f"more than {_MAX_XML} bytes")
        tree = ElementTree.fromstring(data, ElementTree.XMLParser(target=_Annotation()))
        if tree.tag != "annotation":
            raise ValueError("it has another root")
    except (OSError, SyntaxError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise UserError(f"{path}: {unquoted(error)}", "an XML file <annotation> of VOC", "replace the file") from None
    objects = [(_text(entry, "name"), _text(entry, "difficult") or "0") for entry in tree.iterfind("object")]
    if unknown := sorted({name for name, _ in objects} - set(classes)):
        raise UserError(
            f"{path}: an object of class {shown([repr(name) for name in unknown])}",
            f"one of the {len(classes)} classes",
            "correct the file, or name the right class file by `classes`",
        )
    if wrong := sorted({mark for _, mark in objects} - {"0", "1"}):
        raise UserError(f"{path}: an object with difficult {shown(wrong)}", "0 or 1", "correct the file")
    plain, difficult = ([classes.index(name) for name, mark in objects if mark == of] for of in "01")
    return _Objects(plain, difficult)


def _text(entry: ElementTree.Element, name: str) -> str:
    return (entry.findtext(name) or "").strip()
