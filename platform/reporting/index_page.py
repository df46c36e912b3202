"""The page of an index: how many images per class, domain and split, what occurs together, pictures, copies, rejects.

One self-contained HTML page, on which every name is escaped and nothing is loaded or run.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.platform.reporting.cooccurrence import HEAT, heat_map
from mcis.platform.reporting.html import render
from mcis.platform.reporting.image_sizes import size_view
from mcis.platform.reporting.index_facts import IndexFacts, concerns, index_facts
from mcis.platform.reporting.panels import labels
from mcis.platform.reporting.plots import THEMES
from mcis.platform.reporting.thumbnails import choose_pictures

_MOST_ROWS, _MOST_REASONS, _MOST_TAGS = 500, 50, 20
"""Rows of the lists of rejects and copies; kinds of reasons; numbers of tags that get a row of their own."""


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
        thumbnails: per class and domain, at most; fewer, as the page says, where they would be too many.
        kinds: shares in [0, 1] of the kinds of pairs, such as "target-source", where the sampler draws by kind.
        seed: of the choice of thumbnails.

    Raises:
        ValueError: a tag is no class.
    """
    facts = index_facts(index, rejects, classes)
    label_of = labels(classes)
    view = {
        "title": title,
        "facts": facts,
        "groups": facts.names(),
        "rejected": len(rejects),
        "notes": [*notes, *concerns(facts, classes)],
        "classes": [label_of[k + 1] for k in range(len(classes))],
        "per_class": _class_rows(facts),
        "per_tags": _tag_rows(facts.per_tags),
        "together": heat_map(facts.together, classes),
        "pairs": _pair_view(facts),
        "kinds": kinds or {},
        "sizes": size_view(index),
        "pictures": choose_pictures(index, classes, thumbnails, seed),
        "thumbnails": thumbnails,
        "copies": _copies_by_content(facts.copies.slice(0, _MOST_ROWS), classes),
        "rejects": rejects.slice(0, _MOST_ROWS).to_pylist(),
        "most_reasons": _MOST_REASONS,
        "heat": HEAT,
        **THEMES,
    }
    return render("index_page.html.j2", view)


def _class_rows(facts: IndexFacts) -> list[tuple[int, list[int], int]]:
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


class PairView(NamedTuple):
    """Shares of the common classes of pairs.

    Attributes:
        images: tagged training images, each of which begins one pair per epoch.
        domains: of the columns that a row has beside all images'; empty where there is one domain.
        most: the largest share.
        rows: class index, training images, share of all pairs and of each domain's.
    """

    images: int
    domains: list[str]
    most: float
    rows: list[tuple[int, int, float, list[float]]]


def _pair_view(facts: IndexFacts) -> PairView:
    train = facts.columns(split="train")
    domains = list(dict.fromkeys(facts.groups[g].domain for g in train))
    if len(domains) < 2:
        domains = []
    columns = [train, *(facts.columns(split="train", domain=domain) for domain in domains)]
    drawn = np.stack([facts.drawn[:, of].sum(axis=1) for of in columns], axis=1)
    shares = drawn / np.maximum(drawn.sum(axis=0), 1e-12)
    images = facts.per_class[:, train].sum(axis=1)
    order = np.argsort(-shares[:, 0], kind="stable")
    return PairView(
        images=round(drawn[:, 0].sum()),
        domains=domains,
        most=float(shares[:, 0].max(initial=0)),
        rows=[(int(k), int(images[k]), float(shares[k, 0]), shares[k, 1:].tolist()) for k in order],
    )


def _copies_by_content(copies: pa.Table, classes: Sequence[str]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The first image of each content, and all of its images."""
    rows = [row | {"tags": [classes[tag] for tag in row["tags"]]} for row in copies.to_pylist()]
    contents = [list(images) for _, images in groupby(rows, lambda row: row["content_hash"])]
    return [(images[0], images) for images in contents]
