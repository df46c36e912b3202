"""PASCAL VOC 2012 devkit, with SBD's augmentation -> listing: images, their tags, the paths of masks and saliency maps.

The complete data set has train_aug 10,582 images, val 1,449, test 1,456. Masks are the PNGs of a folder
SegmentationClassAug, or the devkit's own PNGs together with the MATLAB files of the Semantic Boundaries Dataset (SBD;
Hariharan et al., "Semantic contours from inverse detectors", ICCV 2011).
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pyarrow as pa

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.index import Listing, shown
from mcis.datasets.sources.lists import (
    check_once,
    check_present,
    lacking_masks,
    listing_table,
    read_lines,
    read_tag_list,
    source_folder,
)
from mcis.datasets.sources.source import Source
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import names_in

MASKS = "SegmentationClassAug"
"""The default folder of masks; what it lacks is looked for among the devkit's masks and those of SBD."""

SBD_HOME = "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours"
"""The address of SBD's benchmark.tgz, without the name."""

_MAX_XML = 2**20
"""Largest annotation that is parsed, bytes; VOC's have a few thousand."""


class _Devkit(NamedTuple):
    """Folders of a devkit, the names in the folder of its images, and the K class names."""

    root: Path
    images: Path
    image_names: set[str]
    lists: Path
    classes: tuple[str, ...]


class _DevkitList(NamedTuple):
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


def list_voc(
    root: Path,
    *,
    classes: Path | None = None,
    train_list: str = "train_aug",
    val_list: str = "val",
    test_list: str | None = None,
    saliency: str = "SaliencyMaps",
    truth_masks: str = MASKS,
    sbd: Path | None = None,
    tags_from: str = "auto",
) -> Listing:
    """Reads the lists of a devkit folder; no image is opened.

    Args:
        root: the folder VOC2012 with JPEGImages and ImageSets/Segmentation.
        classes: file with one class name per line; None = VOC's 20 names.
        train_list, val_list, test_list: list names; <name>.txt holds ids. Without a train_aug.txt, that list is made
            of SBD's ids and train.txt without val.txt. Images of the test list have neither tags nor masks.
        saliency, truth_masks: folders with <id>.png, inside root or absolute. Each may be absent as a whole; a saliency
            folder that exists has a map for every training image. What the default folder of masks lacks is looked
            for in SegmentationClass and in SBD.
        sbd: the unpacked SBD, the folder benchmark_RELEASE or the one around it.
        tags_from: `lists`: <name>_cls.txt, `<id> <class index from 0> ...`. `xml`: the objects of
            Annotations/<id>.xml, but those that are marked difficult. `auto`: lists, else xml.

    Raises:
        UserError: a folder or list is missing, empty or contradictory, a class is unknown, a listed image, annotation
            or single saliency map is absent, or a class has no training image.
    """
    devkit = _open_devkit(root, classes)
    sbd_folder = _sbd_folder(sbd) if sbd else None
    truth = _masks(devkit.root, truth_masks, sbd_folder)
    names = {"train": train_list, "val": val_list} | ({"test": test_list} if test_list else {})
    lists = [_read_list(devkit, split, name, val_list, sbd_folder) for split, name in names.items()]
    tables, notes = [], list[str]()
    for listed in lists:
        masks_of_list = [truth.get(i) for i in listed.ids]
        if listed.split == "test":
            tags = list[list[int]]([] for _ in listed.ids)
            masks_of_list = [None for _ in listed.ids]
        else:
            by_list = listed.tags_path.is_file() or not (devkit.root / "Annotations").is_dir()
            listed_tags = tags_from == "lists" or (tags_from == "auto" and by_list)
            tags = (_tags_listed if listed_tags else _tags_annotated)(devkit, listed)
            lacking = lacking_masks(masks_of_list.count(None), len(masks_of_list), listed.split)
            notes += [f"{note} (a folder {MASKS}, or SBD by `sbd`, would change that)" for note in lacking]
        if listed.split == "train":
            _check_classes(devkit.classes, listed, tags)
        table = listing_table(
            image_id=listed.ids,
            uri=[str(devkit.images / f"{image_id}.jpg") for image_id in listed.ids],
            domain="target",
            split=listed.split,
            tags=tags,
            mask_uri=masks_of_list,
            saliency_uri=_saliency(devkit.root / saliency, listed),
        )
        tables.append(table)
    check_once((listed.path, listed.ids) for listed in lists)
    if not truth:
        notes = [f"no folder of ground-truth masks {Path(truth_masks).name}: nothing is scored"]
    notes += [note for listed in lists for note in listed.notes]
    return Listing(pa.concat_tables(tables), devkit.classes, tuple(notes))


