"""The figures of an index: images per class, domain and split, copies, kinds of rejects.

`index_facts` counts, vectorized over all images; no image is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.tables.large_tables import text_hashes
from mcis.datasets.tags import Tags

_ORDER = ("target", "source", "web", "train", "val", "test")
"""Of the words in the names of groups; others come after these."""


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Figures of an index of N images, K classes and G groups; a group is the images of one domain and split.

    Attributes:
        groups: those that have an image, called by domain and split, or by the split alone where all are of one domain:
            target before source before web, train before val before test.
        images, untagged: (G,) all images, and those without a tag.
        per_class: (K, G) images with the class.
        reject_kinds: what reasons of rejects start with, up to the colon -> images, falling.
        repeats: images whose content, by its SHA-256, an earlier row of the index has.
    """

    groups: tuple[str, ...]
    images: NDArray[np.int64]
    untagged: NDArray[np.int64]
    per_class: NDArray[np.int64]
    reject_kinds: dict[str, int]
    repeats: int


def index_facts(index: pa.Table, rejects: pa.Table, classes: Sequence[str]) -> IndexFacts:
    """Counts an index (INDEX_SCHEMA, but for ids and URIs) and its rejects."""
    contents = text_hashes(index["content_hash"])[pc.not_equal(index["content_hash"], "").to_numpy()]
    repeats = len(contents) - len(np.unique(contents))
    del contents
    group, groups = _groups(index)
    tags = Tags.from_index(index["tags"], len(classes))
    cells = tags.values.astype(np.int32) * len(groups) + np.repeat(group, np.diff(tags.start))
    per_class = np.bincount(cells, minlength=len(classes) * len(groups)).reshape(len(classes), len(groups))
    del cells
    kinds = pc.list_element(pc.split_pattern(rejects["reason"].combine_chunks(), ":", max_splits=1), 0)
    reasons = pc.value_counts(kinds)
    return IndexFacts(
        groups=groups,
        images=np.bincount(group, minlength=len(groups)),
        untagged=np.bincount(group[np.diff(tags.start) == 0], minlength=len(groups)),
        per_class=per_class,
        reject_kinds={r["values"]: r["counts"] for r in sorted(reasons.to_pylist(), key=lambda r: -r["counts"])},
        repeats=repeats,
    )


def _groups(index: pa.Table) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """The group of each image, (N,), and the groups in their order."""
    named = index["split"].combine_chunks()
    if len(index["domain"].unique()) > 1:
        named = pc.binary_join_element_wise(index["domain"].combine_chunks(), named, " ")
    encoded = named.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    ordered = sorted(names, key=lambda name: [(*_ORDER, word).index(word) for word in name.split(" ")])
    place = np.array([ordered.index(name) for name in names], np.int32)
    return place[encoded.indices.to_numpy(zero_copy_only=False)], tuple(ordered)
