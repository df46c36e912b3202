"""Rows of images and their ground truth -> counts of pixels (COUNTS_SCHEMA), image by image."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.masks import SALIENT, read_saliency
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import Counts, map_counts
from mcis.models.localization import score_maps
from mcis.models.metrics import best_tag_mask, random_tag_mask
from mcis.platform.outputs.counts import (
    BEST_TAG,
    PLAIN,
    PSEUDO_MASKS,
    RANDOM_TAG,
    RELATED,
    SINGLE_ROUND,
    WITH_CRF,
    CountsTable,
)
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.outputs.tables import image_maps


@dataclass(frozen=True, kw_only=True)
class ScoreTrain:
    """Rows of tagged training images -> the counts of their pixels (COUNTS_SCHEMA).

    Attributes:
        classes, bins: K, and the number of thresholds that the maps' scores are counted for.
        scale: of the maps (`maps.scale`).
        seed: of the random tag.
        single, related: tables of localization maps without and with related images.
        masks: the table of pseudo masks; None where the run ended before them.
    """

    classes: int
    bins: int
    scale: str
    seed: int
    single: Shards
    related: Shards
    masks: Shards | None

    def __call__(self, rows: pa.Table) -> pa.Table:
        out = CountsTable()
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            for scored, table in ((SINGLE_ROUND, self.single), (RELATED, self.related)):
                out.add(row["image_id"], truth, scored, self._map_counts(table, row["image_id"], truth))
            out.add_masks(row["image_id"], truth, dict(self._label_masks(row, truth)), self.classes)
        return out.table()

    def _map_counts(self, table: Shards, image_id: str, truth: NDArray[np.uint8]) -> Counts:
        image = image_maps(table, image_id)
        assert image is not None, f"no localization map of the tagged image {image_id}"
        maps = score_maps(torch.from_numpy(image.maps), image.grids, self.scale, *truth.shape).numpy()
        return map_counts(truth, maps, image.classes, self.classes, self.bins)

    def _label_masks(self, row: dict[str, Any], truth: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """What is scored of an image beside its maps: the pseudo mask, and the baselines where it has saliency."""
        if self.masks:
            mask = self.masks.rows(row["image_id"])
            assert mask is not None, f"no pseudo mask of the tagged image {row['image_id']}"
            yield PSEUDO_MASKS, resize_labels(decode_labels(mask["labels"][0].as_py()), *truth.shape)
        if row["saliency_uri"]:
            salient = read_saliency(row["saliency_uri"], truth.shape) >= SALIENT
            tags = np.array(row["tags"], np.int64)
            draw = float(uniforms(Draw.RANDOM_TAG, self.seed, 0, np.array([row["position"]]))[0, 0])
            yield RANDOM_TAG, random_tag_mask(salient, tags, draw)
            yield BEST_TAG, best_tag_mask(salient, tags, truth)


@dataclass(frozen=True, kw_only=True)
class ScoreVal:
    """Rows of predicted images -> the counts of their pixels (COUNTS_SCHEMA); `classes` is K."""

    classes: int
    predictions: Shards

    def __call__(self, rows: pa.Table) -> pa.Table:
        out = CountsTable()
        for row in rows.to_pylist():
            truth = truth_of_row(row, self.classes)
            prediction = self.predictions.rows(row["image_id"])
            assert prediction is not None, f"no prediction of the image {row['image_id']}"
            pngs = {PLAIN: prediction["plain"][0].as_py(), WITH_CRF: prediction["crf"][0].as_py()}
            masks = {scored: decode_labels(png) for scored, png in pngs.items() if png is not None}
            out.add_masks(row["image_id"], truth, masks, self.classes)
        return out.table()
