"""Columns of tables with millions of rows: cut, hashed and compared without keeping a Python object for each row."""

import collections
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

SHARD_ROWS = 2**18
"""Rows that are held, hashed or written at a time."""
_TEXTS = 2**15
"""Texts that are Python objects at a time."""


def in_shards(tables: Iterable[pa.Table], rows: int = SHARD_ROWS) -> Iterator[pa.Table]:
    """The rows of tables of one schema, one table after the other, as tables of so many rows; the last may have fewer.

    Each column of a shard has one chunk.
    """
    held: list[pa.Table] = []
    count = 0
    for table in tables:
        while len(table):
            part = table.slice(0, rows - count)
            held.append(part)
            count += len(part)
            table = table.slice(len(part))
            if count == rows:
                yield pa.concat_tables(held).combine_chunks()
                held, count = [], 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def release_arrow_memory() -> None:
    """Gives the memory of columns that nobody has any more back to the system."""
    pa.default_memory_pool().release_unused()


def pieces(column: pa.ChunkedArray, rows: int = SHARD_ROWS) -> Iterator[pa.Array]:
    """A column as arrays of at most so many rows, which are its memory."""
    return (chunk.slice(first, rows) for chunk in column.chunks for first in range(0, len(chunk), rows))


def take_rows(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a table, (N,), in any order.

    pyarrow's own would first join all chunks of a column, which costs its memory once more, and at most 2 GiB of texts.
    """
    batches = table.to_batches()
    ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    of_row = np.searchsorted(ends, rows, side="right")
    order = np.argsort(of_row, kind="stable")
    first = np.searchsorted(of_row[order], np.arange(len(batches) + 1))
    parts = [
        batch.take(pa.array(rows[order[low:high]] - (end - len(batch))))
        for batch, end, low, high in zip(batches, ends, first, first[1:], strict=False)
        if low < high
    ]
    taken = pa.Table.from_batches(parts, table.schema)
    if (np.diff(order) > 0).all():
        return taken
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(rows))
    return taken.take(pa.array(places))


def table_digest(tables: Iterable[pa.Table]) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the shards' SHA-256, of all rows of tables of one schema.

    It depends on names, types and values of the columns, and on nothing of how tables and chunks divide the rows.
    """
    of_shards = hashlib.sha256()
    for shard in in_shards(tables):
        of_shard = hashlib.sha256()
        for field in shard.schema:
            of_shard.update(f"{field.name} {field.type} {len(shard)}\n".encode())
            _hash_values(of_shard, shard[field.name].combine_chunks())
        of_shards.update(of_shard.digest())
    return of_shards.hexdigest()[:16]


def _hash_values(sha256: Any, column: pa.Array) -> None:
    """Hashes what a column holds: which values are null, how long they are, and the values; never what lies unused."""
    sha256.update(np.packbits(column.is_valid().to_numpy(zero_copy_only=False)))
    if pa.types.is_list(column.type):
        sha256.update(pc.list_value_length(column).fill_null(0).to_numpy())
        _hash_values(sha256, column.flatten())
    elif pa.types.is_string(column.type):
        filled = column.fill_null("")
        sha256.update(pc.binary_length(filled).to_numpy())
        _, offsets, texts = filled.buffers()
        if texts is not None and len(filled):
            first, last = np.frombuffer(offsets, np.int32)[[filled.offset, filled.offset + len(filled)]].tolist()
            sha256.update(memoryview(texts)[first:last])
    else:
        sha256.update(column.fill_null(0).to_numpy())


def text_hashes(texts: pa.ChunkedArray) -> NDArray[np.int64]:
    """64 bits for each text, (N,), equal for equal texts, in this process alone: Python's hash, SipHash with a key.

    Of ten million different texts, two have the same one in three of a million cases.
    """
    of_pieces = (map(hash, piece.to_pylist()) for piece in pieces(texts, _TEXTS))
    return np.fromiter(chain.from_iterable(of_pieces), np.int64, len(texts))


def repeated_texts(texts: pa.ChunkedArray) -> list[str]:
    """The texts that are there more than once, in the order in which they come first."""
    numbers = text_hashes(texts)
    ascending = np.sort(numbers)
    alike = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
    rows = np.flatnonzero(np.isin(numbers, alike))
    found = collections.Counter(take_rows(pa.table([texts], ["text"]), rows)["text"].to_pylist())
    return [text for text, count in found.items() if count > 1]


class Texts(Sequence[str]):
    """A column of texts as a sequence of `str`, each made when it is asked for.

    It takes the column's bytes, not some hundred a text, and is pickled as these, which Ray's processes share.

    Args:
        column: no value is null.
    """

    def __init__(self, column: pa.ChunkedArray):
        self._texts = column.cast(pa.large_string()).combine_chunks()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, position: SupportsIndex) -> str:  # type: ignore[override]  # no slices
        return str(self._texts[position.__index__()])