def _open_devkit(root: Path, classes: Path | None) -> _Devkit:
    root = root.expanduser().resolve()
    names = read_classes(classes) if classes else VOC_CLASSES
    remedy = "point `root` at the folder VOC2012"
    images = source_folder(root / "JPEGImages", "the images of a VOC 2012 devkit", remedy)
    lists = source_folder(root / "ImageSets" / "Segmentation", "the lists of a VOC 2012 devkit", remedy)
    return _Devkit(root, images, set(names_in(images)), lists, names)


def _read_list(devkit: _Devkit, split: str, name: str, val_list: str, sbd: Path | None) -> _DevkitList:
    """The list of a split; an absent train_aug.txt is made of other lists. All of its images exist."""
    path, notes = devkit.lists / f"{name}.txt", []
    if split == "train" and name == "train_aug" and not path.is_file():
        ids = _train_aug(devkit.lists, val_list, sbd)
        notes.append(f"{path.name} is made of SBD's ids and train.txt without val.txt: {len(ids)} images")
    else:
        ids = _read_ids(path, f"add it, or name another list by `{split}_list`")
    absent = [image_id for image_id in ids if f"{image_id}.jpg" not in devkit.image_names]
    check_present(path, absent, devkit.images, f"<id>.jpg for each of the {len(ids)} ids")
    return _DevkitList(split, path, ids, notes)


def _read_ids(path: Path, remedy: str) -> list[str]:
    """The image ids of a list, one per line, in its order."""
    return [line for _, line in read_lines(path, "a UTF-8 text file with one image id per line", remedy)]


def _tags_listed(devkit: _Devkit, listed: _DevkitList) -> list[list[int]]:
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


def _tags_annotated(devkit: _Devkit, listed: _DevkitList) -> list[list[int]]:
    remedy = f"restore the devkit's, or write {listed.tags_path.name}"
    folder = source_folder(devkit.root / "Annotations", "<id>.xml for each image, as in a VOC 2012 devkit", remedy)
    names = set(names_in(folder))
    listed.check_each("annotation", [i for i in listed.ids if f"{i}.xml" not in names], f"<id>.xml in {folder}", remedy)
    objects = [_annotated(folder / f"{image_id}.xml", devkit.classes) for image_id in listed.ids]
    listed.notes.append(f"tags of {listed.path.name} are those of the objects in {folder.name}")
    if marked := sum(mark for of_image in objects for _, mark in of_image):
        listed.notes.append(f"{marked} object(s) of {listed.path.name} are marked difficult and do not count")
    return [sorted({k for k, mark in of_image if not mark}) for of_image in objects]


