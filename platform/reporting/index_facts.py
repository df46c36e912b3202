"""Counts the images of an index by class, domain and split, the copies, and the rejects. No image is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.tables.large_tables import text_hashes
from mcis.datasets.tags import Tags

_ORDER = ("target", "source", "web", "train", "val", "test")
"""Order of the words in the names of groups; other words come last."""


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Counts of an index with N images and K classes in G groups. A group has the images of one domain and split.

    Attributes:
        groups: Names of the groups that have images: domain and split, or the split alone if there is one domain.
            Target comes before source and web, train before val and test.
        images: Number of images in each group, (G,).
        negatives: Number of images that show none of the classes in each group, (G,).
        unlabelled: Number of other images without a tag in each group, (G,).
        per_class: Number of images with each class in each group, (K, G).
        reject_kinds: Number of rejects by the part of their reason before the colon, the most frequent first.
        repeats: Number of images whose SHA-256 an earlier row of the index has.
    """

    groups: tuple[str, ...]
    images: NDArray[np.int64]
    negatives: NDArray[np.int64]
    unlabelled: NDArray[np.int64]
    per_class: NDArray[np.int64]
    reject_kinds: dict[str, int]
    repeats: int


def index_facts(index: pa.Table, rejects: pa.Table, classes: Sequence[str]) -> IndexFacts:
    """Counts the images and rejects of an index.

    Args:
        index: Rows of INDEX_SCHEMA; the columns of ids and URIs may be missing.
        rejects: Rows of REJECTS_SCHEMA.
        classes: The K class names.
    """
    contents = text_hashes(index["content_hash"])[pc.not_equal(index["content_hash"], "").to_numpy()]
    repeats = len(contents) - len(np.unique(contents))
    del contents

    group, groups = _groups(index)
    tags = Tags.from_index(index["tags"], len(classes))
    cells = tags.values.astype(np.int32) * len(groups) + np.repeat(group, np.diff(tags.start))
    per_class = np.bincount(cells, minlength=len(classes) * len(groups)).reshape(len(classes), len(groups))
    del cells

    is_negative = index["is_negative"].to_numpy()
    is_unlabelled = (np.diff(tags.start) == 0) & ~is_negative
    kinds = pc.list_element(pc.split_pattern(rejects["reason"].combine_chunks(), ":", max_splits=1), 0)
    kind_counts = [(row["values"], row["counts"]) for row in pc.value_counts(kinds).to_pylist()]
    kind_counts.sort(key=itemgetter(1), reverse=True)
    return IndexFacts(
        groups=groups,
        images=np.bincount(group, minlength=len(groups)),
        negatives=np.bincount(group[is_negative], minlength=len(groups)),
        unlabelled=np.bincount(group[is_unlabelled], minlength=len(groups)),
        per_class=per_class,
        reject_kinds=dict(kind_counts),
        repeats=repeats,
    )


def _groups(index: pa.Table) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Returns the number of the group of each image, (N,), and the names of the groups in their order."""
    group_names = index["split"].combine_chunks()
    if len(index["domain"].unique()) > 1:
        group_names = pc.binary_join_element_wise(index["domain"].combine_chunks(), group_names, " ")
    encoded = group_names.dictionary_encode()
    names = encoded.dictionary.to_pylist()

    ordered = sorted(names, key=_group_rank)
    position = np.array([ordered.index(name) for name in names], np.int32)
    return position[encoded.indices.to_numpy(zero_copy_only=False)], tuple(ordered)


def _group_rank(name: str) -> list[int]:
    return [(*_ORDER, word).index(word) for word in name.split(" ")]
