"""The page of an index: how many images a class, domain and split, what occurs together, pictures, copies, rejects.

`index_facts` counts, vectorized over all images; `browse_page` shows it as one self-contained HTML page, on which every
name is escaped and nothing is loaded or run. Pictures are opened for the thumbnails alone.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from PIL import Image, ImageColor

from mcis.datasets.decode import RejectedImage, decode_rgb
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.files import read_bytes
from mcis.datasets.index import shown
from mcis.platform.reporting.html import picture_uri, render
from mcis.platform.reporting.panels import drawable, labels
from mcis.platform.reporting.plots import THEMES
from mcis.platform.runs.scores import grouped

_DOMAINS, _SPLITS = ("target", "source", "web"), ("train", "val", "test")
"""In this order, whatever else there is after them."""
_SIDE, _MOST_PICTURES = 96, 1200
"""Pixels of a thumbnail's long side; thumbnails that a page holds: about 8 MB."""
_MOST_ROWS, _MOST_KINDS, _MOST_TAGS, _MOST_NAMED, _MOST_TOGETHER = 500, 50, 20, 40, 20
"""Rows of the lists of rejects and copies; kinds of reasons; tags an image that get a row of their own; classes that
the heat map names; classes that are listed as occurring together."""
_MAP_SIDE, _LARGEST_CELL, _SMALLEST_CELL, _LETTER = 560, 26, 3, 6.6
"""Pixels of the heat map: its side where its cells can be neither more nor fewer, width of a letter of its labels."""
_HEAT = "#4287e8"
"""Color of the heat map: by its opacity it reads on light and dark pages alike."""
_SIZE_BINS = 48
_TAGS_A_PART = 2**16
_QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}


class Group(NamedTuple):
    """Images of one domain and split."""

    domain: str
    split: str


@dataclass(frozen=True, kw_only=True)
class IndexFacts:
    """Figures of an index of N images, K classes and G groups.

    groups: those that have an image: target before source before web, train before val before test.
    images, untagged: (G,) all images, and those without a tag.
    per_class: (K, G) images with the class.
    per_tags: (T + 1, G) images with 0 .. T tags.
    drawn: (K, G) how often an epoch of pairs is expected to draw the class as the common one, each image being m
        once and its class uniform among its tags (`datasets.pairs`); 0 outside of split train.
    together: (K, K) images that have both classes; on the diagonal, those that have the one.
    reject_kinds: what reasons of rejects start with, up to the colon -> images, falling.
    repeats: images whose content an earlier row of the index has.
    across, disagreeing: contents (equal SHA-256) in more than one split; contents whose images differ in their tags.
    copies: columns of the index for the images of those, content by content, and `across` and `disagree`, bool.
    """

    groups: tuple[Group, ...]
    images: NDArray[np.int64]
    untagged: NDArray[np.int64]
    per_class: NDArray[np.int64]
    per_tags: NDArray[np.int64]
    drawn: NDArray[np.float64]
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
        """What to call the groups: by domain and split, as far as there is more than one."""
        several = [len(set(values)) > 1 for values in zip(*self.groups, strict=True)]
        if not any(several):
            several = [False, True]
        return [" ".join(v for v, told in zip(group, several, strict=True) if told) for group in self.groups]