def _annotated(path: Path, classes: tuple[str, ...]) -> list[tuple[int, bool]]:
    """The objects of an annotation: class index, and whether it is marked difficult. Parts of objects do not count."""
    try:
        data = read_bytes(str(path))
        if len(data) > _MAX_XML:
            raise ValueError(f"more than {_MAX_XML} bytes")
        tree = ElementTree.fromstring(data)  # expat ends where entities expand to much more than the file holds
        if tree.tag != "annotation":
            raise ValueError("it has another root")
    except (OSError, SyntaxError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise UserError(f"{path}: {unquoted(error)}", "an XML file <annotation> of VOC", "replace the file") from None
    texts = [[(entry.findtext(of) or "").strip() for of in ("name", "difficult")] for entry in tree.iterfind("object")]
    if unknown := sorted({name for name, _ in texts} - set(classes)):
        raise UserError(
            f"{path}: an object of class {shown([repr(name) for name in unknown])}",
            f"one of the {len(classes)} classes",
            "correct the file, or name the right class file by `classes`",
        )
    if wrong := sorted({mark for _, mark in texts} - {"", "0", "1"}):
        raise UserError(f"{path}: an object with difficult {shown(wrong)}", "0 or 1", "correct the file")
    return [(classes.index(name), mark == "1") for name, mark in texts]


def _check_classes(names: tuple[str, ...], train: _DevkitList, tags: Sequence[Sequence[int]]) -> None:
    """Every class has a training image."""
    tagged = {tag for of_image in tags for tag in of_image}
    if empty := [name for index, name in enumerate(names) if index not in tagged]:
        raise UserError(
            f"no training image of class {shown(empty)} in {train.path.name}",
            "at least one tagged image for each class",
            "add images, or take the class out of the class file (`classes`)",
        )


def _saliency(folder: Path, listed: _DevkitList) -> list[str | None]:
    """The saliency map of each image, None for images without; where the folder exists, training images have one."""
    names = set(names_in(folder))
    maps = [str(folder / f"{image_id}.png") if f"{image_id}.png" in names else None for image_id in listed.ids]
    if listed.split == "train" and folder.is_dir():
        listed.check_each(
            f"saliency map in {folder}",
            [image_id for image_id, path in zip(listed.ids, maps, strict=True) if path is None],
            "<id>.png for each of them",
            "add the maps, or point `saliency` at a folder that does not exist, which means that there are none",
        )
    return maps


def _sbd_folder(sbd: Path) -> Path:
    """SBD's folder with cls, train.txt and val.txt, wherever above it the user points."""
    sbd = sbd.expanduser().resolve()
    for folder in (sbd, sbd / "dataset", sbd / "benchmark_RELEASE" / "dataset"):
        if (folder / "cls").is_dir():
            return folder
    raise UserError(
        f"no folder benchmark_RELEASE/dataset/cls in {sbd}",
        "the unpacked benchmark.tgz of SBD",
        f"unpack {SBD_HOME}/benchmark.tgz and point `sbd` at its folder benchmark_RELEASE",
    )


def _train_aug(lists: Path, val_list: str, sbd: Path | None) -> list[str]:
    """10,582 ids, ascending: those of SBD and of VOC's train, except those of VOC's val and of the val list in use."""
    if sbd is None:
        raise UserError(
            f"no list {lists / 'train_aug.txt'}",
            "the list of VOC 2012 and SBD images, which the devkit does not have",
            f"point `sbd` at the unpacked {SBD_HOME}/benchmark.tgz, which the list is made from, or name another list, "
            "such as train, by `train_list`",
        )
    ids = [i for path in (sbd / "train.txt", sbd / "val.txt") for i in _read_ids(path, "unpack benchmark.tgz again")]
    ids += _read_ids(lists / "train.txt", "restore the devkit's own list")
    held = {i for of in {"val", val_list} for i in _read_ids(lists / f"{of}.txt", "name another list by `val_list`")}
    return sorted(set(ids) - held)


def _masks(root: Path, masks: str, sbd: Path | None) -> dict[str, str]:
    """Image id -> its ground-truth mask in `masks`, and where that is the default, else the devkit's own or SBD's."""
    candidates = [(root / masks, ".png")]
    if masks == MASKS:
        candidates += [(root / "SegmentationClass", ".png")] + ([(sbd / "cls", ".mat")] if sbd else [])
    found: dict[str, str] = {}
    for folder, suffix in reversed(candidates):
        names = [name for name in names_in(folder) if name.endswith(suffix)]
        found |= {name.removesuffix(suffix): str(folder / name) for name in names}
    return found


VOC = Source(
    lister=list_voc,
    location="root",
    help="Folder VOC2012 of a PASCAL VOC 2012 devkit.",
    example="voc VOCdevkit/VOC2012",
    data_keys={"root": "voc"} | {name: name for name in inspect.signature(list_voc).parameters if name != "root"},
    defines_classes=True,
    curated=True,
)
