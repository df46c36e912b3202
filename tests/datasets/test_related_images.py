"""Relations of maps to images against lists, and the rounds in which bounded features are kept."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import rounded
from mcis.datasets.sampling.related_images import Relations, class_rounds, draw, feature_rounds, wrong_class_images
from mcis.datasets.tags import Tags

quick = settings(deadline=None, max_examples=60)


@st.composite
def all_needs(data: st.DrawFn) -> list[NDArray[np.int64]]:
    matrix = data(arrays(bool, (data(st.integers(1, 12)), data(st.integers(1, 8)))))
    return [np.flatnonzero(column) for column in matrix.T]


@quick
@given(all_needs(), st.integers(0, 6))
def test_every_class_is_in_one_round_and_every_round_keeps_the_bound(
    needs: list[NDArray[np.int64]], space: int
) -> None:
    largest = max(map(len, needs))
    bound = largest + space
    rounds = class_rounds(needs, bound)
    assert sorted(k for classes in rounds for k in classes) == [k for k, need in enumerate(needs) if len(need)]
    kept = [set().union(*(needs[k].tolist() for k in classes)) for classes in rounds]
    assert all(0 < len(images) <= bound for images in kept)
    assert rounds == class_rounds(needs, bound)
    # No round could have taken in a class of a later one.
    for number, images in enumerate(kept):
        for later in rounds[number + 1 :]:
            assert all(len(images | set(needs[k].tolist())) > bound for k in later)
    if len(set().union(*(need.tolist() for need in needs))) <= bound:
        assert len(rounds) <= 1


def test_classes_that_share_images_come_together() -> None:
    """0 and 2 have the same images, 1 and 3 likewise."""
    needs = [np.arange(5), np.arange(5, 11), np.arange(4), np.arange(6, 11)]
    assert class_rounds(needs, 7) == [[1, 3], [0, 2]]
    assert class_rounds(needs, 11) == [[0, 1, 2, 3]]


@quick
@given(arrays(bool, st.tuples(st.integers(1, 12), st.just(3))), st.integers(0, 9), st.integers(1, 30), st.booleans())
def test_every_map_is_in_one_round_and_every_round_keeps_the_bound(
    matrix: NDArray[np.bool_], seed: int, bound: int, contrastive: bool
) -> None:
    matrix[:, 0] |= ~matrix.any(axis=1)
    nowhere = np.zeros(len(matrix), bool)
    drawn = draw(Tags.of_matrix(matrix), nowhere, seed=seed, related=2, contrastive=contrastive)
    single = max(len(drawn.images_of(np.array([number]))) for number in range(len(drawn.tag)))
    if bound < single:
        with pytest.raises(ValueError, match=rf"a map needs \d+ images, more than {bound}"):
            feature_rounds(drawn, 3, bound)
        return
    rounds = feature_rounds(drawn, 3, bound)
    assert np.sort(np.concatenate(rounds)).tolist() == list(range(len(drawn.tag)))
    assert all((np.diff(maps) > 0).all() for maps in rounds)
    assert all(len(drawn.images_of(maps)) <= bound for maps in rounds)
    for k in range(3):  # a class that fits is not torn apart, and no part of another could have taken in its next map
        maps = np.flatnonzero(drawn.tag == k)
        parts = [each for each in rounds if np.isin(each, maps).any()]
        if len(drawn.images_of(maps)) <= bound:
            assert len(parts) <= 1
        for part, following in itertools.pairwise(parts):
            assert len(drawn.images_of(np.append(part, following[0]))) > bound


@quick
@given(arrays(bool, st.tuples(st.integers(1, 10), st.just(4))), st.integers(0, 9), st.integers(1, 3))
def test_contrastive_images_are_related_by_another_tag_and_lack_the_maps_own(
    matrix: NDArray[np.bool_], seed: int, related: int
) -> None:
    matrix[:, 0] |= ~matrix.any(axis=1)
    nowhere = np.zeros(len(matrix), bool)
    drawn = draw(Tags.of_matrix(matrix), nowhere, seed=seed, related=related, contrastive=True)
    rows = dict(zip(zip(drawn.image.tolist(), drawn.tag.tolist(), strict=True), drawn.related.tolist(), strict=True))
    for number, (image, tag) in enumerate(rows):
        others = drawn.others[drawn.others_start[number] : drawn.others_start[number + 1]].tolist()
        fellows = [k for k in range(4) if matrix[image, k] and k != tag]
        assert others == [q for k in fellows for q in rows[image, k] if not matrix[q, tag]]
    for k in range(4):
        need = drawn.images_of(np.flatnonzero(drawn.tag == k))
        wanted: set[int] = set()
        for number, (image, tag) in enumerate(rows):
            if tag == k:
                wanted |= {image, *rows[image, tag]}
                wanted |= set(drawn.others[drawn.others_start[number] : drawn.others_start[number + 1]].tolist())
        assert need.tolist() == sorted(wanted)


# --- controls of related images


def drawn_by(matrix: NDArray[np.bool_], related: int = 3, **options: Any) -> Relations:
    return draw(Tags.of_matrix(matrix), np.zeros(len(matrix), bool), related=related, **{"seed": 0, **options})


@quick
@given(
    arrays(bool, st.tuples(st.integers(1, 10), st.integers(1, 4))), st.integers(0, 9), st.integers(1, 8), st.booleans()
)
def test_images_of_the_wrong_class_lack_it_and_repeat_only_where_they_must(
    matrix: NDArray[np.bool_], seed: int, related: int, may_repeat: bool
) -> None:
    matrix[:, 0] |= ~matrix.any(axis=1)
    tags, (images, classes) = Tags.of_matrix(matrix), np.nonzero(matrix)
    options: dict[str, Any] = {"seed": seed, "related_may_repeat": may_repeat}
    together = wrong_class_images(tags, images, classes, related, **options)
    fewer = wrong_class_images(tags, images, classes, related - 1, **options)
    np.testing.assert_array_equal(together[:, :-1], fewer)
    for number, row in enumerate(together.tolist()):
        one = slice(number, number + 1)
        assert wrong_class_images(tags, images[one], classes[one], related, **options).tolist() == [row]
        lacking = np.flatnonzero(~matrix[:, classes[number]]).tolist()
        assert set(row) <= set(lacking or [-1])
        if lacking and not may_repeat:
            assert len(set(row)) == min(related, len(lacking))
            assert max(Counter(row).values()) == -(-related // len(lacking))


def test_all_images_of_the_wrong_class_have_the_same_chance() -> None:
    """Of classes whose members lie at the ends, in the middle and everywhere but at one place."""
    matrix = np.zeros((9, 3), bool)
    matrix[[0, 1, 8], 0] = matrix[[3, 4, 6], 1] = matrix[[0, 1, 2, 3, 4, 5, 7, 8], 2] = True
    tags, images = Tags.of_matrix(matrix), np.array([0, 4, 8])
    drawn = np.stack([wrong_class_images(tags, images, np.arange(3), 2, seed=seed) for seed in range(4000)])
    for k in range(3):
        lacking = ~matrix[:, k]
        for column in drawn[:, k].T:
            counts = np.bincount(column, minlength=9)
            assert not counts[~lacking].any()
            expected = 4000 / lacking.sum()
            # At most 5 degrees of freedom: 30 is beyond one chance in 50,000.
            assert ((counts[lacking] - expected) ** 2 / expected).sum() < 30


def test_images_of_the_wrong_class_are_drawn_for_each_key_anew() -> None:
    matrix = np.repeat(np.eye(3, dtype=bool), 20, axis=0)
    base = drawn_by(matrix, 8, related_by="wrong_class").related
    np.testing.assert_array_equal(drawn_by(matrix, 8, related_by="wrong_class").related, base)
    assert len(np.unique(base, axis=0)) == 60
    other = drawn_by(matrix, 8, related_by="wrong_class", seed=1).related
    assert not [row for row, of_other in zip(base.tolist(), other.tolist(), strict=True) if row == of_other]


@quick
@given(arrays(bool, st.tuples(st.integers(1, 10), st.just(3))), st.integers(1, 4))
def test_a_control_needs_what_it_draws(matrix: NDArray[np.bool_], related: int) -> None:
    """An image itself, or images without the class; where there are none, those of the class."""
    matrix[:, 0] |= ~matrix.any(axis=1)
    usual, itself, wrong = (drawn_by(matrix, related, related_by=by) for by in ("class", "itself", "wrong_class"))
    np.testing.assert_array_equal(itself.related, usual.image[:, None])
    everywhere = matrix[:, usual.tag].all(axis=0)
    np.testing.assert_array_equal(wrong.related[everywhere], usual.related[everywhere])
    assert not matrix[wrong.related[~everywhere], usual.tag[~everywhere, None]].any()
    for relations in (itself, wrong):
        for k in range(3):
            need = relations.images_of(np.flatnonzero(relations.tag == k))
            of_class = relations.tag == k
            wanted = {*relations.image[of_class].tolist(), *relations.related[of_class].reshape(-1).tolist()}
            assert need.tolist() == sorted(wanted)


# --- fewer related images


@quick
@given(
    matrix=arrays(bool, st.tuples(st.integers(1, 10), st.just(4))),
    how=st.sampled_from(
        [
            {},
            {"contrastive": True},
            {"related_may_repeat": True, "contrastive": True},
            {"related_from": "source", "contrastive": True},
            {"related_by": "wrong_class"},
            {"related_by": "itself"},
            {"related_by": "nearest", "contrastive": True},
        ]
    ),
    seed=st.integers(0, 9),
)
def test_what_fewer_related_images_make_is_the_first_of_what_more_make(
    matrix: NDArray[np.bool_], how: dict[str, Any], seed: int
) -> None:
    matrix[:, 0] |= ~matrix.any(axis=1)
    tags, source = Tags.of_matrix(matrix), np.arange(len(matrix)) % 3 == 0
    if how.get("related_by") == "nearest":
        alike = np.random.default_rng(seed).integers(-1, 2, (len(matrix), 3))  # whole numbers make many ties
        how = {**how, "vectors": rounded(alike.astype(np.float32))}
    most = draw(tags, source, seed=seed, related=6, **how)
    for related in range(1, 7):
        alone, first = draw(tags, source, seed=seed, related=related, **how), most.first(related)
        for name in ("start", "image", "tag", "related", "others", "others_rank", "others_start"):
            np.testing.assert_array_equal(getattr(first, name), getattr(alone, name), err_msg=name)
    none = most.first(0)
    assert none.related.shape == (len(most.tag), 0)
    assert not len(none.others)
    assert not none.others_start.any()
