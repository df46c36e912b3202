"""Writes a data set of another tool as a table for the source `tags`, with label masks.

Data sets come from other people and tools, so values may be missing or invalid, and paths may lead anywhere.
"""

import contextlib
import csv
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import (
    IGNORE,
    MAY_BE_NEGATIVE_TAGS,
    NEGATIVE_TAGS,
    check_classes,
    normalized_name,
    read_classes,
    split_names,
)
from mcis.datasets.errors import UserError, join_shortened, join_shortened_quoted, unquoted
from mcis.datasets.formats.class_folders import FOLDERS
from mcis.datasets.formats.coco import COCO
from mcis.datasets.formats.cvat import CVAT
from mcis.datasets.formats.data_set import AnnotatedObject, DataSet, Draw, Format, ImportRequest, Photos
from mcis.datasets.formats.hugging_face import HUGGING_FACE
from mcis.datasets.formats.image_files import find_files
from mcis.datasets.formats.label_studio import LABEL_STUDIO
from mcis.datasets.formats.labelme import LABELME
from mcis.datasets.formats.voc_xml import VOC_XML
from mcis.datasets.formats.yolo import YOLO
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS, decode_picture
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.index import check_name_lengths
from mcis.datasets.sources.annotations import recognize_annotations
from mcis.datasets.sources.lists import LeftOut, did_you_mean, is_line, left_out_notes, path_inside
from mcis.datasets.sources.tagged import SPLITS, join_tags, split_tags
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import atomic_write

FORMATS: dict[str, Format] = {
    "coco": COCO,
    "yolo": YOLO,
    "cvat": CVAT,
    "labelstudio": LABEL_STUDIO,
    "labelme": LABELME,
    "vocxml": VOC_XML,
    "folders": FOLDERS,
    "huggingface": HUGGING_FACE,
}
"""Formats of data sets by name."""

_COLUMNS = ("image", "tags", "split", "mask")
_NEGATIVE = NEGATIVE_TAGS[0]
"""Tag of photographs that show none of the classes."""
_UNSUITABLE_NAME = r"^\s|\s$|^$|^[\[{\"']"
"""Class names that cannot be tags in a table: with outer spaces, empty, or beginning with a bracket or quote."""
_MAX_SHOWN = 20
"""Maximum number of images that a message lists."""

Row: TypeAlias = dict[str, str]
"""A row of photos.csv."""
Track: TypeAlias = Callable[[Sequence[str]], Iterable[str]]
"""Iterates over names and may show the progress."""


class _Output(NamedTuple):
    """Paths of the files that an import writes.

    Attributes:
        folder: The folder.
        split: Name of the imported split.
    """

    folder: Path
    split: str

    @property
    def table(self) -> Path:
        return self.folder / "photos.csv"

    @property
    def classes(self) -> Path:
        return self.folder / "classes.txt"

    @property
    def images(self) -> Path:
        """Link to the folder of the images, or folder of copies."""
        return self.folder / "images" / self.split

    @property
    def masks(self) -> Path:
        """Folder of the masks."""
        return self.folder / "masks" / self.split


class _Selection(NamedTuple):
    """Classes of a table.

    Attributes:
        classes: Names of the classes.
        photos: Photographs with objects of these classes only.
        negatives: Names of the photographs that show no object of any class, whether it is selected or not.
    """

    classes: list[str]
    photos: Photos
    negatives: set[str]