def index_facts(index: pa.Table, rejects: pa.Table, classes: Sequence[str]) -> IndexFacts:
    """Counts an index (INDEX_SCHEMA) and its rejects (REJECTS_SCHEMA).

    Raises:
        ValueError: a tag is no class.
    """
    group, groups = _groups(index)
    rows, tags = _flat_tags(index)
    if len(tags) and tags.max() >= len(classes):
        raise ValueError(f"tag {tags.max()} in an index of {len(classes)} classes; expected 0..{len(classes) - 1}")
    lengths = np.bincount(rows, minlength=len(index))
    train = np.array([g.split == "train" for g in groups], bool)[group[rows]]

    def table(values: NDArray[np.int64], of: NDArray[np.int64], height: int, **more: Any) -> NDArray[Any]:
        return np.bincount(values * len(groups) + of, minlength=height * len(groups), **more).reshape(height, -1)

    per_tags = table(lengths, group, int(lengths.max(initial=0)) + 1)
    kinds = pc.value_counts(pc.list_element(pc.split_pattern(_whole(rejects["reason"]), ":", max_splits=1), 0))
    return IndexFacts(
        groups=groups,
        images=per_tags.sum(axis=0),
        untagged=per_tags[0],
        per_class=table(tags, group[rows], len(classes)),
        per_tags=per_tags,
        drawn=table(tags, group[rows], len(classes), weights=train / np.maximum(lengths[rows], 1)),
        together=_together(rows, tags, len(index), len(classes)),
        reject_kinds={k["values"]: k["counts"] for k in sorted(kinds.to_pylist(), key=lambda kind: -kind["counts"])},
        **_copies(index),
    )


def concerns(facts: IndexFacts, classes: Sequence[str]) -> list[str]:
    """What of an index a training suffers from, in plain words."""
    train = facts.columns(split="train")
    if not len(train):
        return ["No image is in split train: nothing can be learnt from this index."]
    found, per_class = [], facts.per_class[:, train].sum(axis=1)
    few = {n: [name for name, images in zip(classes, per_class, strict=True) if images == n] for n in (0, 1)}
    if few[0]:
        found.append(f"Without a training image: {shown(few[0])}.")
    if few[1]:
        found.append(f"With a single training image, whose only partner is itself: {shown(few[1])}.")
    if untagged := int(facts.untagged[train].sum()):
        found.append(f"{grouped(untagged)} training image(s) without a tag are in no pair.")
    if facts.across:
        found.append(f"{grouped(facts.across)} content(s) in more than one split: scores on them say too much.")
    if facts.disagreeing:
        found.append(f"{grouped(facts.disagreeing)} content(s) with different tags on their copies.")
    return found


