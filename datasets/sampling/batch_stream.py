"""Streams of decoded uint8 batches for one training worker, decoded ahead of the training.

A worker reads only its own rows: of each batch, every world_size-th row, starting at its rank. The whole batch does not
depend on the number of workers, and a stream that starts at step s continues as if it had never stopped. Rows are
sampled, read and decoded either in threads of the worker's process or in Ray Data tasks on any CPU of the cluster. Both
produce the same batches. Only uint8 is transferred; normalization, jitter and flips run on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.storage.threads import map_in_threads

DecodeIn = Literal["threads", "tasks"]
"""Where images are decoded: threads of the training worker, or Ray Data tasks."""
_ROWS_PER_BLOCK = 64
"""Approximate number of rows that a Data task decodes."""
_WINDOW_BYTES = 96 * 2**20
"""Default size of a window of decoded steps, bytes."""
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


def batches(
    decode: Decode[AnyBatch], *, batch: int, shard: WorkerShard, decode_in: DecodeIn, threads: int = 1
) -> Iterator[AnyBatch]:
    """Iterates over the decoded batches of a worker's shard, one per step, in order. Errors of `decode` are raised.

    Args:
        decode: decodes the rows of some steps.
        batch: rows per batch, over all workers.
        shard: steps and rows of the worker.
        decode_in: `threads` of this process, which is fastest if the node has enough cores; or Ray Data `tasks`, which
            use any CPU of the cluster.
        threads: number of decoding threads.
    """
    if not shard.steps:
        return iter(())

    if decode_in == "threads":
        steps = (np.array([step]) for step in range(shard.steps))
        return map_in_threads(decode, steps, threads=threads)
    return decode_in_tasks(decode, batch=batch, shard=shard)


def decode_in_tasks(
    decode: Decode[AnyBatch], *, batch: int, shard: WorkerShard, window_bytes: int = _WINDOW_BYTES
) -> Iterator[AnyBatch]:
    """Decodes batches in Ray Data tasks, one window of steps ahead. The object store holds at most two windows.

    Args:
        decode, batch, shard: see `batches`.
        window_bytes: size of a window, bytes.
    """
    import ray

    example = decode(np.zeros(1, np.int64))  # gives the type and the size of a batch
    rows = len(shard.positions(batch))
    window_steps = max(1, window_bytes // max(1, example.nbytes))
    windows = [(first, min(first + window_steps, shard.steps)) for first in range(0, shard.steps, window_steps)]
    decoder: Any = ray.remote(num_cpus=0)(_WindowDecoder).remote(decode, max(1, _ROWS_PER_BLOCK // rows))

    try:
        next_window = decoder.window.remote(*windows[0])
        for number in range(len(windows)):
            window = ray.get(next_window)
            if number + 1 < len(windows):
                next_window = decoder.window.remote(*windows[number + 1])

            for columns in window.iter_batches(batch_size=rows, prefetch_batches=1):
                yield type(example)(**columns)
    except ray.exceptions.RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, UserError):
            raise cause from None
        raise
    finally:
        ray.kill(decoder)


class _WindowDecoder:
    """Actor that decodes a stream window by window.

    It is an actor because the execution loop of Ray Data would otherwise hold the GIL of the training process. It
    decodes whole windows because that loop busy-waits for as long as it applies backpressure.
    """

    def __init__(self, decode: Decode[Batch], steps_per_block: int):
        import ray
        import ray.data

        # Tasks get a reference, not a copy: the decoder holds the names of all images.
        self.decode = ray.put(decode)
        self.steps_per_block = steps_per_block

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.raise_original_map_exception = True  # otherwise errors of `decode` arrive as text only

    def window(self, first: int, last: int) -> Any:
        """Returns steps first .. last - 1 as a materialized data set."""
        import ray.data

        decode = self.decode

        def decode_block(rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
            return _decoder_of_process(decode)(rows["id"] + first).columns()

        blocks = -(-(last - first) // self.steps_per_block)
        steps = ray.data.range(last - first, override_num_blocks=blocks)
        return steps.map_batches(decode_block, batch_size=None, max_retries=_RETRIES).materialize()


@functools.lru_cache(maxsize=1)
def _decoder_of_process(reference: Any) -> Decode[Batch]:
    """Returns the decoder of this process, which keeps its opened files from block to block."""
    import ray

    decode: Decode[Batch] = ray.get(reference)
    return decode
