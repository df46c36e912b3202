"""Helpers of all exports: reads tables of a run, checks names of files, and writes CSV files and pictures."""

import contextlib
import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.photographs import write_photograph
from mcis.datasets.images.label_masks import decode_labels, encode_labels, resize_labels
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.sources.lists import is_line, relative_name, without_image_suffix
from mcis.datasets.storage.folders import MAX_NAME_BYTES
from mcis.datasets.storage.threads import map_in_threads
from mcis.platform.runs.files import atomic_write, read_table, shards_in
from mcis.platform.runs.progress import counted
from mcis.platform.runs.scores import SCORED_OUTPUTS
from mcis.platform.runs.workspace import Workspace

_THREADS = 4
"""Number of threads that write pictures."""
_MAX_BYTES = MAX_NAME_BYTES - len(".png")
_FILE_SUFFIXES = (".png", ".jpg", ".npy")
"""Suffixes of exported files. A file with such a name must not have the name of another file's folder."""


def stage_table(workspace: Workspace, name: str, stage: str, table: str) -> Path:
    """Folder of a table in the output of a stage whose output is scored.

    Raises:
        UserError: The run has not finished the stage, or does not include it.
    """
    reached = workspace.outputs(name)
    if stage in reached:
        return reached[stage] / table

    stages = [scored_output.stage for scored_output in SCORED_OUTPUTS.values()]
    later_stages = stages[stages.index(stage) + 1 :]
    remedy = f"repeat the run's command with --until {stage}, or without --until"
    if not reached.keys().isdisjoint(later_stages):
        remedy = "name another run: this one uses the ground truth or files of another program instead"
    raise UserError(
        f"run {name!r} has no {table}: it has reached {join_shortened(list(reached))}",
        f"a run that has finished the stage {stage}",
        remedy,
    )


def table_rows(table: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table; one shard at a time is in memory."""
    for file in shards_in(table):
        yield from read_table(file, columns).to_pylist()


def file_names(image_ids: Iterable[str], out: Path) -> dict[str, str]:
    """Relative paths for files that are named after images, by image id.

    An id may be an absolute path or a URI. The suffix of an image file is left out, unless two names would then be the
    same.

    Args:
        image_ids: The ids.
        out: The folder of the files, for messages.

    Raises:
        UserError: An id has no name, two ids lead to the same file, the file of one would be the folder of
            another, or a name cannot be a line of a list.
    """
    paths = {image_id: relative_name(image_id) for image_id in image_ids}
    short = {image_id: path if path is None else without_image_suffix(path) for image_id, path in paths.items()}
    counts = Counter(name.casefold() for name in short.values() if name is not None)
    names = {}
    for image_id, path in paths.items():
        name = short[image_id]
        is_unique = name is not None and counts[name.casefold()] == 1
        names[image_id] = name if is_unique else path
    return _check_names(names, out, "image id(s)")


def class_file_names(classes: Iterable[str], out: Path) -> dict[str, str]:
    """Relative paths for files that are named after classes, by class. For errors see `file_names`."""
    return _check_names({name: relative_name(name) for name in classes}, out, "class(es)")


def _check_names(names: Mapping[str, str | None], out: Path, kind: str) -> dict[str, str]:
    """Returns the names if each of them can be a separate file; raises UserError otherwise.

    Args:
        names: Relative path by id; None if the id has no name, such as `..`.
        out: The folder.
        kind: What the ids are, for messages.
    """
    inside = {item: name for item, name in names.items() if name is not None}
    same = []
    folded_names: set[str] = set()
    files: set[str] = set()
    for item, name in inside.items():
        folded_name = name.casefold()
        if folded_name in folded_names:
            same.append(item)
        folded_names.add(folded_name)
        files.update(f"{folded_name}{suffix}" for suffix in _FILE_SUFFIXES)

    below_a_file = []
    for item, name in inside.items():
        if any(str(parent) in files for parent in PurePosixPath(name.casefold()).parents):
            below_a_file.append(item)

    problems = {
        f"have no name below {out}": [item for item, name in names.items() if name is None],
        "lead to the file of another": same,
        "lead below the file of another": below_a_file,
        "contain line breaks or control characters, or begin or end with spaces": [
            item for item, name in inside.items() if not is_line(name)
        ],
        f"have a name of more than {_MAX_BYTES} bytes, the limit of file systems without a suffix": [
            item for item, name in inside.items() if any(len(part.encode()) > _MAX_BYTES for part in name.split("/"))
        ],
    }
    for problem, items in problems.items():
        if items:
            found = f"{kind} that {problem}: {', '.join(map(repr, items[:5]))}"
            raise UserError(found, "a separate file for each", "correct the names in the data set")
    return inside


def write_all(rows: Iterable[Any], write: Callable[[Any], int], *, label: str, total: int) -> int:
    """Writes the pictures of all rows in several threads, with few rows in memory at a time.

    Args:
        rows: What to write.
        write: Writes one row and returns how many pictures it wrote.
        label: Name in the progress display.
        total: Number of rows.

    Returns:
        The number of pictures.
    """
    with contextlib.closing(map_in_threads(write, rows, threads=_THREADS)) as counts:
        return sum(counted(counts, label, total))


def labels_table(classes: Sequence[str]) -> bytes:
    """CSV of label, class, red, green, blue: background is 0, class index k is k + 1, 255 is ignored."""
    colors = palette()
    names = [(0, "background"), *enumerate(classes, 1), (255, "ignore")]
    rows = ([label, name, *colors[label].tolist()] for label, name in names)
    return csv_table(["label", "class", "red", "green", "blue"], rows)


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A table as CSV in UTF-8."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def write_masked_photograph(
    image: Mapping[str, Any], mask: bytes, photograph: Path, mask_file: Path, value_range: ValueRange | None
) -> None:
    """Writes an image as a JPEG, and its label mask as a palette PNG of the same size.

    A mask that is smaller than the image (`data.max_side`) is resized by nearest neighbor.

    Args:
        image: The image's row of the index.
        mask: The mask as PNG.
        photograph: File of the JPEG.
        mask_file: File of the mask.
        value_range: See `read_rgb`.

    Raises:
        UserError: The image is missing or was changed.
    """
    write_photograph(image["uri"], image["content_hash"], photograph, value_range)
    labels = resize_labels(decode_labels(mask), image["height"], image["width"])
    write_bytes(mask_file, encode_labels(labels))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically, without syncing it to disk."""
    with atomic_write(path, durable=False) as temporary:
        temporary.write_bytes(content)
