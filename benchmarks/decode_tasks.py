"""Batches per second that the workers of a training receive from decode tasks on two nodes, by windows and by a stream.

Two Ray nodes on this machine and four workers. Decoding an image is a sleep, so that the tasks need no cores. Three
sides are measured in turn: windows as large as the CPUs allow, with one decoder for all workers; windows of four
blocks, with a decoder for each worker; and a Ray Data stream of each worker (`streaming_split`), whose processor time
is also measured while nothing is read from it.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import harness
import numpy as np
import psutil
import pyarrow as pa
import ray
import ray.data
from data_loading import draw_tags
from numpy.typing import NDArray
from ray.cluster_utils import Cluster

from mcis.datasets.sampling.batch_stream import Batch, WorkerShard
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tables.large_tables import Texts
from mcis.platform.engine.decode_tasks import decode_in_tasks

WORKERS = 4
BATCH = 32
BLOCK_ROWS = 64
IMAGE_SECONDS = 0.002
SIDE = 96
STORE_BYTES = 1200 * 2**20
TARGET_WINDOWS = 1
TARGET_STREAM = 0.9
TARGET_IDLE = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class SleptBatch(Batch):
    """Pairs whose decoding was a sleep.

    Attributes:
        images: (N, SIDE, SIDE, 6) uint8.
        start, end: Time at which the task of each row began and ended, (N,).
    """

    images: NDArray[np.uint8]
    start: NDArray[np.float64]
    end: NDArray[np.float64]


@dataclass
class SleepingDecoder:
    """As large as the decoder of a training, but sleeps instead of decoding."""

    sampler: PairSampler
    uris: Texts
    hashes: Texts
    shard: WorkerShard

    def __call__(self, steps: NDArray[np.int64]) -> SleptBatch:
        start = time.time()
        for step in steps.tolist():
            self.sampler.rows(step * BATCH, (step + 1) * BATCH)
        count = len(steps) * len(self.shard.positions(BATCH))
        time.sleep(2 * count * IMAGE_SECONDS)
        images = np.zeros((count, SIDE, SIDE, 6), np.uint8)
        return SleptBatch(images=images, start=np.full(count, start), end=np.full(count, time.time()))


class Reading(NamedTuple):
    """What a worker received.

    Attributes:
        batches: Number of batches.
        seconds: Time from the first batch to the last.
        spans: When the tasks of the batches began and ended.
    """

    batches: int
    seconds: float
    spans: list[tuple[float, float]]


class Measurement(NamedTuple):
    """Batches per second of a worker, tasks at a time, and MiB that the object stores held at most."""

    rate: float
    tasks: float
    store: float


def make_decoder(rows: int) -> SleepingDecoder:
    """Makes the decoder of a training on `rows` images."""
    uris = Texts(pa.chunked_array([[f"/data/photographs/{number:010d}.jpg" for number in range(rows)]]))
    hashes = Texts(pa.chunked_array([[f"{number:064d}" for number in range(rows)]]))
    return SleepingDecoder(PairSampler(draw_tags(rows), seed=0), uris, hashes, WorkerShard(0, 1, 0, 1))


def data_stream(decoder: Any, shard: WorkerShard) -> Iterator[Any]:
    """Iterates over the batches of a worker from a single Ray Data stream."""
    rows = len(shard.positions(BATCH))

    def decode_block(block: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        decode = ray.get(decoder)
        decode.shard = shard
        columns: dict[str, NDArray[Any]] = decode(block["id"]).columns()
        return columns

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.override_object_store_memory_limit_fraction = 0.5 / WORKERS
    blocks = math.ceil(shard.steps / (BLOCK_ROWS // rows))
    steps = ray.data.range(shard.steps, override_num_blocks=blocks).map_batches(decode_block, batch_size=None)
    (stream,) = steps.streaming_split(1)
    for columns in stream.iter_batches(batch_size=rows, prefetch_batches=1):
        yield SleptBatch(**columns)


def read_batches(side: str, rank: int, steps: int, decoder: list[Any], idle_seconds: float) -> Reading:
    """Reads the batches of a worker, and nothing for some seconds after the first of them."""
    shard = WorkerShard(rank, WORKERS, 0, steps)
    if side == "stream":
        stream = data_stream(decoder[0], shard)
    elif side == "windows":
        stream = decode_in_tasks(decoder[0], shard=shard, block_rows=BLOCK_ROWS)
    else:
        own_decoder = ray.put(ray.get(decoder[0]))
        stream = decode_in_tasks(own_decoder, shard=shard, cpus=WORKERS, block_rows=BLOCK_ROWS)

    spans = set()
    count = 0
    start = 0.0
    for batch in stream:
        if not count:
            time.sleep(idle_seconds)
            start = time.perf_counter()
        count += 1
        spans.add((float(batch.start[0]), float(batch.end[0])))
    return Reading(count, time.perf_counter() - start, sorted(spans))


@contextlib.contextmanager
def watched_store() -> Iterator[list[float]]:
    """Yields a list of the MiB that the object stores hold, which grows during the block."""
    total = ray.cluster_resources()["object_store_memory"]
    samples = [0.0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.2):
            samples.append((total - ray.available_resources().get("object_store_memory", 0)) / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def measure(side: str, decoder: Any, steps: int) -> Measurement:
    """Lets all workers read their batches at the same time."""
    read = ray.remote(num_cpus=0)(read_batches)
    with watched_store() as samples:
        readings = ray.get([read.remote(side, rank, steps, [decoder], 0) for rank in range(WORKERS)])

    seconds = max(reading.seconds for reading in readings)
    busy = 0.0
    times = []
    for reading in readings:
        assert reading.batches == steps
        busy += sum(end - start for start, end in reading.spans)
        times += [*reading.spans[0], *reading.spans[-1]]
    return Measurement(steps / seconds, busy / (max(times) - min(times)), max(samples))


def idle_cores(decoder: Any, steps: int, seconds: float) -> float:
    """Returns the cores that a stream takes from which nothing is read for some seconds."""
    others = _coordinators()
    read = ray.remote(num_cpus=0)(read_batches)
    readings = [read.remote("stream", 0, steps, [decoder], 5 * seconds)]
    deadline = time.monotonic() + 120
    coordinators: set[psutil.Process] = set()
    while not coordinators and time.monotonic() < deadline:
        time.sleep(0.2)
        coordinators = _coordinators() - others
    time.sleep(2 * seconds)

    (coordinator,) = coordinators
    before = coordinator.cpu_times()
    time.sleep(seconds)
    after = coordinator.cpu_times()
    ray.get(readings)
    return (after.user + after.system - before.user - before.system) / seconds


def _coordinators() -> set[psutil.Process]:
    """Returns the processes of this cluster's streams."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "SplitCoordinator" in " ".join(process.cmdline()):
                found.add(process)
    return found


