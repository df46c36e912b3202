"""Tests of batches as records, and of the decoder of crops."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, CropDecoder, MaskedImages
from mcis.datasets.sampling.pairs import epoch_rows
from mcis.datasets.tables.shards import Shards

SIZE = 16


def batch(count: int) -> CropBatch:
    rng = np.random.default_rng(0)
    images, labels = (rng.integers(0, 256, (count, 4, 4, *more), np.uint8) for more in ((3,), ()))
    return CropBatch(images=images, labels=labels, index=np.arange(count), epoch=np.arange(count) // 3)


def test_a_micro_batch_has_rows_of_every_column() -> None:
    whole = batch(7)
    parts = [whole.rows(first, first + 3) for first in (0, 3, 6)]
    assert [len(part) for part in parts] == [3, 3, 1]
    assert all(type(part) is CropBatch for part in parts)
    for name, column in whole.columns().items():
        np.testing.assert_array_equal(np.concatenate([part.columns()[name] for part in parts]), column)


@pytest.fixture
def decoder(tmp_path: Path) -> CropDecoder:
    """Decoder of seven images of one color each, whose masks have the number of the color as their only label."""
    ids = [f"i{number}" for number in range(7)]
    uris = [str(tmp_path / f"{image_id}.png") for image_id in ids]
    for number, uri in enumerate(uris):
        Image.fromarray(np.full((SIZE, SIZE, 3), 10 * number, np.uint8)).save(uri)
    masks = [encode_labels(np.full((SIZE, SIZE), number, np.uint8)) for number in range(7)]
    (tmp_path / "masks").mkdir()
    pq.write_table(pa.table({"image_id": ids, "mask": masks}), tmp_path / "masks" / "part-00000000-00000007.parquet")
    images = MaskedImages(ids, uris, Shards(tmp_path / "masks"))
    shard = WorkerShard(1, 3, 2, 9)
    return CropDecoder(images, seed=5, batch=4, shard=shard, size=SIZE, scales=(1.0,), hflip=True)


def test_images_are_resized_to_their_masks(decoder: CropDecoder, tmp_path: Path) -> None:
    smaller = [encode_labels(np.full((SIZE // 2, SIZE // 2), number, np.uint8)) for number in range(7)]
    (tmp_path / "smaller").mkdir()
    pq.write_table(
        pa.table({"image_id": decoder.images.ids, "mask": smaller}),
        tmp_path / "smaller" / "part-00000000-00000007.parquet",
    )
    images = dataclasses.replace(decoder.images, masks=Shards(tmp_path / "smaller"), max_side=SIZE // 2)
    found = dataclasses.replace(decoder, images=images)(np.array([3]))
    labeled = found.labels != 255

    assert labeled.sum() == (SIZE // 2) ** 2, "the rest of the crop is padding"
    assert (found.images[labeled] == 10 * found.index[0]).all()


def test_crops_follow_the_stream_and_have_their_own_masks(decoder: CropDecoder) -> None:
    """Rank 1 of 3 has only row 1 of batches 2 + 3 and 2 + 4."""
    found = decoder(np.array([3, 4]))
    index, epoch = epoch_rows(5, 7, 20, 28)

    np.testing.assert_array_equal(found.index, index[[1, 5]])
    np.testing.assert_array_equal(found.epoch, epoch[[1, 5]])
    assert (found.images == 10 * found.index[:, None, None, None]).all()
    assert (found.labels == found.index[:, None, None]).all()
