"""Streams of decoded uint8 batches for one training worker, decoded ahead of the training.

A worker reads only its own rows: of each batch, every world_size-th row, starting at its rank. The whole batch does not
depend on the number of workers, and a stream that starts at step s continues as if it had never stopped. Rows are
sampled, read and decoded either in threads of the worker's process or in Ray Data tasks on any CPU of the cluster. Both
produce the same batches. Only uint8 is transferred; normalization, jitter and flips run on the device.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.storage.threads import map_in_threads

_STEPS_AHEAD = 4
"""Maximum number of steps per thread that threads decode ahead of the training."""
_BYTES_AHEAD = 2**31
"""Maximum size of the batches that threads decode ahead of the training. If there are many cores and batches are large,
fewer threads decode."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Base class of batches: named arrays of the same length, or None. Subclasses define the names."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays by name, in the form that Ray Data takes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def rows(self, first: int, last: int) -> Self:
        """Returns rows first .. last - 1, for example a micro-batch."""
        return type(self)(**{name: column[first:last] for name, column in self.columns().items()})

    @property
    def nbytes(self) -> int:
        """Total size of the arrays, bytes."""
        return sum(column.nbytes for column in self.columns().values())

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class WorkerShard(NamedTuple):
    """A worker's part of a stream: every `world_size`-th row from `rank` on, in steps `start` .. `stop` - 1."""

    rank: int
    world_size: int
    start: int
    stop: int

    @property
    def steps(self) -> int:
        """Number of steps in the stream."""
        return max(0, self.stop - self.start)

    def positions(self, batch: int) -> NDArray[np.int64]:
        """Returns this worker's positions within a batch of `batch` rows."""
        return np.arange(self.rank, batch, self.world_size)


Decode: TypeAlias = Callable[[NDArray[np.int64]], AnyBatch]
"""Decodes a worker's rows of the given steps, in order. Steps are counted from the start of the worker's shard."""


def decode_in_threads(
    decode: Decode[AnyBatch], *, shard: WorkerShard, threads: int, max_bytes: int = _BYTES_AHEAD
) -> Iterator[AnyBatch]:
    """Iterates over the decoded batches of a worker's shard, one per step, in order. Errors of `decode` are raised.

    Threads of this process decode, which is fastest if the node has enough cores.

    Args:
        decode: Decodes the rows of some steps.
        shard: Steps and rows of the worker.
        threads: Maximum number of decoding threads.
        max_bytes: Maximum size of the batches that are decoded ahead; at least one is.
    """
    if not shard.steps:
        return
    first = decode(np.zeros(1, np.int64))
    yield first

    steps_that_fit = max(1, max_bytes // max(1, first.nbytes))
    threads = min(threads, steps_that_fit)
    ahead = min(_STEPS_AHEAD, steps_that_fit // threads)
    steps = (np.array([step]) for step in range(1, shard.steps))
    yield from map_in_threads(decode, steps, threads=threads, ahead=ahead)


def decode_in_tasks(
    decoder: Any, *, shard: WorkerShard, cpus: int | None = None, block_rows: int = _BLOCK_ROWS
) -> Iterator[AnyBatch]:
    """Iterates over the same batches as `decode_in_threads`. Ray Data tasks on any CPU of the cluster decode them.

    They decode one window of steps after the other. The more CPUs the cluster has, the larger is a window.

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
        decoding = collections.deque(itertools.islice(results, _WINDOWS))
        while decoding:
            decoded = ray.get(decoding.popleft())
            decoding.extend(itertools.islice(results, 1))
            for columns in decoded.iter_batches(batch_size=len(example), prefetch_batches=1):
                yield type(example)(**columns)
    except ray.exceptions.RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, UserError):
            raise cause from None
        raise
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
