"""Relations of maps to images against lists, and the rounds in which bounded features are kept."""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import rounded
from mcis.datasets.sampling.related_images import RELATED, Relations, draw, wrong_class_images
from mcis.datasets.tags import Tags

quick = settings(deadline=None, max_examples=60)


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


# --- fewer related images


@quick
@given(
    matrix=arrays(bool, st.tuples(st.integers(1, 10), st.just(4))),
    how=st.sampled_from(
        [
            {},
            {"contrastive": True},
            {"related_may_repeat": True, "contrastive": True},
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
        fewer = draw(tags, source, seed=seed, related=related, **how)
        np.testing.assert_array_equal(most.related[:, :related], fewer.related)


def test_a_rule_is_found_by_its_name_and_says_what_it_asks_for() -> None:
    assert list(RELATED) == ["class", "nearest", "itself", "wrong_class"]
    assert [name for name, rule in RELATED.items() if rule.vectors] == ["nearest"]
    assert [name for name, rule in RELATED.items() if rule.control] == ["itself", "wrong_class"]
