"""Lists the PASCAL VOC 2012 devkit with SBD's augmentation: images, tags, and the paths of masks and saliency maps.

The complete data set has 10,582 images in train_aug, 1,449 in val and 1,456 in test. Masks are the PNGs of a folder
SegmentationClassAug, or the devkit's own PNGs together with the MATLAB files of the Semantic Boundaries Dataset (SBD;
Hariharan et al., "Semantic contours from inverse detectors", ICCV 2011).
"""

import inspect
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pyarrow as pa

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError, join_shortened, unquoted
from mcis.datasets.index import Listing
from mcis.datasets.sources.lists import (
    check_listed_once,
    check_present,
    listing_table,
    missing_mask_notes,
    read_lines,
    read_tag_list,
    source_folder,
)
from mcis.datasets.sources.source import Source
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import names_in

MASKS = "SegmentationClassAug"
"""Default folder of masks. Masks that it lacks are looked for in the devkit's own folder and in SBD."""

SBD_HOME = "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours"
"""Web folder of SBD's benchmark.tgz."""

_MAX_XML = 2**20
"""Largest annotation that is parsed, bytes. VOC's have a few thousand."""


class _Devkit(NamedTuple):
    """An opened devkit.

    Attributes:
        root: Folder VOC2012.
        images: Folder of the images.
        image_names: Names in that folder.
        lists: Folder of the lists.
        classes: K class names.
    """

    root: Path
    images: Path
    image_names: set[str]
    lists: Path
    classes: tuple[str, ...]


class _ImageList(NamedTuple):
    """A list of a devkit.

    Attributes:
        split: Split of its images.
        path: Path of the file `<name>.txt`.
        ids: Image ids, in the order of the list.
        notes: Notes about the list; reading its tags adds to them.
    """

    split: str
    path: Path
    ids: list[str]
    notes: list[str]

    @property
    def tags_path(self) -> Path:
        """Path of the file with the tags of the list's images."""
        return self.path.with_name(f"{self.path.stem}_cls.txt")

    def check_none_absent(self, kind: str, absent: Sequence[str], expected: str, remedy: str) -> None:
        """Raises a UserError if images of the list lack a file of some kind."""
        if absent:
            names = join_shortened(absent)
            found = f"no {kind} for {len(absent)} of {len(self.ids)} images of {self.path.name}: {names}"
            raise UserError(found, expected, remedy)


class _Object(NamedTuple):
    """An object of an annotation: its class index, and whether it is marked difficult."""

    class_index: int
    difficult: bool


