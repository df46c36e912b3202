"""Tests of batch streams: shards of workers, and decoding in threads against a plain loop."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import Batch, WorkerShard, decode_in_threads
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.tags import Tags

COLUMNS = ("images_m", "images_n", "m", "n", "epoch", "pair_domains", "row", "unshared_m", "unshared_n")
SIZE = 24


@settings(max_examples=100)
@given(st.integers(1, 20), st.integers(1, 20))
def test_shards_partition_a_batch_evenly(batch: int, world_size: int) -> None:
    positions = [WorkerShard(rank, world_size, 0, 1).positions(batch) for rank in range(world_size)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(batch))
    assert max(map(len, positions)) - min(map(len, positions)) <= 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Listing of a small synthetic data set."""
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    draw(root, train=24, val=4, size=48, classes=4)
    table = list_voc(root, classes=root / "classes.txt").table
    return table.slice(0, 24)


def decoder(listing: pa.Table, shard: WorkerShard, batch: int = 5) -> PairDecoder:
    sampler = PairSampler(Tags.from_index(listing["tags"], 4), seed=1)
    return PairDecoder(Squares(listing["uri"].to_pylist(), SIZE), sampler, batch=batch, shard=shard)


def decoded(listing: pa.Table, shard: WorkerShard, batch: int = 5) -> list[PairBatch]:
    """Batches of a shard, decoded with one call per step."""
    decode = decoder(listing, shard, batch)
    return [decode(np.array([step])) for step in range(shard.steps)]


def expected_dtype(column: str) -> type[np.generic]:
    if column.startswith("images") or column == "pair_domains":
        return np.uint8
    if column.startswith("unshared"):
        return np.bool_
    return np.int64


