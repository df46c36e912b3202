"""Streams of decoded uint8 batches for one training worker, ahead of its training.

A worker asks for its own rows: of batch t it takes every world_size-th row, beginning at its rank. The whole batch is
the same for any number of workers, and a stream that starts at step s continues as if it had never stopped. Rows are
drawn, files opened and decoded in threads of the worker's process, or in Ray Data tasks on any CPU of the cluster; both
deliver the same batches. uint8 crosses the wire; everything else (normalization, jitter, flips) happens on the device.
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
_WINDOW_BYTES = 96 * 2**20
_RETRIES = 2
"""How often a Data task is started again whose process or node died; Ray Data would do so without end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of a step as named arrays, all of the same length; its subclasses name them."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, as Ray Data takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def rows(self, first: int, last: int) -> Self:
        """Rows first .. last - 1, such as those of a micro batch."""
        return type(self)(**{name: column[first:last] for name, column in self.columns().items()})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(column.nbytes for column in self.columns().values())

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class WorkerShard(NamedTuple):
    """A worker's part of a stream: of steps `start` .. `stop` - 1, every `world_size`-th row from `rank` on."""

    rank: int
    world_size: int
    start: int
    stop: int

    @property
    def steps(self) -> int:
        """How many steps the stream has."""
        return max(0, self.stop - self.start)

    def positions(self, batch: int) -> NDArray[np.int64]:
        """Positions in a batch of so many rows that fall to this worker."""
        return np.arange(self.rank, batch, self.world_size)


Decode: TypeAlias = Callable[[NDArray[np.int64]], AnyBatch]
"""Decodes a worker's rows of steps, which are counted from its shard's start, in order."""


def batches(
    decode: Decode[AnyBatch], *, batch: int, shard: WorkerShard, decode_in: DecodeIn, threads: int = 1
) -> Iterator[AnyBatch]:
    """The decoded batches of a worker's shard, one per step, in order; errors as of `decode`.

    Args:
        batch: rows of a whole batch, over all workers.
        decode_in: `threads` of this process, the fastest where its own node has enough cores; or Ray Data `tasks`, for
            which any CPU of the cluster serves.
        threads: how many threads decode.
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
    """Decodes a window of `window_bytes` ahead in Ray Data tasks; at most two windows lie in the object store."""
    import ray

    example = decode(np.zeros(1, np.int64))  # tells what batches are, and how large
    rows = len(shard.positions(batch))
    length = max(1, window_bytes // max(1, example.nbytes))
    windows = [(first, min(first + length, shard.steps)) for first in range(0, shard.steps, length)]
    driver: Any = ray.remote(num_cpus=0)(_Windows).remote(decode, max(1, _ROWS_PER_BLOCK // rows))
    try:
        coming = driver.window.remote(*windows[0])
        for number in range(len(windows)):
            window = ray.get(coming)
            if number + 1 < len(windows):
                coming = driver.window.remote(*windows[number + 1])
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
        ray.kill(driver)


class _Windows:
    """Decodes a stream window by window, as an actor.

    It is an actor of its own, because Ray Data's loop would keep Python's lock from a training that it shares a process
    with. It decodes whole windows, because that loop runs hot for as long as it holds back what nobody takes.
    """

    def __init__(self, decode: Decode[Batch], steps_per_block: int):
        import ray
        import ray.data

        # Each window's tasks get a reference to the decoder, which holds the names of all images, and not a copy.
        self.decode, self.steps_per_block = ray.put(decode), steps_per_block
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.raise_original_map_exception = True  # else what `decode` raises arrives as text alone

    def window(self, first: int, last: int) -> Any:
        """Steps first .. last - 1 as a materialized data set."""
        import ray.data

        decode = self.decode
        blocks = -(-(last - first) // self.steps_per_block)
        steps = ray.data.range(last - first, override_num_blocks=blocks)
        return steps.map_batches(
            lambda rows: _referred(decode)(rows["id"] + first).columns(), batch_size=None, max_retries=_RETRIES
        ).materialize()


@functools.lru_cache(maxsize=1)
def _referred(reference: Any) -> Decode[Batch]:
    """This process's decoder, which keeps the files that it has opened from block to block."""
    import ray

    decode: Decode[Batch] = ray.get(reference)
    return decode