def list_voc(
    root: Path,
    *,
    classes: Path | None = None,
    train_list: str = "train_aug",
    val_list: str = "val",
    test_list: str | None = None,
    saliency: str | None = "SaliencyMaps",
    truth_masks: str = MASKS,
    sbd: Path | None = None,
    tags_from: str = "auto",
) -> Listing:
    """Lists the images of a devkit from its lists. No image is opened.

    Args:
        root: Folder VOC2012 with JPEGImages and ImageSets/Segmentation.
        classes: File with one class name per line. None: VOC's 20 names.
        train_list: Name of the list of training images; <name>.txt holds ids. If there is no train_aug.txt, that list
            is built from SBD's ids and train.txt, without val.txt.
        val_list: Name of the list of validation images.
        test_list: Name of the list of test images, which have neither tags nor masks. None: no test split.
        saliency: Folder of saliency maps <id>.png, inside root or absolute. If it exists, it must have a map for every
            training image. None: no maps.
        truth_masks: Folder of ground-truth masks <id>.png, inside root or absolute; it may be absent. Masks that the
            default folder lacks are looked for in SegmentationClass and in SBD.
        sbd: The unpacked SBD: the folder benchmark_RELEASE, its parent, or its subfolder dataset.
        tags_from: `lists`: <name>_cls.txt with lines `<id> <class index from 0> ...`. `xml`: the objects of
            Annotations/<id>.xml that are not marked difficult. `auto`: lists if they exist, otherwise xml.

    Raises:
        UserError: A folder or list is missing, empty or contradictory; a class is unknown; a listed image or
            an annotation is absent; the folder of saliency maps lacks that of a training image; or a class has no
            training image.
    """
    devkit = _open_devkit(root, classes)
    sbd_folder = _sbd_folder(sbd) if sbd else None
    masks = _mask_paths(devkit.root, truth_masks, sbd_folder)

    list_names = {"train": train_list, "val": val_list}
    if test_list:
        list_names["test"] = test_list
    lists = [_read_list(devkit, split, name, val_list, sbd_folder) for split, name in list_names.items()]

    tables: list[pa.Table] = []
    notes: list[str] = []
    for image_list in lists:
        if image_list.split == "test":
            tags: list[list[int]] = [[] for _ in image_list.ids]
            mask_uris: list[str | None] = [None for _ in image_list.ids]
        else:
            tags = _read_tags(devkit, image_list, tags_from)
            mask_uris = [masks.get(image_id) for image_id in image_list.ids]
            missing = missing_mask_notes(mask_uris.count(None), len(mask_uris), image_list.split)
            notes += [f"{note} (add a folder {MASKS}, or SBD by data.sbd)" for note in missing]

        if image_list.split == "train":
            _check_classes(devkit.classes, image_list, tags)
        table = listing_table(
            image_id=image_list.ids,
            uri=[str(devkit.images / f"{image_id}.jpg") for image_id in image_list.ids],
            domain="target",
            split=image_list.split,
            tags=tags,
            mask_uri=mask_uris,
            saliency_uri=_saliency_uris(devkit.root, saliency, image_list),
        )
        tables.append(table)

    check_listed_once((image_list.path, image_list.ids) for image_list in lists)
    if not masks:
        notes = [f"no folder of ground-truth masks {Path(truth_masks).name}: nothing is scored"]
    for image_list in lists:
        notes += image_list.notes
    return Listing(pa.concat_tables(tables), devkit.classes, tuple(notes))


def _open_devkit(root: Path, classes: Path | None) -> _Devkit:
    root = root.expanduser().resolve()
    names = read_classes(classes) if classes else VOC_CLASSES
    remedy = "set --voc to the folder VOC2012"
    images = source_folder(root / "JPEGImages", "the images of a VOC 2012 devkit", remedy)
    lists = source_folder(root / "ImageSets" / "Segmentation", "the lists of a VOC 2012 devkit", remedy)
    return _Devkit(root, images, set(names_in(images)), lists, names)


def _read_list(devkit: _Devkit, split: str, name: str, val_list: str, sbd: Path | None) -> _ImageList:
    """Reads the list of a split, or builds an absent train_aug.txt from other lists. Checks that its images exist."""
    path = devkit.lists / f"{name}.txt"
    notes: list[str] = []
    if split == "train" and name == "train_aug" and not path.is_file():
        ids = _train_aug(devkit.lists, val_list, sbd)
        notes.append(f"{path.name} is built from SBD's ids and train.txt without val.txt: {len(ids)} images")
    else:
        ids = _read_ids(path, f"add it, or name another list by data.{split}_list")

    absent = [image_id for image_id in ids if f"{image_id}.jpg" not in devkit.image_names]
    check_present(path, absent, devkit.images, f"<id>.jpg for each of the {len(ids)} ids")
    return _ImageList(split, path, ids, notes)


def _read_ids(path: Path, remedy: str) -> list[str]:
    """Returns the image ids of a list, one per line, in its order."""
    return [line for _, line in read_lines(path, "a UTF-8 text file with one image id per line", remedy)]