def browse_page(
    index: pa.Table,
    rejects: pa.Table,
    classes: tuple[str, ...],
    *,
    notes: Sequence[str],
    thumbnails: int = 6,
    kinds: Mapping[str, float] | None = None,
    title: str,
    seed: int = 0,
) -> str:
    """An index as one HTML page that needs no other file.

    Args:
        index, rejects: INDEX_SCHEMA, REJECTS_SCHEMA.
        notes: what its sources said of themselves, in plain words.
        thumbnails: at most so many pictures a class and domain; fewer, as the page says, where they would be too many.
        kinds: shares in [0, 1] of the kinds of pairs, such as "target-source", where the sampler draws by kind.
        seed: of the choice of thumbnails.

    Raises:
        ValueError: a tag is no class.
    """
    facts = index_facts(index, rejects, classes)
    known = labels(classes)
    view = {
        "title": title,
        "facts": facts,
        "groups": facts.names(),
        "rejected": len(rejects),
        "notes": [*notes, *concerns(facts, classes)],
        "classes": [known[k + 1] for k in range(len(classes))],
        "per_class": _class_rows(facts, classes),
        "per_tags": _tag_rows(facts.per_tags),
        "together": _together_view(facts.together, classes),
        "pairs": _pair_view(facts),
        "kinds": kinds or {},
        "sizes": _size_view(index),
        "pictures": _pictures(index, classes, thumbnails, seed),
        "thumbnails": thumbnails,
        "copies": _copies_view(facts.copies.slice(0, _MOST_ROWS), classes),
        "rejects": rejects.slice(0, _MOST_ROWS).to_pylist(),
        "most_kinds": _MOST_KINDS,
        "heat": _HEAT,
        **THEMES,
    }
    return render("index_page.html.j2", view)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _codes(column: pa.ChunkedArray | pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """Each value's place in the list of distinct ones."""
    encoded = (_whole(column) if isinstance(column, pa.ChunkedArray) else column).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _groups(index: pa.Table) -> tuple[NDArray[np.int64], tuple[Group, ...]]:
    """The group of each image, (N,), and the groups in their order."""
    domain, domains = _codes(index["domain"])
    split, splits = _codes(index["split"])
    present, group = np.unique(domain * len(splits) + split, return_inverse=True)
    named = [Group(domains[code // len(splits)], splits[code % len(splits)]) for code in present]

    def rank(place: int) -> tuple[Any, ...]:
        tables = zip((_DOMAINS, _SPLITS), named[place], strict=True)
        return tuple((known.index(name) if name in known else len(known), name) for known, name in tables)

    order = sorted(range(len(named)), key=rank)
    place = np.empty(len(named), np.int64)
    place[order] = np.arange(len(named))
    return place[group], tuple(named[i] for i in order)


def _flat_tags(index: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every tag with the row that has it, (row, tag), rows ascending."""
    tags = _whole(index["tags"])
    rows = np.repeat(np.arange(len(index)), pc.list_value_length(tags).to_numpy(zero_copy_only=False))
    return rows, tags.flatten().to_numpy().astype(np.int64)


def _together(rows: NDArray[np.int64], tags: NDArray[np.int64], images: int, classes: int) -> NDArray[np.int64]:
    """Counts each tag with every tag of its image, a part of the tags at a time; few tags make this cheap."""
    lengths = np.bincount(rows, minlength=images)
    start = np.cumsum(lengths) - lengths
    total = np.zeros(classes * classes, np.int64)
    for first in range(0, len(rows), _TAGS_A_PART):
        own, of = tags[first : first + _TAGS_A_PART], rows[first : first + _TAGS_A_PART]
        counts = lengths[of]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        others = tags[np.repeat(start[of], counts) + within]
        total += np.bincount(np.repeat(own, counts) * classes + others, minlength=classes * classes)
    return total.reshape(classes, classes)


def _copies(index: pa.Table) -> dict[str, Any]:
    """The fields of IndexFacts that tell of equal contents; an empty hash is no content."""
    columns = ["image_id", "uri", "domain", "split", "tags", "content_hash"]
    hashed = index.select(columns).filter(pc.not_equal(index["content_hash"], ""))
    content, contents = _codes(hashed["content_hash"])
    texts = pc.binary_join(_whole(hashed["tags"]).cast(pa.list_(pa.string())), " ")

    def differ(values: NDArray[np.int64]) -> NDArray[np.bool_]:
        span = values.max(initial=0) + 1
        return np.bincount(np.unique(content * span + values) // span, minlength=len(contents)) > 1

    across, disagree = differ(_codes(hashed["split"])[0]), differ(_codes(texts)[0])
    rows = np.flatnonzero((across | disagree)[content])
    rows = rows[np.lexsort((content[rows], ~across[content[rows]]))]
    copies = hashed.take(rows)
    for name, values in (("across", across), ("disagree", disagree)):
        copies = copies.append_column(name, pa.array(values[content[rows]]))
    return {
        "repeats": len(content) - len(contents),
        "across": int(across.sum()),
        "disagreeing": int(disagree.sum()),
        "copies": copies,
    }


def _class_rows(facts: IndexFacts, classes: Sequence[str]) -> list[tuple[int, list[int], int]]:
    """(class index, images of each group, sum), sums falling."""
    totals = facts.per_class.sum(axis=1)
    return [(int(k), facts.per_class[k].tolist(), int(totals[k])) for k in np.argsort(-totals, kind="stable")]


def _tag_rows(per_tags: NDArray[np.int64]) -> list[tuple[str, list[int], int]]:
    """(number of tags, images of each group, sum); above _MOST_TAGS tags in one row."""
    names = [str(n) for n in range(len(per_tags))]
    if len(names) > _MOST_TAGS + 1:
        per_tags = np.vstack([per_tags[:_MOST_TAGS], per_tags[_MOST_TAGS:].sum(axis=0)])
        names = [*names[:_MOST_TAGS], f"{_MOST_TAGS} or more"]
    return [(name, row.tolist(), int(row.sum())) for name, row in zip(names, per_tags, strict=True)]


def _together_view(together: NDArray[np.int64], classes: Sequence[str]) -> dict[str, Any] | None:
    """The heat map and its strongest entries; None where no image has two classes."""
    K = len(classes)
    first, second = np.triu_indices(K, 1)
    both = together[first, second]
    strongest = np.argsort(-both, kind="stable")[: min(_MOST_TOGETHER, int((both > 0).sum()))]
    if not len(strongest):
        return None
    alone = np.diagonal(together)
    shares = together / np.maximum(alone, 1)[:, None]
    np.fill_diagonal(shares, 0)
    pixels = np.empty((K, K, 4), np.uint8)
    pixels[..., :3] = ImageColor.getrgb(_HEAT)
    pixels[..., 3] = np.rint(255 * np.sqrt(shares))  # the root lifts what is rare
    cell = int(np.clip(_MAP_SIDE // K, _SMALLEST_CELL, _LARGEST_CELL))
    step = 1 if K <= _MOST_NAMED else 10
    texts = [_short(classes[k]) if step == 1 else str(k) for k in range(0, K, step)]
    margin = 12 + round(_LETTER * max(map(len, texts)))
    return {
        "map": picture_uri(Image.fromarray(pixels), "PNG"),
        "side": K * cell,
        "cell": cell,
        "margin": margin,
        "ticks": [(margin + (k * step + 0.5) * cell, text) for k, text in enumerate(texts)],
        "named": step == 1,
        "scale": [(value, float(np.sqrt(value))) for value in (0.01, 0.1, 0.3, 1)],
        "strongest": [
            (int(a), int(b), int(n), n / alone[a], n / alone[b])
            for a, b, n in zip(first[strongest], second[strongest], both[strongest], strict=True)
        ],
    }


def _short(name: str) -> str:
    name = drawable(name)
    return name if len(name) <= 20 else name[:19] + "…"


def _pair_view(facts: IndexFacts) -> dict[str, Any]:
    """Shares of the common classes of pairs, over all training images and, where there are several, a domain."""
    train = facts.columns(split="train")
    domains = list(dict.fromkeys(facts.groups[g].domain for g in train))
    own = [facts.columns(split="train", domain=domain) for domain in domains] if len(domains) > 1 else []
    drawn = np.stack([facts.drawn[:, columns].sum(axis=1) for columns in (train, *own)], axis=1)
    shares = drawn / np.maximum(drawn.sum(axis=0), 1e-12)
    images = facts.per_class[:, train].sum(axis=1)
    order = np.argsort(-shares[:, 0], kind="stable")
    return {
        "count": round(drawn[:, 0].sum()),
        "domains": domains if own else [],
        "most": float(shares[:, 0].max(initial=0)),
        "rows": [(int(k), int(images[k]), float(shares[k, 0]), shares[k, 1:].tolist()) for k in order],
    }


def _size_view(index: pa.Table) -> dict[str, Any] | None:
    """Quantiles of the sizes, and bubbles over their logarithms: (x, y, radius, title) on a square of side 1."""
    if not len(index):
        return None
    width, height = (np.maximum(_whole(index[n]).to_numpy(zero_copy_only=False), 1) for n in ("width", "height"))
    measures = {
        "width, pixels": (width, "{:.0f}"),
        "height, pixels": (height, "{:.0f}"),
        "area, megapixels": (width * height.astype(np.int64) / 1e6, "{:.3g}"),
        "width / height": (width / height, "{:.2f}"),
    }
    x, y = np.log2(width), np.log2(height)
    least, most = min(x.min(), y.min()), max(x.max(), y.max())
    low, scale = least - 0.3, most - least + 0.6
    column, row = ((_SIZE_BINS * (values - low) / scale).astype(np.int64) for values in (x, y))
    _, bins, counts = np.unique(column * _SIZE_BINS + row, return_inverse=True, return_counts=True)
    powers = np.arange(np.ceil(low), low + scale)
    centers = [np.bincount(bins, values) / counts for values in (x, y)]
    radius = np.maximum(0.05 * np.sqrt(counts / counts.max()), 0.004)
    return {
        "quantiles": list(_QUANTILES),
        "rows": [
            (name, [text.format(v) for v in np.quantile(values, list(_QUANTILES.values()))])
            for name, (values, text) in measures.items()
        ],
        "bubbles": [
            ((cx - low) / scale, 1 - (cy - low) / scale, r, f"about {2**cx:.0f} × {2**cy:.0f}: {grouped(int(n))}")
            for cx, cy, r, n in zip(*centers, radius, counts, strict=True)
        ],
        "ticks": [(round(2**p), (p - low) / scale) for p in (powers if len(powers) > 1 else {least, most})],
        "kinds": len(np.unique(width.astype(np.int64) << 32 | height)),
    }


def _pictures(index: pa.Table, classes: Sequence[str], thumbnails: int, seed: int) -> dict[str, Any] | None:
    """Thumbnails by class and domain, images without a tag last; which ones depends on (seed, class, image) alone."""
    rows, tags = _flat_tags(index)
    bare = np.setdiff1d(np.arange(len(index)), rows)
    rows, tags = np.concatenate([rows, bare]), np.concatenate([tags, np.full(len(bare), len(classes))])
    domain, domains = _codes(index["domain"])
    if thumbnails < 1 or not len(rows):
        return None
    shelf = tags * len(domains) + domain[rows]
    order = np.lexsort((uniforms(Draw.THUMBNAIL, seed, tags, rows)[:, 0], shelf))
    shelves, start, sizes = np.unique(shelf[order], return_index=True, return_counts=True)
    each = min(thumbnails, max(1, _MOST_PICTURES // len(shelves)))
    chosen = [rows[order[first : first + min(each, size)]] for first, size in zip(start, sizes, strict=True)]
    shown_rows = np.unique(np.concatenate(chosen))
    table = index.select(["image_id", "uri", "split", "tags"]).take(shown_rows)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        drawn = list(pool.map(_thumbnail, table["uri"].to_pylist()))
    cells = {
        row: {
            "id": image["image_id"],
            "split": image["split"],
            "tags": [classes[tag] for tag in image["tags"]],
            "uri": picture and picture_uri(picture, "JPEG"),
            "size": picture and picture.size,
            "reason": reason,
        }
        for row, image, (picture, reason) in zip(shown_rows.tolist(), table.to_pylist(), drawn, strict=True)
    }
    by_tag: dict[int, list[tuple[str, int, list[dict[str, Any]]]]] = {}
    for place, size, own in zip(shelves.tolist(), sizes.tolist(), chosen, strict=True):
        tag, domain_code = divmod(place, len(domains))
        by_tag.setdefault(tag, []).append((domains[domain_code], size, [cells[row] for row in own.tolist()]))
    return {"each": each, "classes": by_tag, "broken": sum(reason is not None for _, reason in drawn)}


def _thumbnail(uri: str) -> tuple[Image.Image | None, str | None]:
    """A small picture, or why there is none."""
    try:
        picture = Image.fromarray(decode_rgb(read_bytes(uri), min_side=1))
    except RejectedImage as error:
        return None, error.reason
    except Exception as error:  # file systems raise what they like, and one file must not end the page
        return None, f"cannot be read: {getattr(error, 'strerror', None) or error}"
    picture.thumbnail((_SIDE, _SIDE))
    return picture, None


def _copies_view(copies: pa.Table, classes: Sequence[str]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    rows = [row | {"tags": [classes[t] for t in row["tags"]]} for row in copies.to_pylist()]
    return [(own[0], own) for _, entries in groupby(rows, lambda row: row["content_hash"]) for own in [list(entries)]]
