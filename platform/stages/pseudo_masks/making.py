"""Makes the pseudo masks of index rows (MASKS_SCHEMA), by a rule or from masks that exist."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.datasets.images.decode import fitted_size
from mcis.datasets.images.label_masks import encode_labels, read_label_mask, resize_labels
from mcis.datasets.images.masks import read_saliency, tags_of_mask
from mcis.datasets.tables.shards import Shards
from mcis.models.pseudo_masks import MASK_RULES, PseudoMask
from mcis.platform.config.sections import Config
from mcis.platform.networks.tagged_maps import AffinityWalk, tagged_maps
from mcis.platform.outputs.corrected_masks import CORRECTED, given_mask
from mcis.platform.outputs.imported_files import IMPORTED_FILE
from mcis.platform.outputs.regions import add_regions
from mcis.platform.outputs.tables import DIFFERS_FROM_INDICES, IMPORTED_MASKS_SCHEMA, MASKS_SCHEMA

GROUND_TRUTH = "ground truth"
"""Value of the column `cue` of masks that are copied from the ground truth (full supervision)."""
IMPORTED_CUE = "imported"
"""Value of the column `cue` of masks of another program."""
NEGATIVE = "negative"
"""Value of the column `cue` of the masks of negatives."""


class MakeMasks:
    """Makes the pseudo masks of index rows; returns a table of MASKS_SCHEMA.

    Args:
        classes: Number of classes K.
        maps: Table of localization maps.
        affinity_net: Folder of a trained affinity network for the random walk; None without a random walk.
        gpu: Whether this network runs on a GPU.
    """

    def __init__(self, config: Config, classes: int, maps: Shards, affinity_net: Path | None, gpu: bool):
        self.config = config
        self.classes = classes
        self.maps = maps
        self.walk = AffinityWalk(config, affinity_net, gpu) if affinity_net else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._mask(row) for row in rows.to_pylist()], schema=MASKS_SCHEMA)

    def _mask(self, row: dict[str, Any]) -> dict[str, Any]:
        """Row of MASKS_SCHEMA for a row of the index."""
        if row.get(CORRECTED):
            return _given_row(row, row[CORRECTED], self.classes, self.config.data.max_side, CORRECTED)
        if row["is_negative"]:
            return _negative_row(row, self.config.data.max_side)

        section = self.config.pseudo_masks
        rule_name = section.rule
        if rule_name == "auto":
            rule_name = "saliency" if row["saliency_uri"] is not None else "crf"
        rule = MASK_RULES[rule_name]
        saliency = self._saliency(row) if rule.reads_saliency else None
        maps = tagged_maps(row, self.maps, self.config, saliency=saliency, walk=self.walk)
        maps = add_regions(maps, row, section)
        return _mask_row(row, rule(maps, section.rule_values(rule_name)), rule_name)

    def _saliency(self, row: dict[str, Any]) -> NDArray[np.uint8]:
        """Reads the saliency map of an image, resized bilinearly to the size of its mask, (H, W)."""
        saliency = read_saliency(row["saliency_uri"], (row["height"], row["width"]))
        height, width = fitted_size(row["height"], row["width"], self.config.data.max_side)
        return np.array(Image.fromarray(saliency).resize((width, height), Image.Resampling.BILINEAR))


def copy_truth(classes: int, max_side: int | None, rows: pa.Table) -> pa.Table:
    """Copies ground-truth masks into a table of pseudo masks (MASKS_SCHEMA), for full supervision.

    Args:
        classes: Number of classes K.
        max_side: Longest side, in pixels, to which masks are reduced (nearest neighbor); None for full size.
        rows: Index rows.
    """
    masks = []
    for row in rows.to_pylist():
        if row["mask_uri"] is None and row["is_negative"]:
            masks.append(_negative_row(row, max_side))
        else:
            masks.append(_given_row(row, row["mask_uri"], classes, max_side, GROUND_TRUTH))
    return pa.Table.from_pylist(masks, schema=MASKS_SCHEMA)


def import_masks(classes: int, max_side: int | None, rows: pa.Table) -> pa.Table:
    """Reads the masks of another program into a table of pseudo masks (IMPORTED_MASKS_SCHEMA).

    Labels keep the size of the image, at which they are scored; ignored pixels count as background there.

    Args:
        classes: Number of classes K.
        max_side: Longest side, in pixels, to which the masks that are trained on are reduced (nearest neighbor).
        rows: Index rows with the columns CORRECTED and IMPORTED_FILE.
    """
    masks = []
    for row in rows.to_pylist():
        other_classes: list[int] = []
        differs_from_indices = False
        if row[CORRECTED]:
            mask_row = _given_row(row, row[CORRECTED], classes, max_side, CORRECTED)
        elif row["is_negative"]:
            mask_row = _negative_row(row, max_side)
        else:
            mask, differs_from_indices = read_label_mask(row[IMPORTED_FILE], (row["height"], row["width"]), classes)
            labels = np.where(mask == IGNORE, 0, mask).astype(np.uint8)
            trained = resize_labels(mask, *fitted_size(row["height"], row["width"], max_side))
            mask_row = _mask_row(row, PseudoMask(labels, trained), IMPORTED_CUE)
            other_classes = sorted(set(tags_of_mask(labels, classes, row[IMPORTED_FILE])) - set(row["tags"]))
        masks.append({**mask_row, "other_classes": other_classes, DIFFERS_FROM_INDICES.name: differs_from_indices})
    return pa.Table.from_pylist(masks, schema=IMPORTED_MASKS_SCHEMA)


def _mask_row(row: dict[str, Any], pseudo_mask: PseudoMask, cue: str) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a pseudo mask."""
    mask = pseudo_mask.mask
    return {
        "image_id": row["image_id"],
        "labels": encode_labels(pseudo_mask.labels),
        "mask": encode_labels(mask),
        "ignored": float((mask == IGNORE).mean()),
        "foreground": float(((mask > 0) & (mask < IGNORE)).mean()),
        "cue": cue,
    }


def _negative_row(row: dict[str, Any], max_side: int | None) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a negative: all background, at the size at which the image is read."""
    background = np.zeros(fitted_size(row["height"], row["width"], max_side), np.uint8)
    return _mask_row(row, PseudoMask(background, background), NEGATIVE)


def _given_row(row: dict[str, Any], uri: str, classes: int, max_side: int | None, cue: str) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a ground-truth or corrected mask."""
    mask = given_mask(row, uri, classes, max_side)
    labels = np.where(mask == IGNORE, 0, mask).astype(np.uint8)
    return _mask_row(row, PseudoMask(labels, mask), cue)