def _read_tags(devkit: _Devkit, image_list: _ImageList, tags_from: str) -> list[list[int]]:
    """Returns the class indices of each image of a list, ascending; see `tags_from` of `list_voc`."""
    has_lists = image_list.tags_path.is_file()
    has_annotations = (devkit.root / "Annotations").is_dir()
    if tags_from == "lists" or (tags_from == "auto" and (has_lists or not has_annotations)):
        return _tags_from_list(devkit, image_list)
    return _tags_from_annotations(devkit, image_list)


def _tags_from_list(devkit: _Devkit, image_list: _ImageList) -> list[list[int]]:
    path = image_list.tags_path
    list_remedy = (
        f"write {path.name} with lines '<id> <class index from 0> ...', or add the devkit's folder Annotations"
    )
    class_remedy = "correct the list, or name the right class file by data.classes"
    tags = read_tag_list(path, len(devkit.classes), list_remedy, class_remedy)

    untagged = [image_id for image_id in image_list.ids if image_id not in tags]
    if untagged:
        raise UserError(
            f"{path.name} has no line for {join_shortened(untagged)}",
            f"a line for each of the {len(image_list.ids)} images of {image_list.path.name}",
            "add the missing lines; the line of an image without any class holds its id alone",
        )
    return [tags[image_id] for image_id in image_list.ids]


def _tags_from_annotations(devkit: _Devkit, image_list: _ImageList) -> list[list[int]]:
    """Returns the classes of the objects that are not marked difficult; adds notes to the list."""
    remedy = f"restore the devkit's annotations, or write {image_list.tags_path.name}"
    folder = source_folder(devkit.root / "Annotations", "<id>.xml for each image, as in a VOC 2012 devkit", remedy)
    names = set(names_in(folder))
    absent = [image_id for image_id in image_list.ids if f"{image_id}.xml" not in names]
    image_list.check_none_absent("annotation", absent, f"<id>.xml in {folder}", remedy)

    tags: list[list[int]] = []
    difficult = 0
    for image_id in image_list.ids:
        objects = _read_objects(folder / f"{image_id}.xml", devkit.classes)
        tags.append(sorted({item.class_index for item in objects if not item.difficult}))
        difficult += sum(item.difficult for item in objects)

    image_list.notes.append(f"tags of {image_list.path.name} are read from the objects in {folder.name}")
    if difficult:
        image_list.notes.append(
            f"{difficult} object(s) of {image_list.path.name} are marked difficult and do not count"
        )
    return tags