def main() -> None:
    """Measures the sides in turn and prints the ratios of their medians."""
    options = harness.option_parser(__doc__, rows=1_000_000, cpus=8, steps=2000, rounds=3, idle_seconds=6).parse_args()
    print(harness.describe_machine())
    node = {"num_cpus": options.cpus, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    decoder = ray.put(make_decoder(options.rows))

    measured: dict[str, list[Measurement]] = {"windows": [], "fixed": [], "stream": []}
    for _ in range(options.rounds):
        for side, measurements in measured.items():
            measurements.append(measure(side, decoder, options.steps))
    rates = {}
    for side, measurements in measured.items():
        rates[side], tasks, store = np.median(np.array(measurements), axis=0).tolist()
        print(f"{side}: {rates[side]:.1f} batches/s, {tasks:.1f} tasks at a time, {store:.0f} MiB in the object stores")

    cores = idle_cores(decoder, options.steps, options.idle_seconds)
    ray.shutdown()
    cluster.shutdown()
    windows = rates["windows"] / rates["fixed"]
    stream = rates["stream"] / rates["windows"]
    print(f"ratio {cores:.2f} target at most {TARGET_IDLE}: cores of a Ray Data stream from which nothing is read")
    print(f"ratio {stream:.2f} target {TARGET_STREAM}: batches/s of Ray Data streams, relative to windows")
    print(f"ratio {windows:.2f} target {TARGET_WINDOWS}: batches/s of windows by the CPUs, relative to a fixed size")


if __name__ == "__main__":
    main()
