"""Counts of pixels, image by image: what the stage `evaluate` keeps beside its scores, and what follows from it.

A row is what was counted of one image for one score: for each true and predicted label, and each part of the image, a
number of pixels, entries of 0 left out. Sums over images are confusion matrices, and runs are compared by image.
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
from mcis.platform.runs.files import read_shards
from mcis.platform.runs.scores import Score

COUNTS_SCHEMA = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("truth_crc", pa.uint32(), nullable=False, metadata={"about": "CRC-32 of the truth: size and labels"}),
        pa.field("scored", pa.string(), nullable=False, metadata={"about": "what was counted"}),
        pa.field("truth", pa.list_(pa.uint8()), nullable=False, metadata={"about": "label; no ignored pixels"}),
        pa.field("predicted", pa.list_(pa.uint8()), nullable=False, metadata={"about": "label; of maps the strongest"}),
        pa.field("part", pa.list_(pa.uint16()), nullable=False, metadata={"about": "see models/counts.py: Counts"}),
        pa.field("pixels", pa.list_(pa.uint32()), nullable=False, metadata={"about": "how many, at least 1"}),
    ]
)  # fmt: skip
SINGLE_ROUND, RELATED, PSEUDO_MASKS = "single round", "related images", "pseudo masks"
RANDOM_TAG, BEST_TAG = "a random tag on salient pixels", "the best tag on salient pixels"
PLAIN, WITH_CRF = "plain", "with CRF"
"""What is counted; baselines and predictions by the names of their scores."""
TRAINING_IMAGES, PREDICTED_IMAGES = "training-images", "predicted-images"
"""Folders of shards in the stage's output: of maps, masks and baselines; of predictions."""


def counts_row(image_id: str, truth: NDArray[np.uint8], scored: str, counts: Counts) -> dict[str, Any]:
    """A row of COUNTS_SCHEMA, of what was counted of an image for one score; `truth` is its mask, (H, W)."""
    return {"image_id": image_id, "truth_crc": crc_of_truth(truth), "scored": scored, **counts._asdict()}


def mask_rows(
    image_id: str, truth: NDArray[np.uint8], masks: Mapping[str, NDArray[np.uint8]], classes: int
) -> Iterator[dict[str, Any]]:
    """Rows of COUNTS_SCHEMA, of the label masks of an image, (H, W) by what is scored."""
    for scored, counts in zip(masks, mask_counts(truth, masks.values(), classes), strict=True):
        yield counts_row(image_id, truth, scored, counts)


def crc_of_truth(truth: NDArray[np.uint8]) -> int:
    """CRC-32 of a ground-truth mask's height, width and labels: another one means another truth."""
    return zlib.crc32(np.ascontiguousarray(truth).data, zlib.crc32(str(truth.shape).encode()))


class ImageCounts(NamedTuple):
    """What was counted of N images for one score.

    Attributes:
        image_ids, truth_crc: of the images, (N,).
        counts: entries of all images, chained, (E,).
        images: position of the image that each entry is of, (E,).
    """

    image_ids: list[str]
    truth_crc: NDArray[np.uint32]
    counts: Counts
    images: NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: pa.Table) -> Self:
        """What rows of COUNTS_SCHEMA hold."""
        columns = {name: rows[name].combine_chunks() for name in COUNTS_SCHEMA.names}
        counts = Counts(*(columns[name].flatten().to_numpy(zero_copy_only=False) for name in Counts._fields))
        images = np.repeat(np.arange(len(rows)), pc.list_value_length(columns["pixels"]).to_numpy())
        return cls(columns["image_id"].to_pylist(), columns["truth_crc"].to_numpy(), counts, images)


def read_counts(output: Path, score: Score) -> ImageCounts:
    """What was counted for a score, of all its images in the order of their ids; errors as of `read_shards`.

    Args:
        output: of the stage.
    """
    folder = output / (PREDICTED_IMAGES if score.what == "segmentation" else TRAINING_IMAGES)
    counted = {"localization_maps": RELATED if score.related else SINGLE_ROUND, "pseudo_masks": PSEUDO_MASKS}
    rows = pa.concat_tables(_rows_of(shard, counted.get(score.what, score.name)) for shard in read_shards(folder))
    return ImageCounts.of_rows(rows.sort_by("image_id"))


def sum_counts(folder: Path, shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, NDArray[np.int64]]:
    """Sums over the images of a folder's shards, by what was counted.

    Args:
        shapes: (parts, K + 1, K + 1) by what was counted.
    """
    totals = {scored: np.zeros(shape, np.int64) for scored, shape in shapes.items()}
    for shard in read_shards(folder):
        for scored, total in totals.items():
            add_counts(total, ImageCounts.of_rows(_rows_of(shard, scored)).counts)
    return totals


def _rows_of(rows: pa.Table, scored: str) -> pa.Table:
    return rows.filter(pc.equal(rows["scored"], scored))