def import_data_set(
    format: str,
    source: Path,
    out: Path,
    *,
    images: Path | None = None,
    split: str = "train",
    classes: Sequence[str] = (),
    negatives: Sequence[str] = (),
    labels: Path | None = None,
    track: Track = iter,
) -> list[str]:
    """Imports a split of a data set into a folder, which may already hold other splits.

    An earlier import of the split stays as it is until all images are copied and all masks are drawn.

    Writes:

        photos.csv                  image, tags, split, mask, as `list_tagged` reads it; the tag of a photograph without
                                    objects is `none`
        classes.txt                 the classes that occur, in alphabetical order
        images/<split>              a link to the folder of the images, or a folder of copies
        masks/<split>/<image>.png   labels, if every object has an outline; smaller objects are on top, crowds ignored

    Args:
        format: Name in FORMATS, which describes `source` and `images`.
        source: File or folder of the data set.
        out: Folder to write.
        images: Folder of the images, see `find_files`. None: where the format expects it.
        split: `train`, `val` or `test`.
        classes: Classes to import, in addition to those of `out`: names, or lists of names (`split_names`). Empty: all
            classes.
        negatives: Tags, next to NEGATIVE_TAGS, that are no classes: they mean none of the classes. Names, or lists of
            names.
        labels: The file labels.csv of an export. Its classes are imported, whether they occur or not, and masks get its
            labels.
        track: Iterates over the names of the photographs, and may show the progress, as `tqdm` does.

    Returns:
        Messages: a summary of the written table, and what was left out.

    Raises:
        UserError: The data set does not follow the format; no image is found; the name of a file cannot be in a table
            or is too long; or a class does not occur, cannot be a tag in a table, or differs from those of the existing
            table.
    """
    source = source.expanduser().resolve()
    output = _Output(out.expanduser().resolve(), split)
    left_out = LeftOut()
    _check_arguments(format, source, split)
    earlier_rows, other_rows = _read_earlier_rows(output)
    exported = _read_exported_classes(labels) if labels else []

    with _folder_aside(output.folder) as folder_aside:
        aside = _Output(folder_aside, split)
        data_set = _read_data_set(format, ImportRequest(source, images, output.folder, aside.images, split, left_out))
        is_copied = data_set.folder == aside.images
        if not is_copied and output.images.is_dir() and not output.images.is_symlink():
            raise UserError(f"{output.images} is a folder of images", "a link, or nothing", "name another --out")

        _remove_negative_tags(data_set.photos, negatives, left_out)
        selection = _select_classes(source, data_set.photos, classes, exported, other_rows, output, left_out)
        rows = list(_write_masks(data_set.folder, selection, aside.masks, output, left_out, track))

        _remove_stale_masks(earlier_rows, rows, output)
        if not other_rows:
            output.table.unlink(missing_ok=True)
            output.classes.unlink(missing_ok=True)
        if is_copied:
            _move_copies(rows, aside, output)
        else:
            _link(output.images, data_set.folder)
        _move_files([row["mask"] for row in rows if row["mask"]], aside, output)
    _write_table(output, other_rows + rows, selection.classes)

    return [
        _summary(output, rows, selection),
        *data_set.notes,
        *_doubtful_class_notes(selection.classes),
        *left_out_notes(str(source), left_out),
    ]


@contextlib.contextmanager
def _folder_aside(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder in `folder`.

    If `folder` does not exist, it is created, and removed again if it is empty at the end.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".import-", dir=folder) as aside:
            yield Path(aside)
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _summary(output: _Output, rows: Sequence[Row], selection: _Selection) -> str:
    """Returns the message on the written table: its photographs, and the classes."""
    num_negatives = len(selection.negatives)
    num_tagged = len([row for row in rows if row["tags"]]) - num_negatives  # negatives have the tag `none`
    num_masks = len([row for row in rows if row["mask"]])
    counts = [f"{len(rows)} photographs of split {output.split}", f"{num_tagged} with tags"]
    if num_negatives:
        counts.append(f"{num_negatives} that show none of the classes")
    counts.append(f"{num_masks} with a mask")
    classes = join_shortened_quoted(selection.classes, len(selection.classes))
    return f"{output.table}: {', '.join(counts)}; classes {classes}"