def same(found: Sequence[PairBatch], expected: Sequence[PairBatch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        ours = one.columns()
        theirs = other.columns()
        assert set(ours) == set(COLUMNS)
        for name in COLUMNS:
            assert ours[name].dtype == expected_dtype(name)
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_decoded_pairs_match_the_sampler_and_the_files(drawn: pa.Table) -> None:
    rows = PairSampler(Tags.from_index(drawn["tags"], 4), seed=1).rows(15, 25)
    (batch,) = [decoder(drawn, WorkerShard(0, 1, 3, 5))(np.arange(2))]
    for name in ("m", "n", "epoch"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(rows, name))

    np.testing.assert_array_equal(batch.row, np.arange(15, 25))
    for side in ("m", "n"):
        assert getattr(batch, f"images_{side}").shape == (10, SIZE, SIZE, 3)
        for position, image in zip(getattr(batch, side), getattr(batch, f"images_{side}"), strict=True):
            data = Path(drawn["uri"][int(position)].as_py()).read_bytes()
            np.testing.assert_array_equal(image, decode_square(data, SIZE))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_rows_of_all_workers_form_the_batch(drawn: pa.Table, world: int) -> None:
    whole = decoded(drawn, WorkerShard(0, 1, 2, 4))
    parts = [decoded(drawn, WorkerShard(rank, world, 2, 4)) for rank in range(world)]
    for step, batch in enumerate(whole):
        for name in COLUMNS:
            together = np.empty_like(getattr(batch, name))
            for rank in range(world):
                together[rank::world] = getattr(parts[rank][step], name)
            np.testing.assert_array_equal(together, getattr(batch, name))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_unshared_labels_refer_to_the_whole_batch(drawn: pa.Table, rank: int) -> None:
    """Compares with sets of tags over the pairs of all workers, which differ from those of one worker."""
    tags = [set(image_tags) for image_tags in drawn["tags"].to_pylist()]
    sampler = PairSampler(Tags.from_index(drawn["tags"], 4), seed=1)
    batch_labels = []
    own_labels = []
    for step, batch in enumerate(decoded(drawn, WorkerShard(rank, 3, 0, 60), batch=3)):
        rows = sampler.rows(3 * step, 3 * step + 3)
        pairs = list(zip(rows.m.tolist(), rows.n.tolist(), strict=True))
        expected = [any(tags[m] - tags[n] for m, n in pairs), any(tags[n] - tags[m] for m, n in pairs)]
        assert [set(getattr(batch, f"unshared_{side}").tolist()) for side in "mn"] == [{expected[0]}, {expected[1]}]
        m, n = pairs[rank]
        batch_labels.append(expected)
        own_labels.append([bool(tags[m] - tags[n]), bool(tags[n] - tags[m])])

    assert set(np.ravel(batch_labels).tolist()) == {True, False}
    assert batch_labels != own_labels


def test_an_image_in_two_pairs_of_an_epoch_has_two_crops(drawn: pa.Table) -> None:
    sampler = PairSampler(Tags.from_index(drawn["tags"], 4), seed=1, class_balanced_fraction=1.0)
    squares = Squares(drawn["uri"].to_pylist(), SIZE)
    decode = PairDecoder(squares, sampler, batch=24, shard=WorkerShard(0, 1, 0, 1), crop_scales=(1.0, 1.5))
    batch = decode(np.array([0]))

    assert set(batch.epoch.tolist()) == {0}
    crops: dict[int, list[bytes]] = {}
    for image, pixels in zip(batch.m.tolist(), batch.images_m, strict=True):
        crops.setdefault(image, []).append(pixels.tobytes())
    again = [pictures for pictures in crops.values() if len(pictures) > 1]

    assert again
    assert all(len(set(pictures)) > 1 for pictures in again)


# --- decoding in threads


@pytest.mark.parametrize("world", [1, 2])
def test_threads_match_a_loop(drawn: pa.Table, world: int) -> None:
    for rank in range(world):
        shard = WorkerShard(rank, world, 0, 30)
        same(list(decode_in_threads(decoder(drawn, shard), shard=shard, threads=3)), decoded(drawn, shard))


def test_a_stream_can_start_at_any_step(drawn: pa.Table) -> None:
    late = WorkerShard(1, 2, 7, 12)
    found = list(decode_in_threads(decoder(drawn, late), shard=late, threads=3))
    same(found, decoded(drawn, WorkerShard(1, 2, 0, 12))[7:])


def test_threads_decode_a_bounded_number_of_steps_ahead_and_stop_with_the_reader() -> None:
    decoded_steps: list[int] = []

    def decode(step: int) -> int:
        decoded_steps.append(step)
        return step

    before = threading.active_count()
    stream = map_in_threads(decode, range(1000), threads=2)

    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]

    time.sleep(0.2)
    assert 5 <= len(decoded_steps) <= 5 + 2 * 4
    stream.close()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)

    assert threading.active_count() == before
    assert len(decoded_steps) <= 5 + 2 * 4


def test_threads_decode_fewer_steps_ahead_if_batches_are_large() -> None:
    """Three batches fit, although there are eight threads."""

    @dataclass(frozen=True, kw_only=True, eq=False)
    class Steps(Batch):
        step: NDArray[np.int64]

    decoded_steps: list[int] = []

    def decode(steps: NDArray[np.int64]) -> Steps:
        decoded_steps.append(int(steps[0]))
        return Steps(step=np.repeat(steps, 100))

    stream = decode_in_threads(decode, shard=WorkerShard(0, 1, 0, 40), threads=8, max_bytes=2500)
    found = [next(stream) for _ in range(5)]
    time.sleep(0.2)
    assert 5 <= len(decoded_steps) <= 5 + 3

    found += stream
    assert [batch.step[0] for batch in found] == list(range(40))


def test_a_missing_file_ends_the_stream_with_an_error(drawn: pa.Table) -> None:
    uris = drawn["uri"].to_pylist()
    uris[5] += ".gone"
    shard = WorkerShard(0, 1, 0, 10)
    decode = decoder(drawn, shard)
    decode.images = Squares(uris, SIZE)

    with pytest.raises(UserError, match=r"\.gone cannot be read any more"):
        list(decode_in_threads(decode, shard=shard, threads=3))
