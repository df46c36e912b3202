"""Streams of decoded uint8 batches for one training worker, decoded ahead of the training.

A worker reads only its own rows: of each batch, every world_size-th row, starting at its rank. The whole batch does not
depend on the number of workers, and a stream that starts at step s continues as if it had never stopped. Rows are
sampled, read and decoded in threads of the worker's process. `mcis.platform.engine.decode_tasks` decodes the same
batches on any CPU of a cluster. Only uint8 is transferred; normalization, jitter and flips run on the device.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.storage.threads import map_in_threads

_STEPS_AHEAD = 4
"""Maximum number of steps per thread that threads decode ahead of the training."""
_BYTES_AHEAD = 2**31
"""Maximum size of the batches that threads decode ahead of the training. If there are many cores and batches are large,
fewer threads decode."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Base class of batches: named arrays of the same length, or None. Subclasses define the names."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays by name."""
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