def _doubtful_class_notes(classes: Sequence[str]) -> list[str]:
    """Returns notes on classes whose names suggest that their photographs show none of the classes."""
    return [
        f"note: {name!r} is a class; if it means none of the classes, import again with --negatives {name}"
        for name in classes
        if name.casefold() in MAY_BE_NEGATIVE_TAGS
    ]


def _check_arguments(format: str, source: Path, split: str) -> None:
    if format not in FORMATS or split not in SPLITS:
        expected = f"one of {', '.join(FORMATS)}, and one of {', '.join(SPLITS)}"
        raise UserError(f"format {format}, split {split}", expected, "choose a format and a split from these")
    if not source.exists():
        raise UserError(f"no file or folder {source}", FORMATS[format].expected, "correct the path")


def _read_data_set(format: str, request: ImportRequest) -> DataSet:
    """Reads a data set, and finds its images. Images that are not found are left out.

    Returns:
        The data set, whose photographs are named as their files, with tags in the Unicode form NFC.

    Raises:
        UserError: See `import_data_set`.
    """
    source = request.source
    try:
        folder, photos, notes = FORMATS[format].read(request)
        if not photos:
            reasons_for_none = left_out_notes("no photograph in it", request.left_out)
            raise ValueError("; ".join(reasons_for_none) or "no photograph in it")
        found_files = find_files(folder, photos)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # invalid values can raise anything in parsers
        raise _invalid_data_set(format, source, error) from error

    reasons: dict[str, Sequence[str]] = {
        f"image(s) that are not in {folder}": found_files.absent,
        f"image(s) that several files in {folder} fit, or whose file fits several images": found_files.ambiguous,
    }
    for reason, names in reasons.items():
        request.left_out[f"{reason}: {join_shortened(names, _MAX_SHOWN)}"] = len(names)

    file_of_name = found_files.file_of_name
    if not file_of_name:
        raise UserError(
            "; ".join(left_out_notes(f"no image of {source} is found", request.left_out)),
            f"the files of its images below {folder}",
            "correct the names, or name the folder by --images",
        )
    _check_file_names(source, list(file_of_name.values()))

    found_photos: Photos = {}
    for name, objects in photos.items():
        if name in file_of_name:
            found_photos[file_of_name[name]] = _with_valid_tags(objects, request.left_out)
    return DataSet(folder, found_photos, [*notes, *_notes_on_files(file_of_name)])


def _invalid_data_set(format: str, source: Path, error: Exception) -> UserError:
    """Returns the error for a data set whose reader raised `error`. It may have another format."""
    expected = FORMATS[format].expected
    other = recognize_annotations(source)
    if other is not None and other.format != format:
        return UserError(f"{source} holds {other.name}", expected, other.remedy)
    problem = f"no {error.args[0]!r}" if isinstance(error, KeyError) else unquoted(error)
    return UserError(f"{source} is not as expected: {problem}", expected, "correct the data set, or name another one")


def _check_file_names(source: Path, files: list[str]) -> None:
    """Raises a UserError if files have names that cannot be in a table, or whose masks would have too long a name."""
    invalid_names = [file for file in files if not _is_valid_name(file)]
    if invalid_names:
        raise UserError(
            f"{len(invalid_names)} of {len(files)} images of {source} have names that a table cannot hold: "
            f"{join_shortened(invalid_names)}",
            "names without line breaks, control characters, and spaces at the start or end",
            "rename the files",
        )

    check_name_lengths(files)


def _with_valid_tags(objects: Iterable[AnnotatedObject], left_out: LeftOut) -> list[AnnotatedObject]:
    """Returns objects with tags as `normalized_name`. An object without a class name gets an unknown class."""
    valid: list[AnnotatedObject] = []
    for item in objects:
        tag = None if item.tag is None else normalized_name(item.tag)
        if tag == "":
            left_out["empty class name(s); their objects give no tag and are ignored in masks"] += 1
            tag = None
        valid.append(item._replace(tag=tag))
    return valid


