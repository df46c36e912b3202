"""Moves a run to photographs that are in another place now, without reading all of them again."""

import contextlib
import hashlib
import os
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import BadFile, UserError, join_shortened
from mcis.datasets.index import CHECK_SCHEMA
from mcis.datasets.storage.faults import access_refused
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.uris import is_remote
from mcis.datasets.tables.large_tables import take_rows
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.files import read_parts, shards_in
from mcis.platform.runs.image_checks import STORED_CHECK_SCHEMA, image_files, store_checks
from mcis.platform.runs.workspace import Workspace

_SAMPLE = 64
"""Number of files whose content is compared with the index."""


def moved_values(config: Config, old: str, new: str) -> Values:
    """Returns the values of a configuration that name a file or folder in `old`, with `new` in its place.

    Args:
        config: The configuration.
        old: Folder, as a path or URI, that no longer holds the files.
        new: Folder that holds them now.

    Raises:
        UserError: No value names a file in `old`.
    """
    old_places = _spellings(old)
    new_place = _spellings(new)[0]
    values: Values = {}
    places: list[str] = []
    for key, value in leaves(config):
        parts = [str(part) for part in (value if isinstance(value, tuple) else (value,))]
        places += filter(_is_place, parts)
        moved = [_moved(part, old_places, new_place) for part in parts]
        if moved != parts:
            values[key] = moved if isinstance(value, tuple) else moved[0]
    if not values:
        raise UserError(
            f"the run reads nothing below {old_places[0]}",
            f"a folder of {join_shortened(places)}",
            "name the folder that was moved, as config.toml of the run names it",
        )
    return values


def _is_place(text: str) -> bool:
    """Whether a value is an absolute path or a URI."""
    return text.startswith("/") or is_remote(text)


def _moved(place: str, old_places: Sequence[str], new_place: str) -> str:
    """Returns a path or URI with a new start if it is in a folder that was moved, else unchanged."""
    for old_place in old_places:
        if place == old_place or place.startswith(f"{old_place}/"):
            return new_place + place.removeprefix(old_place)
    return place


def _spellings(place: str) -> list[str]:
    """Returns a URI without a slash at its end, or an absolute path as given, then without symbolic links."""
    if is_remote(place):
        return [place.rstrip("/")]
    path = os.path.abspath(os.path.expanduser(place))
    return list(dict.fromkeys([path, os.path.realpath(path)]))  # configurations have paths without links


def copy_checks(workspace: Workspace, name: str, listing: pa.Table) -> None:
    """Copies the stored checks of a run's images to the files that a listing names, so that none is opened again.

    Compared are the ids of all images, the sizes of all files, and the content of a sample.

    Args:
        workspace: The workspace.
        name: The run.
        listing: The same images in another place (`LISTING_SCHEMA`).

    Raises:
        UserError: The listing has other images than the run, or files are missing, differ, or cannot be read.
    """
    opened = open_index(workspace, name, ["image_id", "uri", "content_hash"])
    known = pa.concat_tables([opened.index.select(["image_id"]), opened.rejects.select(["image_id"])])
    _raise_for_ids(known["image_id"], listing["image_id"])

    positions = pc.index_in(opened.index["image_id"], listing["image_id"].combine_chunks()).to_numpy()
    uris = take_rows(listing.select(["uri"]), positions.astype(np.int64))["uri"]
    files = image_files(uris)
    _raise_for_files(uris, pc.equal(files["size"], -1), "missing")

    stored, rows = _stored_checks(workspace, opened.index["uri"], opened.index["content_hash"])
    is_stored = rows >= 0
    stored = take_rows(stored, rows[is_stored])
    differs = np.zeros(len(uris), bool)
    differs[is_stored] = stored["size"].to_numpy() != files["size"].to_numpy()[is_stored]
    sample = np.unique(np.linspace(0, len(uris) - 1, _SAMPLE).astype(np.int64))
    for row in sample.tolist():
        differs[row] |= _content_hash(uris[row].as_py()) != opened.index["content_hash"][row].as_py()
    _raise_for_files(uris, pa.chunked_array([pa.array(differs)]), "other than those of the run")

    checks = files.filter(pa.array(is_stored))
    for field in CHECK_SCHEMA:
        checks = checks.append_column(field, stored[field.name])
    store_checks(workspace, checks.select(STORED_CHECK_SCHEMA.names))


def _content_hash(uri: str) -> str | None:
    """Returns the SHA-256 of a file; None for a folder, or a file that is larger than any image.

    Raises:
        UserError: The file system does not respond for half a minute, or refuses access.
    """
    try:
        return hashlib.sha256(read_bytes(uri)).hexdigest()
    except PermissionError as error:
        raise access_refused(uri, error) from None
    except OSError:
        return None


def _raise_for_ids(known: pa.ChunkedArray, listed: pa.ChunkedArray) -> None:
    """Raises UserError if the ids of the run and of the listing differ."""
    absent = known.filter(pc.invert(pc.is_in(known, listed.combine_chunks()))).to_pylist()
    others = listed.filter(pc.invert(pc.is_in(listed, known.combine_chunks()))).to_pylist()
    if absent or others:
        parts = [f"without {len(absent)} of the run: {join_shortened(absent)}"] if absent else []
        parts += [f"with {len(others)} others: {join_shortened(others)}"] if others else []
        raise UserError(
            f"the images in the new place, {' and '.join(parts)}",
            "the images of the run, under the same ids",
            "correct the paths in the table, or give it a column `id` with the ids of the run",
        )


def _raise_for_files(uris: pa.ChunkedArray, wrong: pa.ChunkedArray, problem: str) -> None:
    """Raises UserError if files are missing or differ from those of the run."""
    names = uris.filter(wrong).to_pylist()
    if names:
        raise UserError(
            f"{len(names)} of {len(uris)} files are {problem}: {join_shortened(names)}",
            "the files of the run in the new place",
            "copy them there; or repeat the run's command with the new place, which checks every image again",
        )


def _stored_checks(
    workspace: Workspace, uris: pa.ChunkedArray, hashes: pa.ChunkedArray
) -> tuple[pa.Table, NDArray[np.int64]]:
    """Returns stored checks (STORED_CHECK_SCHEMA) and, for each file, the row of the latest one of its content, (N,).

    Args:
        workspace: The workspace.
        uris: The files.
        hashes: Their contents in the index of the run. They may have changed since.

    Returns:
        The row is -1 if there is no check.
    """
    parts = [STORED_CHECK_SCHEMA.empty_table()]
    for table in shards_in(workspace.image_checks):
        with contextlib.suppress(BadFile):
            for part in read_parts(table, STORED_CHECK_SCHEMA.names):
                parts.append(part.filter(pc.is_in(part["uri"], uris.combine_chunks())).cast(STORED_CHECK_SCHEMA))
    stored = pa.concat_tables(parts)
    contents = zip(stored["uri"].to_pylist(), stored["content_hash"].to_pylist(), strict=True)
    row_of_content = {content: row for row, content in enumerate(contents)}
    wanted = zip(uris.to_pylist(), hashes.to_pylist(), strict=True)
    return stored, np.array([row_of_content.get(content, -1) for content in wanted], np.int64)