def _read_objects(path: Path, classes: tuple[str, ...]) -> list[_Object]:
    """Returns the objects of an annotation. Parts of objects do not count."""
    try:
        data = read_bytes(str(path))
        if len(data) > _MAX_XML:
            raise ValueError(f"more than {_MAX_XML} bytes")
        tree = ElementTree.fromstring(data)  # expat stops when entities expand to much more than the file holds
        if tree.tag != "annotation":
            raise ValueError("the root element is not <annotation>")
    except (OSError, SyntaxError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise UserError(f"{path}: {unquoted(error)}", "an XML file <annotation> of VOC", "replace the file") from None

    entries = list(tree.iterfind("object"))
    names = [(entry.findtext("name") or "").strip() for entry in entries]
    marks = [(entry.findtext("difficult") or "").strip() for entry in entries]

    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise UserError(
            f"{path}: an object of class {join_shortened([repr(name) for name in unknown])}",
            f"one of the {len(classes)} classes",
            "correct the file, or name the right class file by data.classes",
        )
    invalid = sorted(set(marks) - {"", "0", "1"})
    if invalid:
        raise UserError(f"{path}: an object with difficult {join_shortened(invalid)}", "0 or 1", "correct the file")
    return [_Object(classes.index(name), mark == "1") for name, mark in zip(names, marks, strict=True)]


def _check_classes(names: tuple[str, ...], train: _ImageList, tags: Sequence[Sequence[int]]) -> None:
    """Raises a UserError if a class has no training image."""
    present: set[int] = set()
    for image_tags in tags:
        present.update(image_tags)

    empty = [name for index, name in enumerate(names) if index not in present]
    if empty:
        raise UserError(
            f"no training image of class {join_shortened(empty)} in {train.path.name}",
            "at least one tagged image for each class",
            "add images, or remove the class from the class file (data.classes)",
        )


def _saliency_uris(root: Path, saliency: str | None, image_list: _ImageList) -> list[str | None]:
    """Returns the saliency map of each image, or None.

    Raises:
        UserError: The folder exists and lacks the map of a training image.
    """
    if saliency is None:
        return [None for _ in image_list.ids]

    folder = root / saliency
    names = set(names_in(folder))
    absent = [image_id for image_id in image_list.ids if f"{image_id}.png" not in names]
    if image_list.split == "train" and folder.is_dir():
        command = shlex.join(["mcis", "saliency", "voc", str(root), "--out", str(folder)])
        image_list.check_none_absent(
            f"saliency map in {folder}",
            absent,
            "<id>.png for each of them",
            f"make them by `{command}` with the run's values of data.*, or use none: data.saliency=None",
        )
    return [str(folder / f"{image_id}.png") if f"{image_id}.png" in names else None for image_id in image_list.ids]


def _sbd_folder(sbd: Path) -> Path:
    """Returns SBD's folder with cls, train.txt and val.txt, from this folder or one of its two parents."""
    sbd = sbd.expanduser().resolve()
    for folder in (sbd, sbd / "dataset", sbd / "benchmark_RELEASE" / "dataset"):
        if (folder / "cls").is_dir():
            return folder
    raise UserError(
        f"no folder benchmark_RELEASE/dataset/cls in {sbd}",
        "the unpacked benchmark.tgz of SBD",
        f"unpack {SBD_HOME}/benchmark.tgz and set data.sbd to its folder benchmark_RELEASE",
    )


def _train_aug(lists: Path, val_list: str, sbd: Path | None) -> list[str]:
    """Returns the 10,582 ids of SBD and of VOC's train, ascending, without those of VOC's val and of `val_list`."""
    if sbd is None:
        raise UserError(
            f"no list {lists / 'train_aug.txt'}",
            "the list of VOC 2012 and SBD images, which is not part of the devkit",
            f"set data.sbd to the unpacked {SBD_HOME}/benchmark.tgz to build the list from it, or name another list, "
            "such as train, by data.train_list",
        )

    ids: set[str] = set()
    for path in (sbd / "train.txt", sbd / "val.txt"):
        ids.update(_read_ids(path, "unpack benchmark.tgz again"))
    ids.update(_read_ids(lists / "train.txt", "restore the devkit's own list"))

    for name in dict.fromkeys(("val", val_list)):
        ids.difference_update(_read_ids(lists / f"{name}.txt", "name another list by data.val_list"))
    return sorted(ids)


def _mask_paths(root: Path, truth_masks: str, sbd: Path | None) -> dict[str, str]:
    """Returns image id -> path of its ground-truth mask.

    Masks that the default folder lacks are the devkit's own, or those of SBD, in this order of preference.
    """
    candidates = [(root / truth_masks, ".png")]
    if truth_masks == MASKS:
        candidates.append((root / "SegmentationClass", ".png"))
        if sbd:
            candidates.append((sbd / "cls", ".mat"))

    paths: dict[str, str] = {}
    for folder, suffix in reversed(candidates):
        names = [name for name in names_in(folder) if name.endswith(suffix)]
        paths |= {name.removesuffix(suffix): str(folder / name) for name in names}
    return paths


VOC = Source(
    lister=list_voc,
    location="root",
    help="Folder VOC2012 of a PASCAL VOC 2012 devkit.",
    example="voc VOCdevkit/VOC2012",
    data_keys={"root": "voc"} | {name: name for name in inspect.signature(list_voc).parameters if name != "root"},
    defines_classes=True,
    curated=True,
)
