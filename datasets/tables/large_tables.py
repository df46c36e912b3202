"""Splits, hashes and compares tables with millions of rows, without a Python object per row."""

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
"""Number of rows that are held, hashed or written at a time."""
_TEXTS_AT_ONCE = 2**15
"""Number of texts that are Python objects at a time."""


def in_shards(tables: Iterable[pa.Table], rows: int = SHARD_ROWS) -> Iterator[pa.Table]:
    """Regroups the rows of consecutive tables of one schema into tables of `rows` rows; the last may have fewer.

    Each column of a returned table has one chunk.
    """
    parts: list[pa.Table] = []
    count = 0
    for table in tables:
        while len(table):
            part = table.slice(0, rows - count)
            parts.append(part)
            count += len(part)
            table = table.slice(len(part))

            if count == rows:
                yield pa.concat_tables(parts).combine_chunks()
                parts = []
                count = 0
    if parts:
        yield pa.concat_tables(parts).combine_chunks()


def release_arrow_memory() -> None:
    """Returns unused memory of pyarrow's pool to the system."""
    pa.default_memory_pool().release_unused()


def pieces(column: pa.ChunkedArray, rows: int = SHARD_ROWS) -> Iterator[pa.Array]:
    """Yields a column as arrays of at most `rows` rows, without copying."""
    for chunk in column.chunks:
        for first in range(0, len(chunk), rows):
            yield chunk.slice(first, rows)


def take_rows(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Returns some rows of a table, in the given order.

    `pa.Table.take` would concatenate all chunks of a column first, which doubles its memory and limits texts to 2 GiB.
    Here it takes at most SHARD_ROWS rows at a time.

    Args:
        rows: Row numbers, (N,), in any order.
    """
    batches = table.to_batches()
    firsts = range(0, len(rows), SHARD_ROWS)
    shards = [_take_shard(batches, table.schema, rows[first : first + SHARD_ROWS]) for first in firsts]
    return pa.concat_tables([table.schema.empty_table(), *shards])


def _take_shard(batches: Sequence[pa.RecordBatch], schema: pa.Schema, rows: NDArray[np.int64]) -> pa.Table:
    """Returns some rows of a table, in the given order, and copies them twice if they are in several batches."""
    ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    batch_of_row = np.searchsorted(ends, rows, side="right")
    order = np.argsort(batch_of_row, kind="stable")
    first = np.searchsorted(batch_of_row[order], np.arange(len(batches) + 1))

    parts = []
    for batch, end, low, high in zip(batches, ends, first, first[1:], strict=False):
        if low < high:
            parts.append(batch.take(pa.array(rows[order[low:high]] - (end - len(batch)))))
    grouped = pa.Table.from_batches(parts, schema)
    if (np.diff(order) > 0).all():
        return grouped

    position_in_grouped = np.empty(len(rows), np.int64)
    position_in_grouped[order] = np.arange(len(rows))
    return grouped.take(pa.array(position_in_grouped))


def table_digest(tables: Iterable[pa.Table]) -> str:
    """Returns 16 hexadecimal digits of a SHA-256 over the rows of tables of one schema.

    It is the hash of the hashes of shards of SHARD_ROWS rows. It depends on the names, types and values of the columns,
    but not on how tables and chunks divide the rows.
    """
    sha256 = hashlib.sha256()
    for shard in in_shards(tables):
        shard_sha256 = hashlib.sha256()
        for field in shard.schema:
            shard_sha256.update(f"{field.name} {field.type} {len(shard)}\n".encode())
            _hash_values(shard_sha256, shard[field.name].combine_chunks())
        sha256.update(shard_sha256.digest())
    return sha256.hexdigest()[:16]


def _hash_values(sha256: Any, column: pa.Array) -> None:
    """Hashes the values of a column: nulls, lengths and values, but no unused memory."""
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
    elif pa.types.is_boolean(column.type):
        sha256.update(np.packbits(column.fill_null(False).to_numpy(zero_copy_only=False)))
    else:
        sha256.update(column.fill_null(0).to_numpy())


def text_hashes(texts: pa.ChunkedArray) -> NDArray[np.int64]:
    """Returns a 64-bit hash per text, (N,), valid in this process only: Python's keyed SipHash.

    The probability of a collision among ten million different texts is three in a million.
    """
    hashes_of_pieces = (map(hash, piece.to_pylist()) for piece in pieces(texts, _TEXTS_AT_ONCE))
    return np.fromiter(chain.from_iterable(hashes_of_pieces), np.int64, len(texts))


def repeated_texts(texts: pa.ChunkedArray) -> list[str]:
    """Returns the texts that occur more than once, in the order of their first occurrence."""
    hashes = text_hashes(texts)
    ascending = np.sort(hashes)
    repeated_hashes = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
    candidate_rows = np.flatnonzero(np.isin(hashes, repeated_hashes))
    candidates = take_rows(pa.table([texts], ["text"]), candidate_rows)["text"].to_pylist()
    return [text for text, count in collections.Counter(candidates).items() if count > 1]


class Texts(Sequence[str]):
    """A column of texts as a sequence of `str`, which are created on access.

    It takes only the bytes of the column, instead of about a hundred bytes more per text, and is pickled as an Arrow
    array, which Ray's processes share.

    Args:
        column: Texts without nulls.
    """

    def __init__(self, column: pa.ChunkedArray):
        self._texts = column.cast(pa.large_string()).combine_chunks()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, position: SupportsIndex) -> str:  # type: ignore[override]  # no slices
        return str(self._texts[position.__index__()])
