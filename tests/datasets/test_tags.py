"""Compressed tags and class members, compared with loops over lists; built from an index and from a matrix."""

import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.tags import ClassMembers, Tags, count_tags, has_other_tags

CLASSES = 5
tags_of_image = st.lists(st.integers(0, CLASSES - 1), max_size=CLASSES, unique=True).map(sorted)
tag_lists = st.lists(tags_of_image, max_size=12)


def column(lists: list[list[int]], cuts: list[int] | None = None) -> pa.ChunkedArray:
    """Returns the column `tags` of an index, in chunks that are slices of a longer array."""
    whole = pa.array([[4], *lists, [0, 1]], pa.list_(pa.uint16())).slice(1, len(lists))
    inner_cuts = [cut for cut in cuts or [] if cut < len(lists)]
    edges = sorted({0, len(lists), *inner_cuts})
    chunks = [whole.slice(start, end - start) for start, end in pairwise(edges)]
    return pa.chunked_array(chunks, pa.list_(pa.uint16()))


def matrix_of(lists: list[list[int]]) -> NDArray[np.bool_]:
    matrix = np.zeros((len(lists), CLASSES), bool)
    for image, tags in enumerate(lists):
        matrix[image, tags] = True
    return matrix


def check_tags(tags: Tags, lists: list[list[int]]) -> None:
    assert [tags.values[start:end].tolist() for start, end in pairwise(tags.start)] == lists
    assert tags.values.dtype == np.uint16
    assert tags.start.dtype == np.uint32
    assert len(tags) == len(lists)
    assert tags.classes == CLASSES
    assert tags.num_tagged == sum(map(bool, lists))


@given(tag_lists, st.lists(st.integers(0, 12), max_size=3))
def test_tags_of_an_index_equal_the_lists(lists: list[list[int]], cuts: list[int]) -> None:
    check_tags(Tags.from_index(column(lists, cuts), CLASSES), lists)


@given(tag_lists, st.lists(st.integers(0, 12), max_size=3))
def test_images_are_counted_per_class(lists: list[list[int]], cuts: list[int]) -> None:
    expected = [sum(k in tags for tags in lists) for k in range(CLASSES)]
    assert count_tags(column(lists, cuts), CLASSES).tolist() == expected


@given(st.lists(st.tuples(tags_of_image, tags_of_image), max_size=12), st.lists(st.integers(0, 12), max_size=3))
def test_other_tags_of_an_image_are_found(pairs: list[tuple[list[int], list[int]]], cuts: list[int]) -> None:
    first = [tags for tags, _ in pairs]
    second = [tags for _, tags in pairs]
    expected = [tags != other_tags for tags, other_tags in pairs]
    assert has_other_tags(column(first, cuts), column(second)).tolist() == expected


@given(tag_lists)
def test_tags_of_a_matrix_equal_the_lists(lists: list[list[int]]) -> None:
    check_tags(Tags.from_matrix(matrix_of(lists)), lists)


@given(tag_lists, st.data())
def test_matrix_of_some_images(lists: list[list[int]], data: st.DataObject) -> None:
    any_positions = st.lists(st.integers(0, len(lists) - 1), max_size=8) if lists else st.just([])
    positions = np.array(data.draw(any_positions), np.int64)

    matrix = Tags.from_index(column(lists), CLASSES).matrix(positions)

    assert matrix.dtype == bool
    np.testing.assert_array_equal(matrix, matrix_of(lists)[positions])


@given(tag_lists)
def test_members_are_the_images_of_each_class(lists: list[list[int]]) -> None:
    members = ClassMembers.from_tags(Tags.from_index(column(lists), CLASSES))

    assert members.images.dtype == np.uint32
    for k in range(CLASSES):
        (start,), (end,) = members.ranges(np.array([k]))
        assert members.images[start:end].tolist() == [i for i, row in enumerate(lists) if k in row]


@given(tag_lists, st.data())
def test_members_of_a_class_are_sorted_by_group(lists: list[list[int]], data: st.DataObject) -> None:
    is_second = data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))

    members = ClassMembers.from_tags(Tags.from_index(column(lists), CLASSES), np.array(is_second, bool))

    assert members.images.dtype == np.uint32
    for k in range(CLASSES):
        images = [i for i, row in enumerate(lists) if k in row]
        (start,), (end,) = members.ranges(np.array([k]))
        assert members.images[start:end].tolist() == sorted(images, key=lambda i: is_second[i])
        second_start = members.second_group_start[k]
        assert members.images[second_start:end].tolist() == [i for i in images if is_second[i]]


def test_largest_class_index() -> None:
    """65,536 classes fit into 16 bits; two groups of each do not."""
    tags = Tags.from_index(pa.chunked_array([pa.array([[65535], [0, 65535], [0]], pa.list_(pa.uint16()))]), 65536)
    members = ClassMembers.from_tags(tags, np.array([True, False, False]))

    (start,), (end,) = members.ranges(np.array([65535]))
    assert members.images[start:end].tolist() == [1, 0]


def test_tags_can_be_pickled() -> None:
    tags = Tags.from_matrix(np.eye(4, dtype=bool))
    assert tags.num_tagged == 4

    unpickled = pickle.loads(pickle.dumps(tags))
    np.testing.assert_array_equal(unpickled.matrix(np.arange(4)), np.eye(4, dtype=bool))