def _notes_on_files(file_of_name: Mapping[str, str]) -> list[str]:
    """Returns a note if files were found under other names than those in the data set."""
    differing = [f"{name} -> {file}" for name, file in file_of_name.items() if name != file]
    if not differing:
        return []
    return [f"note: {len(differing)} image(s) were found under another path or spelling: {join_shortened(differing)}"]


def _remove_negative_tags(photos: Photos, further: Sequence[str], left_out: LeftOut) -> None:
    """Removes the objects whose tag means none of the classes, in place.

    Args:
        further: Such tags, next to NEGATIVE_TAGS: names, or lists of names.
        left_out: Counts of items that are left out, to which the removed objects of photographs with other objects are
            added.
    """
    further = split_names(further, _tags_of(photos))
    for name, objects in photos.items():
        others = [item for item in objects if not _means_none(item.tag, further)]
        photos[name] = others
        if others:
            reason = "object(s) whose tag means none of the classes, in photographs with other objects"
            left_out[reason] += len(objects) - len(others)


def _means_none(tag: str | None, further: Sequence[str]) -> bool:
    return tag is not None and (tag.casefold() in NEGATIVE_TAGS or tag in further)


def _is_valid_name(name: str) -> bool:
    """Returns whether a name is a normal path below the folder of the images that can be a cell of a table."""
    return path_inside(name) == name and is_line(name)


def _read_earlier_rows(output: _Output) -> tuple[list[Row], list[Row]]:
    """Reads the table of earlier imports.

    Returns:
        The rows of the imported split, and the rows of other splits. Both are empty if there is no table.

    Raises:
        UserError: The table or the file of class names was not written by an import.
    """
    has_table = output.table.exists()
    rows: list[Row] = []
    if has_table:
        rows = list(csv.DictReader(output.table.read_text("utf-8-sig").splitlines()))

    if rows and tuple(rows[0]) != _COLUMNS:
        found = f"{output.table} has columns {', '.join(rows[0])}"
        raise UserError(found, f"columns {', '.join(_COLUMNS)}", "name another --out")
    if has_table != output.classes.exists():
        found = f"{output.folder} holds photos.csv or classes.txt that no import wrote"
        raise UserError(found, "a folder for imports only", "name another --out")
    split_rows = [row for row in rows if row["split"] == output.split]
    return split_rows, [row for row in rows if row["split"] != output.split]


def _remove_stale_masks(earlier_rows: Sequence[Row], rows: Sequence[Row], output: _Output) -> None:
    """Removes the masks that an earlier import of the split wrote and that this one does not write.

    They may have other labels, or no object any more.

    Args:
        earlier_rows: Rows of the earlier import. Files that they do not name are kept.
        rows: Rows of this import.
        output: The files of the import.
    """
    new_masks = {row["mask"] for row in rows}
    for row in earlier_rows:
        mask = (output.folder / (row["mask"] or "")).resolve()  # a row may lack its last cell
        if row["mask"] not in new_masks and mask.is_relative_to(output.masks.resolve()) and mask.is_file():
            mask.unlink()


def _move_copies(rows: Sequence[Row], aside: _Output, output: _Output) -> None:
    """Moves the copies of images to their place."""
    if output.images.is_symlink():  # they would be moved into another data set
        output.images.unlink()
    _move_files([row["image"] for row in rows], aside, output)


def _move_files(files: Iterable[str], aside: _Output, output: _Output) -> None:
    """Moves files from the folder in which they were written to their place, where they replace earlier ones."""
    for file in files:
        target = output.folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(aside.folder / file, target)


