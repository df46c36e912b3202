"""Ranks of tags, against their definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mcis.models.tag_ranks import class_ranks


@given(st.data())
def test_a_rank_is_the_fraction_of_higher_scores_without_the_tag(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)))
    tags = data.draw(arrays(bool, shape))
    scores = data.draw(arrays(np.float32, shape, elements=st.integers(0, 3).map(float)))
    ranks = np.where(tags, class_ranks(scores, tags), np.nan)
    for n, k in np.ndindex(shape):
        others = scores[~tags[:, k], k]
        if tags[n, k] and len(others):
            expected = ((others > scores[n, k]).sum() + (others == scores[n, k]).sum() / 2) / len(others)
            np.testing.assert_allclose(ranks[n, k], expected)
        else:
            assert np.isnan(ranks[n, k])


def test_a_swapped_tag_has_the_highest_rank() -> None:
    right = np.eye(3, dtype=bool)[np.arange(30) % 3]
    scores = right + np.random.default_rng(0).uniform(0, 0.5, (30, 3)).astype(np.float32)
    tags = right.copy()
    tags[4] = [True, False, False]  # shows class 1
    ranks = np.nan_to_num(np.where(tags, class_ranks(scores, tags), np.nan))
    assert np.unravel_index(ranks.argmax(), ranks.shape) == (4, 0)
