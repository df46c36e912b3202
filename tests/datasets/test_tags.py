"""Tags in compressed rows and the members of classes: against loops over lists, from an index and from a matrix."""

import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.tags import ClassMembers, Tags

CLASSES = 5
tag_lists = st.lists(st.lists(st.integers(0, CLASSES - 1), max_size=CLASSES, unique=True).map(sorted), max_size=12)


def column(lists: list[list[int]], cuts: list[int] | None = None) -> pa.ChunkedArray:
    """A column of an index, in chunks that are slices of a longer array."""
    whole = pa.array([[4], *lists, [0, 1]], pa.list_(pa.uint16())).slice(1, len(lists))
    edges = sorted({0, len(lists), *(c for c in cuts or [] if c < len(lists))})
    chunks = [whole.slice(a, b - a) for a, b in pairwise(edges)]
    return pa.chunked_array(chunks, pa.list_(pa.uint16()))


def matrix_of(lists: list[list[int]]) -> NDArray[np.bool_]:
    return np.array([[k in row for k in range(CLASSES)] for row in lists], bool).reshape(len(lists), CLASSES)


@given(tag_lists, st.lists(st.integers(0, 12), max_size=3))
def test_tags_of_an_index_and_of_a_matrix_are_the_lists(lists: list[list[int]], cuts: list[int]) -> None:
    for tags in (Tags.from_index(column(lists, cuts), CLASSES), Tags.from_matrix(matrix_of(lists))):
        assert [tags.values[a:b].tolist() for a, b in pairwise(tags.start)] == lists
        assert (tags.values.dtype, tags.start.dtype) == (np.uint16, np.uint32)
        assert (len(tags), tags.classes) == (len(lists), CLASSES)
        assert tags.num_tagged == sum(map(bool, lists))


@given(tag_lists, st.data())
def test_the_matrix_of_some_images(lists: list[list[int]], data: st.DataObject) -> None:
    lists_of_positions = st.lists(st.integers(0, len(lists) - 1), max_size=8) if lists else st.just([])
    positions = np.array(data.draw(lists_of_positions), np.int64)
    matrix = Tags.from_index(column(lists), CLASSES).matrix(positions)
    assert matrix.dtype == bool
    np.testing.assert_array_equal(matrix, matrix_of(lists)[positions])


@given(tag_lists, st.data())
def test_members_are_the_images_of_each_class(lists: list[list[int]], data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    tags = Tags.from_index(column(lists), CLASSES)
    for source in (None, np.array(flags, bool)):
        members = ClassMembers.from_tags(tags, source)
        assert members.images.dtype == np.uint32
        for k in range(CLASSES):
            expected = [
                i
                for domain in (False, True)
                for i, row in enumerate(lists)
                if k in row and bool(source is not None and source[i]) == domain
            ]
            low, high = members.ranges(np.array([k]))
            assert members.images[low[0] : high[0]].tolist() == expected


def test_the_largest_class_index() -> None:
    """65,536 classes fill 16 bits, and two domains of each do not."""
    tags = Tags.from_index(pa.chunked_array([pa.array([[65535], [0, 65535], [0]], pa.list_(pa.uint16()))]), 65536)
    members = ClassMembers.from_tags(tags, np.array([True, False, False]))
    low, high = (bound[0] for bound in members.ranges(np.array([65535])))
    assert members.images[low:high].tolist() == [1, 0]


def test_tags_survive_the_way_to_a_worker() -> None:
    tags = Tags.from_matrix(np.eye(4, dtype=bool))
    assert tags.num_tagged == 4
    again = pickle.loads(pickle.dumps(tags))
    np.testing.assert_array_equal(again.matrix(np.arange(4)), np.eye(4, dtype=bool))
