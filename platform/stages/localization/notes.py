"""What the report says of localization maps: counts, and notes on those that lack something."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.related_images import RELATED, Relations
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig


class Noted(NamedTuple):
    """Counts by label, and notes."""

    counts: dict[str, Any]
    notes: list[str]


def noted_of(config: LocalizeConfig, relations: Relations, tags: Tags, source: NDArray[np.bool_]) -> Noted:
    """Counts and notes on the maps of N images.

    Args:
        source: whether an image is of the source domain, (N,).
    """
    noted = Noted({}, [])
    for counts, notes in (
        _controls(config, relations, tags),
        _repeats(config, relations),
        _domains(config, relations, source),
        _contrast(config, relations),
    ):
        noted.counts.update(counts)
        noted.notes.extend(notes)
    return noted


_Part = tuple[dict[str, Any], list[str]]


def _controls(config: LocalizeConfig, relations: Relations, tags: Tags) -> _Part:
    """What controls of related images have instead of images of the class."""
    if not RELATED[config.related_by].control:
        return {}, []
    if config.related_by == "itself":
        return {"maps related to their own image alone": len(relations.tag)}, []
    everywhere = np.flatnonzero(np.bincount(relations.tag, minlength=tags.classes) == len(tags))
    having = int(np.isin(relations.tag, everywhere).sum())
    note = f"{having} map(s) are related to images of their class although others are asked for: every image has it"
    return {"maps related to images of their class for want of others": having}, [note] if having else []


def _repeats(config: LocalizeConfig, relations: Relations) -> _Part:
    if config.related_by == "itself":
        return {}, []
    ordered = np.sort(relations.related, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ordered == relations.image[:, None]).any(axis=1)
    notes = []
    if repeats.any() and not config.related_may_repeat:
        notes.append(f"{repeats.sum()} map(s) {RELATED[config.related_by].lacking}")
    return {"maps whose related images repeat": int(repeats.sum())}, notes


def _domains(config: LocalizeConfig, relations: Relations, source: NDArray[np.bool_]) -> _Part:
    domain = config.related_from
    if domain == "both":
        return {}, []
    moved = int((source[relations.related] != (domain == "source")).any(axis=1).sum())
    note = f"{moved} map(s) have related images of both domains: their class has no other of the {domain}"
    return {"maps whose related images are of the other domain": moved}, [note] if moved else []


def _contrast(config: LocalizeConfig, relations: Relations) -> _Part:
    if not config.method.contrastive:
        return {}, []
    return {"maps with a contrastive part": int((np.diff(relations.others_start) > 0).sum())}, []
