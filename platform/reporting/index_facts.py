"""The figures of an index: images per class, domain and split, what occurs together, copies, kinds of rejects.

`index_facts` counts, vectorized over all images; no image is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from mcis.datasets.tables.large_tables import hashes, whole

_DOMAINS, _SPLITS = ("target", "source", "web"), ("train", "val", "test")
"""The order of groups; other names come after these."""


class Group(NamedTuple):
    """Images of one domain and split."""

    domain: str
    split: str


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Figures of an index of N images, K classes and G groups; a group is the images of one domain and split.

    Attributes:
        groups: those that have an image: target before source before web, train before val before test.
        images, untagged: (G,) all images, and those without a tag.
        per_class: (K, G) images with the class.
        together: (K, K) images that have both classes; on the diagonal, those that have the class.
        reject_kinds: what reasons of rejects start with, up to the colon -> images, falling.
        repeats: images whose content, by its SHA-256, an earlier row of the index has.
    """

    groups: tuple[Group, ...]
    images: NDArray[np.int64]
    untagged: NDArray[np.int64]
    per_class: NDArray[np.int64]
    together: NDArray[np.int64]
    reject_kinds: dict[str, int]
    repeats: int

    def names(self) -> list[str]:
        """The names of the groups: domain and split, or the split alone where all are of one domain."""
        one = len({group.domain for group in self.groups}) == 1
        return [group.split if one else " ".join(group) for group in self.groups]


def index_facts(index: pa.Table, rejects: pa.Table, classes: Sequence[str]) -> IndexFacts:
    """Counts an index (INDEX_SCHEMA, without ids and URIs as well) and its rejects (REJECTS_SCHEMA).

    Raises:
        ValueError: a tag is no class.
    """
    group, groups = _groups(index)
    rows, tags = flat_tags(index)
    if len(tags) and tags.max() >= len(classes):
        raise ValueError(f"tag {tags.max()} in an index of {len(classes)} classes; expected 0..{len(classes) - 1}")
    tagged = np.bincount(rows, minlength=len(index)) > 0
    per_class = np.bincount(tags * len(groups) + group[rows], minlength=len(classes) * len(groups))
    has = sparse.csr_array((np.ones(len(tags), np.int64), (rows, tags)), shape=(len(index), len(classes)))
    contents = hashes(index["content_hash"].filter(pc.not_equal(index["content_hash"], "")))
    reasons = pc.value_counts(pc.list_element(pc.split_pattern(whole(rejects["reason"]), ":", max_splits=1), 0))
    return IndexFacts(
        groups=groups,
        images=np.bincount(group, minlength=len(groups)),
        untagged=np.bincount(group[~tagged], minlength=len(groups)),
        per_class=per_class.reshape(len(classes), len(groups)),
        together=(has.T @ has).toarray(),
        reject_kinds={r["values"]: r["counts"] for r in sorted(reasons.to_pylist(), key=lambda r: -r["counts"])},
        repeats=len(contents) - len(np.unique(contents)),
    )


def codes_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[Any]]:
    """Each value's position in the list of distinct values, and that list."""
    encoded = whole(column).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _groups(index: pa.Table) -> tuple[NDArray[np.int64], tuple[Group, ...]]:
    """The group of each image, (N,), and the groups in their order."""
    domain, domains = codes_of(index["domain"])
    split, splits = codes_of(index["split"])
    code = domain * len(splits) + split
    group_of = {n: Group(domains[n // len(splits)], splits[n % len(splits)]) for n in np.unique(code).tolist()}

    def rank(n: int) -> list[tuple[int, str]]:
        orders = zip((_DOMAINS, _SPLITS), group_of[n], strict=True)
        return [(order.index(name) if name in order else len(order), name) for order, name in orders]

    ordered = sorted(group_of, key=rank)
    place = np.zeros(len(domains) * len(splits), np.int64)
    place[ordered] = np.arange(len(ordered))
    return place[code], tuple(group_of[n] for n in ordered)


def flat_tags(index: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Every tag with the row that has it, (row, tag), rows ascending."""
    tags = whole(index["tags"])
    rows = np.repeat(np.arange(len(index), dtype=np.int32), pc.list_value_length(tags).to_numpy(zero_copy_only=False))
    return rows, tags.flatten().to_numpy().astype(np.int32)
