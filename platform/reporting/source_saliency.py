"""Writes the saliency maps of an image source where its lister reads them, and the copy of a table that names them."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.extended_table import extended_table
from mcis.datasets.storage.uris import is_remote, without_credentials
from mcis.platform.config.keys import value_of
from mcis.platform.config.sections import Config
from mcis.platform.networks.saliency_detector import Detector
from mcis.platform.reporting.files import file_names, write_bytes
from mcis.platform.reporting.saliency_maps import write_saliency_maps
from mcis.platform.runs.listing import given_classes, list_source


class SourceMaps(NamedTuple):
    """Result of `write_source_saliency`.

    Attributes:
        description: Sentences on what was written and how a run reads it.
        rejected: Number of images without a map, because they cannot be read.
    """

    description: list[str]
    rejected: int


def write_source_saliency(
    source: str, config: Config, make_detector: Callable[[], Detector], out: Path, *, verbose: bool = False
) -> SourceMaps:
    """Writes the saliency maps of a source; see `write_saliency_maps`.

    A map is named after the id of its image without the suffix, and for images of another domain without the first
    part of the id, which is the name of the source. For a table photos.csv, photos.saliency.csv next to it has the
    same content and the column of saliency maps.

    Args:
        source: Name of the source.
        config: Configuration with the location of the source, and without a folder of saliency maps.
        make_detector: See `write_saliency_maps`.
        out: Folder of the maps.
        verbose: See `write_saliency_maps`.

    Raises:
        UserError: See `write_saliency_maps` and `list_source`; or the table is on a server.
    """
    out = out.expanduser().resolve()
    record = SOURCES[source]
    keys = record.keys(source)
    table = _local_table(value_of(config, keys[record.location])) if record.location_kind == "FILE" else None

    listed = list_source(source, config, given_classes(config)).table
    name_of = file_names(listed["image_id"].to_pylist(), out)
    names = list(name_of.values())
    if record.domain != "target":
        names = [name.partition("/")[2] for name in names]
    images = pa.table({"name": names, "uri": listed["uri"]})
    written = write_saliency_maps(make_detector, images, out, config, verbose=verbose)

    count = written.new + written.kept
    description = [f"{count} saliency maps in {out}, {written.new} of them new"]
    if table is not None:
        column = value_of(config, keys["saliency"])
        files = ["" if name in written.rejected else f"{out}/{name}.png" for name in names]
        description += _write_table(table, column, files)
    else:
        setting = shlex.quote(f"{keys['saliency']}={out}")
        description.append(f"a run reads them with {setting}")
    return SourceMaps(description, len(written.rejected))


def _local_table(table: str) -> Path:
    """Returns the path of a table, with links resolved. Raises UserError for one on a server."""
    if is_remote(table):
        raise UserError(
            f"the table {without_credentials(table)} is not on this machine",
            "a local table, next to which its copy with saliency maps is written",
            "copy the table to this machine; its images may stay where they are, named by their URIs",
        )
    return Path(os.path.realpath(os.path.expanduser(table)))


def _write_table(table: Path, column: str, files: Sequence[str]) -> list[str]:
    """Writes the copy of a table with the column of saliency maps. Returns sentences about it.

    Args:
        table: The user's table.
        column: Name of the column.
        files: Absolute path of the map of each row; empty for none.
    """
    folder = table.parent
    paths = [os.path.relpath(file, folder) if file else "" for file in files]
    copy = table.with_name(f"{table.stem}.saliency{table.suffix}")
    write_bytes(copy, extended_table(table, column, paths))

    sentences = [f"table with the column {column}: {copy}"]
    if any(path.startswith("..") for path in paths):
        sentences.append(f"the maps are outside of {folder}: add data.tags.allow_absolute=true to runs of this table")
    return sentences
