"""Verdicts on image files, kept by all runs of a workspace: an unchanged file is opened and hashed once.

A file counts as unchanged while its size and the time of its last change stay the same. Verdicts do not depend on the
least side and the most pixels that a run asks for.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.datasets.files import stamps
from mcis.datasets.index import Verdict
from mcis.platform.runs.workspace import Workspace, read_table, write_table

VERDICT_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False, metadata={"about": "bytes"}),
        pa.field("changed", pa.int64(), nullable=False, metadata={"about": "time of the last change, ns"}),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("reason", pa.string(), metadata={"about": "why it was rejected, or null"}),
    ]
)


class ImageFile(NamedTuple):
    """A file at one time: its URI, size in bytes and time of the last change, ns; both -1 where it does not exist."""

    uri: str
    size: int
    changed: int


Verdicts = Mapping[ImageFile, Verdict]


def image_files(uris: list[str]) -> list[ImageFile]:
    """The files at some URIs, as they are now."""
    return [ImageFile(uri, *(stamp or (-1, -1))) for uri, stamp in zip(uris, stamps(uris), strict=True)]


def verdicts_of(table: pa.Table) -> list[Verdict]:
    """The verdicts in the columns of a table, in the order of its rows."""
    return [Verdict(*values) for values in _rows(table, Verdict._fields)]


def read_verdicts(workspace: Workspace) -> Verdicts:
    """The verdicts that all runs of the workspace have kept; none where the table is damaged."""
    try:
        table = read_table(workspace.verdicts) if workspace.verdicts.exists() else VERDICT_SCHEMA.empty_table()
        files = [ImageFile(*values) for values in _rows(table, ImageFile._fields)]
        return dict(zip(files, verdicts_of(table), strict=True))
    except UserError:
        return {}


def keep_verdicts(workspace: Workspace, verdicts: Verdicts) -> None:
    """Adds verdicts to those of the workspace; they replace what is kept of the same files.

    Kept is what follows from a file's content alone. Files that could not even be read are not kept, and neither are
    those above a limit, as another index may have another one.
    """
    replaced = {file.uri for file in verdicts}
    with workspace.lock("cache", "verdicts"):
        kept = {file: verdict for file, verdict in read_verdicts(workspace).items() if file.uri not in replaced}
        kept |= {file: verdict for file, verdict in verdicts.items() if _lasts(verdict)}
        rows = [(*file, *verdict) for file, verdict in kept.items()]
        columns = {name: [row[i] for row in rows] for i, name in enumerate(VERDICT_SCHEMA.names)}
        write_table(workspace.verdicts, pa.table(columns, schema=VERDICT_SCHEMA))


def _lasts(verdict: Verdict) -> bool:
    return bool(verdict.content_hash) and not (verdict.reason or "").startswith("too large: ")


def _rows(table: pa.Table, columns: Iterable[str]) -> list[tuple]:
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))