def _read_exported_classes(labels: Path) -> list[str]:
    """Returns the classes of labels 1..K in labels.csv of an export.

    Raises:
        UserError: The file is not such a table.
    """
    try:
        rows = csv.DictReader(labels.read_text("utf-8-sig").splitlines())
        class_of_label = {int(row["label"]): row["class"] for row in rows}
        num_classes = max(1, len(class_of_label) - 2)  # the other labels are background and ignored
        return [class_of_label[label] for label in range(1, num_classes + 1)]
    except (KeyError, OSError, ValueError) as error:
        found = f"{labels} is not a table of labels: {unquoted(error)}"
        raise UserError(found, "labels.csv of an export", "name that file by --labels") from error


def _select_classes(
    source: Path,
    photos: Photos,
    wanted: Sequence[str],
    exported: list[str],
    other_rows: list[Row],
    output: _Output,
    left_out: LeftOut,
) -> _Selection:
    """Selects the classes of a table, and removes objects of other classes.

    Args:
        source: The data set, for messages.
        photos: All its photographs.
        wanted: Classes to import; empty: all.
        exported: Classes of an export, in the order of its labels; empty: none given.
        other_rows: Rows of the table of other splits, whose classes are selected too.
        output: The files of the import.
        left_out: Counts of items that are left out, to which the removed objects are added.

    Raises:
        UserError: See `_check_names`.
    """
    occurring = _tags_of(photos)
    wanted = split_names(wanted, occurring)
    tags_of_other_splits = _tags_of_rows(other_rows)

    selected = occurring
    if exported or wanted:
        selected = occurring & {*(exported or wanted), *tags_of_other_splits}
    selected_photos: Photos = {}
    for name, objects in photos.items():
        selected_photos[name] = [item for item in objects if not item.tag or item.tag in selected]
    left_out["object(s) of classes that are not wanted"] = _count_objects(photos) - _count_objects(selected_photos)

    names = exported or sorted(selected | tags_of_other_splits)
    names_of_other_splits = list(read_classes(output.classes)) if other_rows else names
    if exported and names != names_of_other_splits:  # labels follow the order of the classes
        differing = {*names, *names_of_other_splits}
    else:
        differing = set(names) ^ set(names_of_other_splits)
    absent = set(wanted) - occurring - tags_of_other_splits

    _check_names(source, names, differing | absent, occurring)
    negatives = {name for name, objects in photos.items() if not objects}
    return _Selection(names, selected_photos, negatives)


def _tags_of(photos: Photos) -> set[str]:
    tags: set[str] = set()
    for objects in photos.values():
        tags.update(item.tag for item in objects if item.tag)
    return tags


def _tags_of_rows(rows: Iterable[Row]) -> set[str]:
    """Returns the classes that occur in rows of a table."""
    tags: set[str] = set()
    for row in rows:
        tags.update(tag for tag in split_tags(row["tags"]) if tag not in ("", _NEGATIVE))
    return tags


def _count_objects(photos: Photos) -> int:
    return sum(len(objects) for objects in photos.values())


def _check_names(source: Path, names: Sequence[str], wrong: Set[str], occurring: Set[str]) -> None:
    """Raises a UserError if there is no class, or a class name is wrong or cannot be a tag in a table.

    Args:
        wrong: Names of classes that do not occur or that differ from those of the other splits.
        occurring: Names of the classes that occur in the data set.
    """
    unsuitable = {name for name in names if re.search(_UNSUITABLE_NAME, name) or not is_line(name)}
    invalid = sorted(wrong | unsuitable)
    if invalid or not names:
        correct = sorted(occurring - set(invalid))
        found = "no object of any class"
        if invalid:
            found = f"{len(invalid)} class(es) cannot be imported: {join_shortened_quoted(invalid)}"
        raise UserError(
            f"{source}: {found}",
            f"names of classes that occur ({join_shortened_quoted(correct, 20)}), the same as in other splits",
            f"{did_you_mean(invalid, correct)}rename them, choose by --classes, or import the split that has all "
            "classes first",
        )
    check_classes(source, names)


