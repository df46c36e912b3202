"""Localization maps of another program (`localize.maps`): files -> IMPORTED_MAPS_SCHEMA, as given."""

import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.map_files import find_map_files, read_map_files
from mcis.datasets.tables.large_tables import table_digest
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.outputs.imported_files import ImportedFiles, unused_note
from mcis.platform.outputs.read_index import read_image_ids, split_rows
from mcis.platform.outputs.tables import IMPORTED_MAPS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import contents_digest, fingerprint, read_shards, read_table
from mcis.platform.runs.results import StageResult

_KEY = "localize.maps"
_SHARD_ROWS = 16
"""Maximum number of images in a shard."""
_SHARD_BYTES = 2**27
"""Size of the maps in a shard of large images, bytes, if it has several images. It is half of `shards.SHARD_BYTES`."""


def check_map_files(section: LocalizeConfig, image_ids: list[str], all_ids: list[str]) -> None:
    """Raises UserError if there are no map files, or none belongs to any of the images. For `all_ids` see
    `match_files`."""
    _map_files(section).check_any_matches(image_ids, all_ids)


def map_file_contents(section: LocalizeConfig, context: RunContext) -> list[str]:
    """The format of the maps, and digests of the names and contents of their files, for the key of the stage."""
    assert section.maps is not None
    paths: list[str] = []
    rows = split_rows(context, "train", tagged=True, columns=["image_id"])
    for files in _files_of_images(section, rows, read_image_ids(context)):
        paths += files
    names = [os.path.relpath(path, section.maps) for path in paths]
    return [section.maps_format, fingerprint(names), contents_digest(paths)]


def _files_of_images(section: LocalizeConfig, rows: pa.Table, all_ids: Iterable[str]) -> list[list[str]]:
    """The map files of each image. Raises UserError if an image has none."""
    return _map_files(section).match_all(rows["image_id"].to_pylist(), all_ids)


def _map_files(section: LocalizeConfig) -> ImportedFiles[list[str]]:
    """Finds the map files of another program."""
    assert section.maps is not None
    return ImportedFiles(find_map_files(section.maps, section.maps_format), "map", section.maps, _KEY)


def rows_per_shard(images: pa.Table, max_rows: int) -> int:
    """Returns the number of images per shard, so that processes can read a shard of large maps and keep it in memory.

    It follows from the mean size of the largest maps, so that a single large one does not decide for all shards.

    Args:
        images: Rows of the index. Maps usually have the size of their image.
        max_rows: The result is at most this number.
    """
    heights = images["height"].to_numpy().astype(np.int64)
    widths = images["width"].to_numpy().astype(np.int64)
    num_tags = pc.list_value_length(images["tags"]).to_numpy()
    sizes = 4 * heights * widths * num_tags  # bytes of float32
    largest = np.sort(sizes)[-max_rows:]
    total = max(1, int(largest.sum()))
    return max(1, min(max_rows, _SHARD_BYTES * len(largest) // total))


def import_maps(config: Config, context: RunContext) -> StageResult:
    """Writes the maps of all tagged training images.

    Raises:
        UserError: An image has no file, or a file is refused (`read_map_files`).
    """
    section = config.localize
    assert section.maps is not None
    rows = split_rows(context, "train", tagged=True)
    files = _files_of_images(section, rows, read_image_ids(context))
    with_files = rows.select(["image_id", "tags"]).append_column("files", pa.array(files, pa.list_(pa.string())))
    map_table(
        with_files,
        context.output / "maps",
        worker=functools.partial(read_maps, section.maps_format, len(context.classes)),
        label="import maps",
        compute=config.compute,
        shard_rows=rows_per_shard(rows, min(config.compute.shard_rows, _SHARD_ROWS)),
    )

    columns = read_table(context.output / "maps", ["image_id", "class", "is_in_file", "other_classes"])
    num_files = len(_map_files(section).files)
    return StageResult(
        counts={"images": len(rows), "maps": pc.sum(columns["is_in_file"]).as_py() or 0},
        notes=(*_content_notes(columns, context.classes), *unused_note("map file", section.maps, num_files, len(rows))),
        identity=table_digest(read_shards(context.output / "maps")),  # other folders may have the same maps
    )


def read_maps(format: str, classes: int, rows: pa.Table) -> pa.Table:
    """Reads the map files of images into a table of IMPORTED_MAPS_SCHEMA.

    A tag without a map gets a map of zeros; maps of classes that are no tags are left out.

    Args:
        format: Format of the files.
        classes: Number of classes K.
        rows: Columns `image_id`, `tags` and `files`.

    Raises:
        UserError: Some files are refused; the message names them.
    """
    map_rows: list[dict[str, Any]] = []
    problems: list[UserError] = []
    for row in rows.to_pylist():
        try:
            found = read_map_files(row["files"], format, classes)
        except UserError as error:
            problems.append(error)
            continue
        by_class = dict(zip(found.classes.tolist(), found.maps, strict=True))
        height, width = found.maps.shape[1:]
        for tag in row["tags"]:
            scores = by_class.get(tag, np.zeros((height, width), np.float32))
            map_rows.append(
                {
                    "image_id": row["image_id"],
                    "class": tag,
                    "height": height,
                    "width": width,
                    "map": scores.ravel(),
                    "is_in_file": tag in by_class,
                    "other_classes": sorted(by_class.keys() - set(row["tags"])),
                }
            )
    if problems:
        first = problems[0]
        raise UserError("; ".join(problem.found for problem in problems), first.expected, first.remedy)
    return pa.Table.from_pylist(map_rows, schema=IMPORTED_MAPS_SCHEMA)


def _content_notes(columns: pa.Table, classes: tuple[str, ...]) -> list[str]:
    """Notes on tags without a map, and on maps of other classes."""
    notes = []
    absent = columns.filter(pc.invert(columns["is_in_file"])).select(["image_id", "class"]).to_pylist()
    if absent:
        names = [f"{row['image_id']} ({classes[row['class']]})" for row in absent]
        notes.append(f"{len(absent)} tag(s) have no map in the files, and get one of zeros: {join_shortened(names)}")

    others = {}
    for row in columns.filter(pc.greater(pc.list_value_length(columns["other_classes"]), 0)).to_pylist():
        others[row["image_id"]] = ", ".join(classes[index] for index in row["other_classes"])
    if others:
        names = [f"{image_id} ({text})" for image_id, text in others.items()]
        notes.append(
            f"the files of {len(others)} image(s) have maps of classes without a tag, left out: {join_shortened(names)}"
        )
    return notes
