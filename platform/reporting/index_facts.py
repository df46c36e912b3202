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

from mcis.datasets.index import shown
from mcis.datasets.tables.large_tables import hashes, rows_alike, take, whole
from mcis.platform.runs.scores import grouped

_DOMAINS, _SPLITS = ("target", "source", "web"), ("train", "val", "test")
"""The order of groups; other names come after these."""
_TAGS_AT_ONCE = 2**16


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
        repeats: images whose content an earlier row of the index has.
        across, disagreeing: contents (equal SHA-256) in more than one split; contents whose images differ in tags.
        copies: columns of the index, as far as it has them, for the images of those, content by content, and `across`
            and `disagree`, bool.
    """

    groups: tuple[Group, ...]
    images: NDArray[np.int64]
    untagged: NDArray[np.int64]
    per_class: NDArray[np.int64]
    together: NDArray[np.int64]
    reject_kinds: dict[str, int]
    repeats: int
    across: int
    disagreeing: int
    copies: pa.Table

    def columns(self, **of: str) -> NDArray[np.int64]:
        """The groups of a domain, of a split, or of both, as positions."""
        fits = [all(getattr(group, name) == value for name, value in of.items()) for group in self.groups]
        return np.flatnonzero(fits)

    def names(self) -> list[str]:
        """The names of the groups: domain and split, each where it differs between groups."""
        several = [len(set(values)) > 1 for values in zip(*self.groups, strict=True)]
        if not any(several):
            several = [False, True]
        return [" ".join(v for v, told in zip(group, several, strict=True) if told) for group in self.groups]


def index_facts(index: pa.Table, rejects: pa.Table, classes: Sequence[str]) -> IndexFacts:
    """Counts an index (INDEX_SCHEMA, without ids and URIs as well) and its rejects (REJECTS_SCHEMA).

    Raises:
        ValueError: a tag is no class.
    """
    group, groups = _groups(index)
    rows, tags = flat_tags(index)
    if len(tags) and tags.max() >= len(classes):
        raise ValueError(f"tag {tags.max()} in an index of {len(classes)} classes; expected 0..{len(classes) - 1}")
    lengths = np.bincount(rows, minlength=len(index))
    per_class = np.bincount(tags * len(groups) + group[rows], minlength=len(classes) * len(groups))
    reasons = pc.value_counts(pc.list_element(pc.split_pattern(whole(rejects["reason"]), ":", max_splits=1), 0))
    return IndexFacts(
        groups=groups,
        images=np.bincount(group, minlength=len(groups)),
        untagged=np.bincount(group[lengths == 0], minlength=len(groups)),
        per_class=per_class.reshape(len(classes), len(groups)),
        together=count_together(rows, tags, len(index), len(classes)),
        reject_kinds={r["values"]: r["counts"] for r in sorted(reasons.to_pylist(), key=lambda r: -r["counts"])},
        **_copies(index),
    )


def count_together(rows: NDArray[np.int32], tags: NDArray[np.int32], images: int, classes: int) -> NDArray[np.int64]:
    """Images that have both of two classes, (K, K); on the diagonal, those that have the class.

    Args:
        rows, tags: every tag with the row that has it, rows ascending; some tags at a time are counted with every tag
            of their image, which few tags per image make cheap.
        images, classes: N and K.
    """
    lengths = np.bincount(rows, minlength=images)
    start = np.cumsum(lengths) - lengths
    total = np.zeros(classes * classes, np.int64)
    for first in range(0, len(rows), _TAGS_AT_ONCE):
        part, part_rows = tags[first : first + _TAGS_AT_ONCE], rows[first : first + _TAGS_AT_ONCE]
        counts = lengths[part_rows]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        others = tags[np.repeat(start[part_rows], counts) + within]
        total += np.bincount(np.repeat(part, counts) * classes + others, minlength=classes * classes)
    return total.reshape(classes, classes)


def concerns(facts: IndexFacts, classes: Sequence[str]) -> list[str]:
    """What makes an index less useful for training, in plain sentences."""
    train = facts.columns(split="train")
    if not len(train):
        return ["No image is in split train: nothing can be learnt from this index."]
    sentences, per_class = [], facts.per_class[:, train].sum(axis=1)
    few = {n: [name for name, images in zip(classes, per_class, strict=True) if images == n] for n in (0, 1)}
    if few[0]:
        sentences.append(f"Without a training image: {shown(few[0])}.")
    if few[1]:
        sentences.append(f"With a single training image, whose only partner is itself: {shown(few[1])}.")
    if untagged := int(facts.untagged[train].sum()):
        sentences.append(f"{grouped(untagged)} training image(s) without a tag are in no pair.")
    if facts.across:
        sentences.append(f"{grouped(facts.across)} content(s) in more than one split: scores on them say too much.")
    if facts.disagreeing:
        sentences.append(f"{grouped(facts.disagreeing)} content(s) with different tags on their copies.")
    return sentences


def codes_of(column: pa.ChunkedArray | pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """Each value's position in the list of distinct values, and that list."""
    encoded = (whole(column) if isinstance(column, pa.ChunkedArray) else column).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _groups(index: pa.Table) -> tuple[NDArray[np.int16], tuple[Group, ...]]:
    """The group of each image, (N,), and the groups in their order."""
    domain, domains = codes_of(index["domain"])
    split, splits = codes_of(index["split"])
    code = domain * len(splits) + split
    present = np.flatnonzero(np.bincount(code))
    named = [Group(domains[code // len(splits)], splits[code % len(splits)]) for code in present]

    def rank(position: int) -> tuple[Any, ...]:
        orders = zip((_DOMAINS, _SPLITS), named[position], strict=True)
        return tuple((order.index(name) if name in order else len(order), name) for order, name in orders)

    order = sorted(range(len(named)), key=rank)
    rank_of = np.zeros(len(domains) * len(splits), np.int16)
    rank_of[present[order]] = np.arange(len(named))
    return rank_of[code], tuple(named[i] for i in order)


def flat_tags(index: pa.Table) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Every tag with the row that has it, (row, tag), rows ascending."""
    tags = whole(index["tags"])
    rows = np.repeat(np.arange(len(index), dtype=np.int32), pc.list_value_length(tags).to_numpy(zero_copy_only=False))
    return rows, tags.flatten().to_numpy().astype(np.int32)


def _copies(index: pa.Table) -> dict[str, Any]:
    """The fields of IndexFacts on images of equal content; those with an empty hash are left out."""
    hashed = np.flatnonzero(pc.not_equal(index["content_hash"], "").to_numpy())
    hash_of = hashes(index["content_hash"])
    shared = hashed[rows_alike(hash_of[hashed])]
    order = np.argsort(hash_of[shared], kind="stable")  # images of equal content are a run, in the order of the index
    begins = np.diff(hash_of[shared][order], prepend=0) != 0
    begins[:1] = True
    run, first = np.cumsum(begins) - 1, order[begins]

    def differ(values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which contents have images with different values."""
        out = np.zeros(len(first), bool)
        out[run[1:][~begins[1:] & (np.diff(values[shared][order]) != 0)]] = True
        return out

    across = differ(codes_of(index["split"])[0])
    disagree = differ(_sets(whole(index["tags"])))
    chosen = np.flatnonzero((across | disagree)[run])
    chosen = chosen[np.lexsort((first[run[chosen]], ~across[run[chosen]]))]
    wanted = ["image_id", "uri", "domain", "split", "tags", "content_hash"]
    copies = take(index.select([name for name in wanted if name in index.column_names]), shared[order[chosen]])
    for name, values in (("across", across), ("disagree", disagree)):
        copies = copies.append_column(name, pa.array(values[run[chosen]]))
    counts = {"repeats": len(shared) - len(first), "across": int(across.sum()), "disagreeing": int(disagree.sum())}
    return counts | {"copies": copies}


def _sets(tags: pa.ListArray) -> NDArray[np.int64]:
    """A number for the tags of each image, (N,), equal for equal tags: the sum of a random one for each class."""
    of_class = np.random.default_rng(0).integers(0, 2**63, 2**16)
    sums = np.concatenate([[0], np.cumsum(of_class[tags.flatten().to_numpy()])])
    ends = np.cumsum(pc.list_value_length(tags).to_numpy(zero_copy_only=False))
    return np.diff(sums[np.concatenate([[0], ends])])
