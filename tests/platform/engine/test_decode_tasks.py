"""Tests of decoding in Ray Data tasks against a plain loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import Batch, WorkerShard
from mcis.datasets.sampling.batches import PairBatch, PairDecoder
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.tags import Tags
from mcis.platform.engine.decode_tasks import decode_in_tasks

SIZE = 24


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Listing of a small synthetic data set."""
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    draw(root, train=24, val=4, size=48, classes=4)
    table = list_voc(root, classes=root / "classes.txt").table
    return table.slice(0, 24)


def decoder(listing: pa.Table, shard: WorkerShard) -> PairDecoder:
    sampler = PairSampler(Tags.from_index(listing["tags"], 4), seed=1)
    return PairDecoder(Squares(listing["uri"].to_pylist(), SIZE), sampler, batch=5, shard=shard)


def decoded(listing: pa.Table, shard: WorkerShard) -> list[PairBatch]:
    """Batches of a shard, decoded with one call per step."""
    decode = decoder(listing, shard)
    return [decode(np.array([step])) for step in range(shard.steps)]


def decoded_in_tasks(decode: Any, shard: WorkerShard, **options: int) -> list[Any]:
    """Batches of a shard, decoded in tasks."""
    import ray

    return list(decode_in_tasks(ray.put(decode), shard=shard, **options))


def same(found: Sequence[PairBatch], expected: Sequence[PairBatch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        ours = one.columns()
        theirs = other.columns()
        assert set(ours) == set(theirs)
        for name, column in theirs.items():
            assert ours[name].dtype == column.dtype
            np.testing.assert_array_equal(ours[name], column)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tasks_match_a_loop(drawn: pa.Table, world: int, ray_local: None) -> None:
    for rank in range(world):
        shard = WorkerShard(rank, world, 0, 30)
        same(decoded_in_tasks(decoder(drawn, shard), shard), decoded(drawn, shard))


def test_a_stream_can_start_at_any_step(drawn: pa.Table, ray_local: None) -> None:
    late = WorkerShard(1, 2, 7, 12)
    same(decoded_in_tasks(decoder(drawn, late), late), decoded(drawn, WorkerShard(1, 2, 0, 12))[7:])


@pytest.mark.parametrize(("cpus", "block_rows"), [(1, 5), (1, 10), (50, 5)])
def test_batches_do_not_depend_on_the_window_size(drawn: pa.Table, ray_local: None, cpus: int, block_rows: int) -> None:
    """The 11 steps are decoded in three windows, in two, and in one."""
    shard = WorkerShard(0, 1, 3, 14)
    found = decoded_in_tasks(decoder(drawn, shard), shard, cpus=cpus, block_rows=block_rows)
    same(found, decoded(drawn, shard))


def test_workers_share_a_decoder(drawn: pa.Table, ray_local: None) -> None:
    import ray

    shared = ray.put(decoder(drawn, WorkerShard(0, 1, 0, 20)))
    for rank in range(2):
        shard = WorkerShard(rank, 2, 9, 14)
        same(list(decode_in_tasks(shared, shard=shard)), decoded(drawn, shard))


@pytest.mark.slow
def test_order_is_kept_if_the_first_blocks_are_slowest(ray_local: None) -> None:
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Blocks(Batch):
        step: NDArray[np.int64]
        block: NDArray[np.int64]

    @dataclass
    class SlowDecoder:
        shard: WorkerShard

        def __call__(self, steps: NDArray[np.int64]) -> Blocks:
            time.sleep(1.5 if 0 in steps else 0)
            return Blocks(step=np.repeat(steps, 32), block=np.full(32 * len(steps), steps[0]))

    shard = WorkerShard(0, 1, 0, 12)
    found = decoded_in_tasks(SlowDecoder(shard), shard)

    assert [set(batch.step.tolist()) for batch in found] == [{step} for step in range(12)]
    assert [len(batch) for batch in found] == [32] * 12
    blocks = np.concatenate([batch.block for batch in found])
    assert len(np.unique(blocks)) > 2, "the test needs several blocks"


def test_a_missing_file_ends_the_stream_with_an_error(drawn: pa.Table, ray_local: None) -> None:
    uris = drawn["uri"].to_pylist()
    uris[5] += ".gone"
    shard = WorkerShard(0, 1, 0, 10)
    decode = decoder(drawn, shard)
    decode.images = Squares(uris, SIZE)

    with pytest.raises(UserError, match=r"\.gone cannot be read any more") as caught:
        decoded_in_tasks(decode, shard)
    assert type(caught.value) is UserError
    assert "Traceback" not in str(caught.value)
