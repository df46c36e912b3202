"""What the report says of localization maps: counts, and notes on those that lack something."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.related_images import Relations
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.stages.localization.rounds import Plan

Account = tuple[dict[str, Any], list[str]]
"""Counts by label, and notes."""


def account_of(
    config: LocalizeConfig, relations: Relations, tags: Tags, source: NDArray[np.bool_], plan: Plan
) -> Account:
    """Counts and notes on the maps of N images.

    Args:
        source: whether an image is of the source domain, (N,).
    """
    counts: dict[str, Any] = {"maps": len(relations.tag)}
    notes: list[str] = []
    for some_counts, some_notes in (
        _controls(config, relations, tags),
        _repeats(config, relations),
        _domains(config, relations, source),
        _contrast(config, relations),
        _rounds(config, plan, len(tags)),
    ):
        counts |= some_counts
        notes += some_notes
    return counts, notes


def _controls(config: LocalizeConfig, relations: Relations, tags: Tags) -> Account:
    """What controls of related images have instead of images of the class."""
    if config.related_by in ("class", "nearest"):
        return {}, []
    if config.related_by == "itself":
        return {"maps related to their own image alone": len(relations.tag)}, []
    everywhere = np.flatnonzero(np.bincount(relations.tag, minlength=tags.classes) == len(tags))
    having = int(np.isin(relations.tag, everywhere).sum())
    note = f"{having} map(s) are related to images of their class although others are asked for: every image has it"
    return {"maps related to images of their class for want of others": having}, [note] if having else []


def _repeats(config: LocalizeConfig, relations: Relations) -> Account:
    if config.related_by == "itself":
        return {}, []
    ordered = np.sort(relations.related, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ordered == relations.image[:, None]).any(axis=1)
    notes = []
    if repeats.any() and not config.related_may_repeat:
        lacking = {
            "class": "of classes with too few images repeat related images; that of a class's only image is related to "
            "itself",
            "nearest": "of classes with too few images repeat related images; that of a class's only image is related "
            "to itself",
            "wrong_class": "of classes that too few images lack repeat related images",
        }
        notes.append(f"{repeats.sum()} map(s) {lacking[config.related_by]}")
    return {"maps whose related images repeat": int(repeats.sum())}, notes


def _domains(config: LocalizeConfig, relations: Relations, source: NDArray[np.bool_]) -> Account:
    domain = config.related_from
    if domain == "both":
        return {}, []
    moved = int((source[relations.related] != (domain == "source")).any(axis=1).sum())
    note = f"{moved} map(s) have related images of both domains: their class has no other of the {domain}"
    return {"maps whose related images are of the other domain": moved}, [note] if moved else []


def _contrast(config: LocalizeConfig, relations: Relations) -> Account:
    if not config.method.contrastive:
        return {}, []
    return {"maps with a contrastive part": int((np.diff(relations.others_start) > 0).sum())}, []


def _rounds(config: LocalizeConfig, plan: Plan, images: int) -> Account:
    embedded = sum(map(len, plan.images))
    notes = []
    if len(plan.maps) > 1:
        notes.append(
            f"features are kept in {len(plan.maps)} rounds to hold localize.features_gb={config.features_gb:g}: "
            f"{embedded} embeddings of {images} images"
        )
    counts = {"rounds": len(plan.maps), "images embedded": embedded, "GiB of features": round(plan.gib, 3)}
    return counts, notes
