"""Batches of a training worker that Ray Data tasks on any CPU of the cluster decode.

They are the batches of `mcis.datasets.sampling.batch_stream`, which threads of the worker's process decode otherwise.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.batch_stream import AnyBatch, Batch, WorkerShard
from mcis.platform.engine.errors import user_errors

_BLOCK_ROWS = 64
"""Approximate number of rows that a Data task decodes."""
_BLOCKS_PER_CPU = 4
"""Number of blocks of a window for each CPU of a worker's share. Ray Data takes a third of a second for a window."""
_WINDOWS = 2
"""Number of windows that are decoded ahead of the one that is read."""
_STORE_FRACTION = 0.5
"""Fraction of the object store that decoded batches may fill."""
_RETRIES = 2
"""Maximum number of restarts of a Data task whose process or node dies. Ray Data sets no limit by default."""


def decode_in_tasks(
    decoder: Any, *, shard: WorkerShard, cpus: int | None = None, block_rows: int = _BLOCK_ROWS
) -> Iterator[AnyBatch]:
    """Iterates over the same batches as `decode_in_threads`. Ray Data tasks on any CPU of the cluster decode them.

    They decode one window of steps after the other. The more CPUs the cluster has, the larger is a window. A UserError
    of the decoder is raised.

    Args:
        decoder: Reference to the decoder in Ray's object store, a dataclass with the field `shard`. All workers of a
            training share it.
        shard: Steps and rows of the worker.
        cpus: Number of CPUs that decode for all workers. None: those that the cluster has when a window begins.
        block_rows: Approximate number of rows that a task decodes.
    """
    import ray

    if not shard.steps:
        return
    example: Any = _decode(decoder, shard, np.zeros(1, np.int64))  # gives the type and the size of a batch
    actor: Any = ray.remote(num_cpus=0)(_WindowDecoder).remote([decoder], shard)
    windows = _windows(example, shard, cpus, block_rows)
    results = (actor.decode.remote(window) for window in windows)

    try:
        with user_errors():
            decoding = collections.deque(itertools.islice(results, _WINDOWS))
            while decoding:
                decoded = ray.get(decoding.popleft())
                decoding.extend(itertools.islice(results, 1))
                for columns in decoded.iter_batches(batch_size=len(example), prefetch_batches=1):
                    yield type(example)(**columns)
    finally:
        ray.kill(actor)


class _Window(NamedTuple):
    """Steps `first` .. `last` - 1 of a stream, which are decoded together, in `blocks` tasks."""

    first: int
    last: int
    blocks: int


def _windows(example: Batch, shard: WorkerShard, cpus: int | None, block_rows: int) -> Iterator[_Window]:
    """Divides a stream into windows. Each has the blocks that the worker's share of the CPUs decodes in turn.

    Blocks are smaller than `block_rows` if the windows of all workers would otherwise fill more of the object store
    than `_STORE_FRACTION`.

    Args:
        example: A batch of the worker.
        shard, cpus, block_rows: See `decode_in_tasks`.
    """
    import ray

    first = 0
    while first < shard.steps:
        resources = ray.cluster_resources()
        cpus_of_worker = math.ceil((cpus or resources.get("CPU", 1)) / shard.world_size)
        blocks = _BLOCKS_PER_CPU * cpus_of_worker

        # The store holds the windows that are decoded ahead, and the one that is read.
        window_bytes = _STORE_FRACTION * resources["object_store_memory"] / shard.world_size / (_WINDOWS + 1)
        steps_that_fit = int(window_bytes / blocks / example.nbytes)
        steps_per_block = max(1, min(block_rows // len(example), steps_that_fit))

        last = min(first + blocks * steps_per_block, shard.steps)
        yield _Window(first, last, math.ceil((last - first) / steps_per_block))
        first = last


class _WindowDecoder:
    """Actor that decodes the windows of a worker's stream one after the other.

    It is an actor because the execution loop of Ray Data would otherwise hold the GIL of the training process. It
    decodes whole windows because that loop busy-waits for as long as it applies backpressure
    (`benchmarks/decode_tasks.py`).
    """

    def __init__(self, decoder: list[Any], shard: WorkerShard):
        import ray.data

        self.decoder = decoder[0]  # Ray would replace a reference that is not in a list by its value
        self.shard = shard

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.raise_original_map_exception = True  # otherwise errors of the decoder arrive as text only

    def decode(self, window: _Window) -> Any:
        """Returns the steps of a window as a materialized data set."""
        import ray.data

        decoder = self.decoder
        shard = self.shard

        def decode_block(rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
            return _decode(decoder, shard, rows["id"] + window.first).columns()

        steps = ray.data.range(window.last - window.first, override_num_blocks=window.blocks)
        return steps.map_batches(decode_block, batch_size=None, max_retries=_RETRIES).materialize()


def _decode(decoder: Any, shard: WorkerShard, steps: NDArray[np.int64]) -> Batch:
    """Decodes a worker's rows of some steps, given the reference to the training's decoder."""
    batch: Batch = dataclasses.replace(_decoder_of_process(decoder), shard=shard)(steps)
    return batch


@functools.lru_cache(maxsize=1)
def _decoder_of_process(reference: Any) -> Any:
    """Returns the decoder of this process, which keeps its opened files from block to block."""
    import ray

    return ray.get(reference)