def _link(link: Path, folder: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def _write_masks(
    folder: Path, selection: _Selection, new_masks: Path, output: _Output, left_out: LeftOut, track: Track
) -> Iterator[Row]:
    """Writes the mask of each photograph whose objects all have outlines, and yields the photographs' rows.

    If no object of the data set has an outline, it has no masks. Masks that cannot be drawn are left out.

    Args:
        folder: Folder of the images.
        selection: The photographs.
        new_masks: Folder to write the masks to.
        output: The files of the import.
        left_out: Counts of items that are left out, to which the masks are added.
        track: See `import_data_set`.

    Raises:
        UserError: No mask can be drawn.
    """
    classes, photos, negatives = selection
    has_masks = any(_outlined(objects) for objects in photos.values())
    problems: list[str] = []

    for name in track(list(photos)):
        objects = photos[name]
        mask = ""
        if has_masks and _has_all_outlines(objects):
            try:
                mask_bytes = _draw_mask(folder / name, objects, classes)
            except ValueError as error:
                problems.append(f"{name}: {error}")
            else:
                mask = f"masks/{output.split}/{name}.png"
                with atomic_write(new_masks / f"{name}.png", durable=False) as temporary:
                    temporary.write_bytes(mask_bytes)

        tags = [_NEGATIVE] if name in negatives else sorted({item.tag for item in objects if item.tag})
        yield {"image": f"images/{output.split}/{name}", "tags": join_tags(tags), "split": output.split, "mask": mask}

    drawable = [objects for objects in photos.values() if objects and _has_all_outlines(objects)]
    if problems and len(problems) == len(drawable):
        found = f"{folder}/{problems[0]}"
        raise UserError(found, "a picture, and outlines that fit it", "correct the file or remove it")
    reason = (
        f"mask(s), because the image is damaged or too large, or its outlines do not fit: {join_shortened(problems)}"
    )
    left_out[reason] = len(problems)


def _outlined(objects: Iterable[AnnotatedObject]) -> list[tuple[str | None, Draw]]:
    """Returns the tag and the drawing function of the objects that have an outline."""
    return [(item.tag, item.draw) for item in objects if item.draw]


def _has_all_outlines(objects: Sequence[AnnotatedObject]) -> bool:
    return len(_outlined(objects)) == len(objects)


def _draw_mask(image: Path, objects: Sequence[AnnotatedObject], classes: Sequence[str]) -> bytes:
    """Returns the content of the mask file of an image.

    Raises:
        ValueError: The mask cannot be drawn. The text is the reason.
    """
    try:
        return encode_labels(_draw_labels(image, objects, classes))
    except MemoryError:
        raise ValueError("it takes more memory than there is") from None
    except (KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(unquoted(error)) from error


def _draw_labels(image: Path, objects: Sequence[AnnotatedObject], classes: Sequence[str]) -> NDArray[np.uint8]:
    """Draws the label mask of an image, (H, W): crowds first, then objects from the largest to the smallest.

    Errors of many kinds are raised if the image is no picture or an outline is damaged.
    """
    # Decoding to one pixel is the least work that checks the image and finds its size. Any range of values will do.
    _, height, width = decode_picture(
        read_bytes(str(image)), min_side=1, max_pixels=PILLOW_MAX_PIXELS, max_side=1, value_range=(0, 1)
    )

    def drawing_order(outlined: tuple[str | None, Draw]) -> tuple[bool, int]:
        tag, draw = outlined
        is_crowd = tag is None
        num_pixels = int(draw(height, width).sum())
        return not is_crowd, -num_pixels

    labels = np.zeros((height, width), np.uint8)
    # Each outline is drawn twice, because the pixels of all objects may not fit into memory.
    for tag, draw in sorted(_outlined(objects), key=drawing_order):
        labels[draw(height, width)] = IGNORE if tag is None else classes.index(tag) + 1
    return labels


def _write_table(output: _Output, rows: Sequence[Row], classes: Sequence[str]) -> None:
    with atomic_write(output.classes) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")

    with atomic_write(output.table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
