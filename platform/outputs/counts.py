"""Reads and writes the pixel counts of each image, which the stage `evaluate` stores next to its scores.

A row contains the counts of one image for one score: the number of pixels for each true label, predicted label and part
of the image, without entries of 0. Their sums over images are confusion matrices. `mcis compare` uses them to compare
runs image by image.
"""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.models.counts import Counts, add_counts, mask_counts
from mcis.platform.outputs.tables import schema_field
from mcis.platform.runs.files import read_shards
from mcis.platform.runs.scores import Score

COUNTS_SCHEMA = pa.schema(
    [
        schema_field("image_id", pa.string()),
        schema_field("truth_crc", pa.uint32(), "CRC-32 of the ground truth: size and labels"),
        schema_field("scored", pa.string(), "what was compared with the ground truth"),
        schema_field("truth", pa.list_(pa.uint8()), "true label; ignored pixels are left out"),
        schema_field("predicted", pa.list_(pa.uint8()), "predicted label; for maps, the class with the highest score"),
        schema_field("part", pa.list_(pa.uint16()), "see models/counts.py: Counts"),
        schema_field("pixels", pa.list_(pa.uint32()), "number of pixels, at least 1"),
    ]
)
SINGLE_ROUND = "single round"
RELATED = "related images"
IMPORTED = "imported"
PSEUDO_MASKS = "pseudo masks"
RANDOM_TAG = "a random tag on salient pixels"
BEST_TAG = "the best tag on salient pixels"
PLAIN = "plain"
WITH_CRF = "with CRF"
"""Values of the column `scored`. For baselines, predictions and maps of another program (IMPORTED) they are the names
of the scores."""
TRAINING_IMAGES = "training-images"
"""Folder in the output of the stage: counts of maps, pseudo masks and baselines."""
PREDICTED_IMAGES = "predicted-images"
"""Folder in the output of the stage: counts of predictions."""


def counts_row(image_id: str, truth: NDArray[np.uint8], scored: str, counts: Counts) -> dict[str, Any]:
    """Returns a row of COUNTS_SCHEMA.

    Args:
        truth: The ground-truth mask of the image, (H, W).
        scored: What was compared with it.
        counts: The pixel counts.
    """
    return {"image_id": image_id, "truth_crc": crc_of_truth(truth), "scored": scored, **counts._asdict()}


def mask_rows(
    image_id: str, truth: NDArray[np.uint8], masks: Mapping[str, NDArray[np.uint8]], classes: int
) -> Iterator[dict[str, Any]]:
    """Compares label masks of an image with its ground truth. Yields a row of COUNTS_SCHEMA for each.

    Args:
        truth: The ground-truth mask, (H, W).
        masks: Label masks, (H, W) each, by value of the column `scored`.
        classes: K.
    """
    for scored, counts in zip(masks, mask_counts(truth, masks.values(), classes), strict=True):
        yield counts_row(image_id, truth, scored, counts)


def crc_of_truth(truth: NDArray[np.uint8]) -> int:
    """Returns the CRC-32 of a mask's size and labels, which shows whether two runs used the same ground truth."""
    return zlib.crc32(np.ascontiguousarray(truth).data, zlib.crc32(str(truth.shape).encode()))


class ImageCounts(NamedTuple):
    """The pixel counts of N images for one score.

    Attributes:
        image_ids: The N images, (N,).
        truth_crc: CRC-32 of their ground truth, (N,).
        counts: The entries of all images, concatenated, (E,).
        images: The position of each entry's image, (E,).
    """

    image_ids: pa.StringArray
    truth_crc: NDArray[np.uint32]
    counts: Counts
    images: NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: pa.Table) -> Self:
        """Converts rows of COUNTS_SCHEMA."""
        columns = {name: rows[name].combine_chunks() for name in COUNTS_SCHEMA.names}
        entries = [columns[name].flatten().to_numpy(zero_copy_only=False) for name in Counts._fields]
        images = np.repeat(np.arange(len(rows)), pc.list_value_length(columns["pixels"]).to_numpy())
        return cls(columns["image_id"], columns["truth_crc"].to_numpy(), Counts(*entries), images)


def read_counts(output: Path, score: Score) -> ImageCounts:
    """Reads the pixel counts from which a score was computed, sorted by image id.

    Args:
        output: The output of the stage evaluate.
        score: One of its scores.

    Raises:
        UserError: See `read_shards`.
    """
    folder = output / (PREDICTED_IMAGES if score.output == "segmentation" else TRAINING_IMAGES)
    if score.output == "localization_maps":
        scored = _scored_maps(score)
    elif score.output == "pseudo_masks":
        scored = PSEUDO_MASKS
    else:
        scored = score.name

    rows = pa.concat_tables(_rows_of(shard, scored) for shard in read_shards(folder))
    return ImageCounts.of_rows(rows.sort_by("image_id"))


def _scored_maps(score: Score) -> str:
    """Returns the value of the column `scored` for a score of localization maps."""
    if score.name == IMPORTED:
        return IMPORTED
    if score.related:
        return RELATED
    return SINGLE_ROUND


def sum_counts(
    folder: Path, shapes: Mapping[str, tuple[int, int, int]], *, only: pa.Array | None = None
) -> dict[str, NDArray[np.int64]]:
    """Sums pixel counts over the images of a folder's shards.

    Args:
        folder: TRAINING_IMAGES or PREDICTED_IMAGES in the output of the stage.
        shapes: (parts, K + 1, K + 1) by value of the column `scored`.
        only: Ids of the images to sum. None: all images.

    Returns:
        The sums by value of `scored`.

    Raises:
        UserError: See `read_shards`.
    """
    totals = {scored: np.zeros(shape, np.int64) for scored, shape in shapes.items()}
    for shard in read_shards(folder):
        if only is not None:
            shard = shard.filter(pc.is_in(shard["image_id"], only))
        for scored, total in totals.items():
            add_counts(total, ImageCounts.of_rows(_rows_of(shard, scored)).counts)
    return totals


def _rows_of(rows: pa.Table, scored: str) -> pa.Table:
    return rows.filter(pc.equal(rows["scored"], scored))
