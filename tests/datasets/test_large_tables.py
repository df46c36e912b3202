"""Tests of large tables: results do not depend on how tables and chunks divide the rows."""

import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcis.datasets.tables import large_tables
from mcis.datasets.tables.large_tables import Texts, in_shards, repeated_texts, table_digest, take_rows

SCHEMA = pa.schema({"text": pa.string(), "tags": pa.list_(pa.uint16()), "number": pa.int64()})
COLUMNS = {"text": st.text(max_size=4), "tags": st.lists(st.integers(0, 3), max_size=3), "number": st.integers(-2, 2)}
table_rows = st.fixed_dictionaries({name: st.none() | values for name, values in COLUMNS.items()})
tables = st.lists(table_rows, max_size=12).map(lambda rows: pa.Table.from_pylist(rows, SCHEMA))


def cut(table: pa.Table, at: list[int]) -> list[pa.Table]:
    """Splits a table into parts, some of them empty."""
    ends = [0, *sorted(min(place, len(table)) for place in at), len(table)]
    return [table.slice(first, last - first) for first, last in pairwise(ends)]


@given(tables, st.lists(st.integers(0, 12), max_size=4), st.integers(1, 5))
def test_rows_and_digest_do_not_depend_on_chunks(table: pa.Table, at: list[int], rows: int) -> None:
    parts = cut(table, at)
    assert table_digest(parts) == table_digest([table]) == table_digest([pa.concat_tables(parts)])
    shards = list(in_shards(parts, rows))
    assert [len(shard) for shard in shards[:-1]] == [rows] * (len(shards) - 1)

    rows_of_shards = []
    for shard in shards:
        assert all(column.num_chunks == 1 for column in shard.columns)
        rows_of_shards += shard.to_pylist()
    assert rows_of_shards == table.to_pylist()


@given(tables, tables)
def test_different_values_give_different_digests(one: pa.Table, other: pa.Table) -> None:
    assert (table_digest([one]) == table_digest([other])) == (one.to_pylist() == other.to_pylist())


def test_a_digest_depends_on_names_types_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tables = [("a", 3, pa.int64()), ("b", 3, pa.int64()), ("a", 3, pa.uint64()), ("a", None, None), ("a", 0, None)]
    digests = [table_digest([pa.table({name: pa.array([1, 2, last], kind)})]) for name, last, kind in of_tables]

    assert len(set(digests)) == len(digests)

    monkeypatch.setattr(large_tables.in_shards, "__defaults__", (2,))
    of_shards = table_digest([pa.table({"a": pa.chunked_array([[1], [2, 3]])})])
    assert of_shards == table_digest([pa.table({"a": pa.chunked_array([[1, 2, 3]])})])
    assert of_shards != digests[0], "the digest is that of the shards' digests"


@given(st.lists(st.text("ab", max_size=2), max_size=12), st.lists(st.integers(0, 12), max_size=3))
def test_repeated_texts_are_in_order_of_first_occurrence(texts: list[str], at: list[int]) -> None:
    whole = pa.table({"text": pa.array(texts, pa.string())})
    found = repeated_texts(pa.concat_tables(cut(whole, at))["text"])
    assert found == [text for text in dict.fromkeys(texts) if texts.count(text) > 1]


@given(tables, st.lists(st.integers(0, 12), max_size=4), st.data())
def test_rows_are_taken_in_any_order_from_any_chunks(table: pa.Table, at: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, max(0, len(table) - 1)), max_size=9)) if len(table) else []
    taken = take_rows(pa.concat_tables(cut(table, at)), np.array(rows, np.int64))
    assert taken.schema == table.schema
    assert taken.to_pylist() == [table.to_pylist()[row] for row in rows]


def test_rows_in_any_order_are_taken_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking all at once would concatenate the chunks, which holds a large table twice."""
    monkeypatch.setattr(large_tables, "SHARD_ROWS", 4)
    table = pa.table({"number": pa.chunked_array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])})
    rows = np.array([9, 0, 8, 1, 7, 2, 6, 3, 5, 4, 9])

    numbers = take_rows(table, rows)["number"]

    assert numbers.to_pylist() == rows.tolist()
    assert max(len(chunk) for chunk in numbers.chunks) <= 4


def test_texts_are_a_sequence_and_pickled_out_of_band() -> None:
    names = [f"/data/{n}.jpg" for n in range(1000)]
    texts = Texts(pa.chunked_array([names[:1], names[1:]]))
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(texts, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(inside, buffers=buffers)

    assert list(again) == list(texts) == names
    assert (texts[np.int64(7)], len(texts)) == (names[7], 1000)
    assert len(inside) < 1000, "the names are out of band"
