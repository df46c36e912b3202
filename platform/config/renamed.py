"""Keys, values and recipes that were renamed. Earlier names are read in files, or refused with the current one."""

from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "setting": "sources",
    "data.corrected": "data.corrected_masks",
    "data.masks": "data.truth_masks",
    "data.lid.masks": "data.lid.truth_masks",
    "weights.backbone": "weights.classifier_backbone",
    "weights.segmenter": "weights.segmenter_backbone",
    "weights.affinity_net": "weights.affinity_net_backbone",
    "classifier.trained": "classifier.trainable_stages",
    "classifier.attended": "classifier.attention_partner",
    "classifier.kinds": "classifier.num_domain_affinities",
    "classifier.keep_epoch": "classifier.stop_epoch",
    "classifier.flip": "classifier.hflip",
    "classifier.class_balance": "classifier.class_balanced_fraction",
    "classifier.steps": "classifier.min_steps",
    "classifier.contrastive_weight": "classifier.losses.contrastive.weight",
    "classifier.contrastive_from_epoch": "classifier.losses.contrastive.from_epoch",
    "classifier.contrastive_needs_unshared": "classifier.losses.contrastive.needs_unshared",
    "localize.mirror": "localize.hflip",
    "localize.method.affinity": "localize.method.w_p",
    "affinity_net.trained": "affinity_net.trainable_stages",
    "affinity_net.mirror": "affinity_net.hflip",
    "affinity_net.steps": "affinity_net.min_steps",
    "affinity_net.epochs": "affinity_net.min_epochs",
    "pseudo_masks.background": "pseudo_masks.rule",
    "pseudo_masks.floor": "pseudo_masks.score_floor",
    "pseudo_masks.conflict": "pseudo_masks.conflict_threshold",
    "pseudo_masks.confident": "pseudo_masks.foreground_confidence",
    "pseudo_masks.doubt": "pseudo_masks.max_background_saliency",
    "pseudo_masks.smallest": "pseudo_masks.min_foreground_fraction",
    "segmenter.trained": "segmenter.trainable_stages",
    "segmenter.mirror": "segmenter.hflip",
    "segmenter.steps": "segmenter.min_steps",
    "segmenter.epochs": "segmenter.min_epochs",
    "segmenter.image_loss": "segmenter.image_loss_weight",
    "segmenter.class_balance": "segmenter.class_balance_exponent",
    "predict.mirror": "predict.hflip",
    "compute.stop_if_nothing_is_learnt": "compute.stop_if_not_learning",
}
"""Earlier key -> current key."""

REPLACED_KEYS = {
    "classifier.loss_reduction": (
        "set classifier.losses.basic.weight=0.5 and classifier.losses.co_attention.weight=0.5 instead of "
        "loss_reduction=released; nothing for loss_reduction=paper"
    )
}
"""Earlier keys that more than one current key replaces -> what to set instead."""

RENAMED_VALUES: dict[str, dict[str, object]] = {
    "trainable_stages": {"neck": 0, "head": 0},
    "w_p": {"learnt": "learned", "trained": "learned"},
    "self_pairs": {"flip": "hflip"},
    "weight": {"paper": 1, "released": 0.5},
}
"""Last part of a current key -> {earlier value: current value}."""

RENAMED_RECIPES = {"small": "scratch", "photos_best": "photos_large"}
"""Earlier recipe -> current recipe."""


def current_assignment(key: str, value: object) -> str | None:
    """Returns `KEY=VALUE` in current names for a key of an earlier version; None if the key was never renamed."""
    if key not in RENAMED_KEYS:
        return None
    current, current_value = _renamed(key, value)
    return f"{current}={current_value}"


def current_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Returns values by their current dotted keys. Values under keys that were never renamed stay unchanged."""
    return dict(_renamed(key, value) if key in RENAMED_KEYS else (key, value) for key, value in values.items())


def _renamed(key: str, value: object) -> tuple[str, object]:
    current = RENAMED_KEYS[key]
    replacements = RENAMED_VALUES.get(current.rpartition(".")[2], {})
    if isinstance(value, str) and value in replacements:
        value = replacements[value]
    return current, value
