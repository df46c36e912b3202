"""Relations of maps to images against lists, and the rounds in which bounded features are kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mcis.datasets.relations import draw, feature_rounds
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
    rounds = feature_rounds(needs, bound)
    assert sorted(k for classes in rounds for k in classes) == [k for k, need in enumerate(needs) if len(need)]
    kept = [set().union(*(needs[k].tolist() for k in classes)) for classes in rounds]
    assert all(0 < len(images) <= bound for images in kept)
    assert rounds == feature_rounds(needs, bound)
    # No round could have taken in a class of a later one.
    for number, images in enumerate(kept):
        for later in rounds[number + 1 :]:
            assert all(len(images | set(needs[k].tolist())) > bound for k in later)
    if len(set().union(*(need.tolist() for need in needs))) <= bound:
        assert len(rounds) <= 1
    if largest:
        with pytest.raises(ValueError, match=f"a class needs {largest} images"):
            feature_rounds(needs, largest - 1)


def test_classes_that_share_images_come_together() -> None:
    """0 and 2 have the same images, 1 and 3 likewise."""
    needs = [np.arange(5), np.arange(5, 11), np.arange(4), np.arange(6, 11)]
    assert feature_rounds(needs, 7) == [[1, 3], [0, 2]]
    assert feature_rounds(needs, 11) == [[0, 1, 2, 3]]


@quick
@given(arrays(bool, st.tuples(st.integers(1, 10), st.just(4))), st.integers(0, 9), st.integers(1, 3))
def test_contrastive_images_are_related_by_another_tag_and_lack_the_maps_own(
    matrix: NDArray[np.bool_], seed: int, related: int
) -> None:
    matrix[:, 0] |= ~matrix.any(axis=1)
    nowhere = np.zeros(len(matrix), bool)
    drawn = draw(Tags.of_matrix(matrix), nowhere, seed=seed, related=related, contrastive=True, bank=2)
    bank = drawn.bank.tolist()
    assert sorted(set(bank)) == bank
    assert len(bank) == min(2, len(matrix))
    rows = dict(zip(zip(drawn.image.tolist(), drawn.tag.tolist(), strict=True), drawn.related.tolist(), strict=True))
    for number, (image, tag) in enumerate(rows):
        others = drawn.others[drawn.others_start[number] : drawn.others_start[number + 1]].tolist()
        fellows = [k for k in range(4) if matrix[image, k] and k != tag]
        assert others == [q for k in fellows for q in rows[image, k] if not matrix[q, tag]]
    for k, need in enumerate(drawn.needs(4)):
        wanted: set[int] = set()
        for number, (image, tag) in enumerate(rows):
            if tag == k:
                wanted |= {image, *rows[image, tag], *bank}
                wanted |= set(drawn.others[drawn.others_start[number] : drawn.others_start[number + 1]].tolist())
        assert need.tolist() == sorted(wanted)
