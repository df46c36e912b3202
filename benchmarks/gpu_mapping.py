"""Images per second of a mapping on a GPU whose files are read on the CPUs of another node.

The cluster has two Ray nodes on this machine: one with a logical GPU and one CPU, and one with four CPUs. Reading an
image is a sleep of 20 ms and its forward pass one of 5 ms, so that the cores of this machine do not limit them. Three
ways map the same images in turn, and must write the same shards: `map_table` whose actor reads the files itself,
`map_table` with `read`, and Ray Data with a pool of actors.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.cluster_utils import Cluster

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table, shards_of
from mcis.platform.runs.files import write_table

READ_SECONDS = 0.02
FORWARD_SECONDS = 0.005
READERS = 4
SHARD_ROWS = 16
SIDE = 224
"""Side of the square images, pixels."""
TARGET = 4.0
PIXELS = "pixels"


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Connects to a cluster of three raylets: a head, a node with a GPU, and a node with CPUs."""
    with tempfile.TemporaryDirectory(prefix="mcis-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        variables = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        os.environ.update(variables)
        common: Any = {"object_store_memory": 2**28, "dashboard_agent_listen_port": 0}
        nodes = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0, "include_dashboard": False})
        try:
            nodes.add_node(**common, num_cpus=1, num_gpus=1)
            nodes.add_node(**common, num_cpus=READERS)
            os.environ["RAY_ADDRESS"] = nodes.address
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


def read(rows: pa.Table) -> pa.Table:
    """Waits as long as reading takes, and adds the pixels."""
    time.sleep(READ_SECONDS * len(rows))
    pixels = [np.full(3 * SIDE * SIDE, number % 256, np.uint8) for number in rows["number"].to_pylist()]
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(pixels)), 3 * SIDE * SIDE)
    return rows.append_column(PIXELS, values)


def forward(rows: pa.Table) -> pa.Table:
    """Waits as long as the forward passes take, and sums the pixels."""
    time.sleep(FORWARD_SECONDS * len(rows))
    pixels = rows[PIXELS].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
    return pa.table({"number": rows["number"], "sum": pixels.sum(axis=1)})


def map_rows(rows: pa.Table) -> pa.Table:
    """The worker of both mappings: reads the rows that were not read before."""
    return forward(rows if PIXELS in rows.column_names else read(rows))


class Forward:
    """The actor of Ray Data, which writes the shards like `map_table`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        """Maps and writes a shard; returns the number of its rows."""
        rows = pa.table({"number": shard["number"]})
        values = pa.FixedSizeListArray.from_arrays(pa.array(shard[PIXELS].reshape(-1)), 3 * SIDE * SIDE)
        write_table(self.folder / str(shard["name"]), forward(rows.append_column(PIXELS, values)))
        return {"rows": len(rows)}


def read_shard(table: pa.Table, shard: dict[str, Any]) -> dict[str, Any]:
    """The task of Ray Data: reads the rows of a shard."""
    rows = read(table.slice(shard["first"], shard["rows"]))
    pixels = rows[PIXELS].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
    return {"name": shard["name"], "number": rows["number"].to_numpy(), PIXELS: pixels}


def map_with_ray_data(table: pa.Table, folder: Path) -> None:
    """Reads in tasks of Ray Data and computes in its actors, one per GPU."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    shards = [
        {"name": name, "first": s.first, "rows": s.num_rows} for name, s in shards_of(len(table), SHARD_ROWS).items()
    ]
    actor: Any = Forward
    dataset = (
        ray.data.from_items(shards, override_num_blocks=len(shards))
        .map(functools.partial(read_shard, table), num_cpus=1)
        .map(
            actor,
            fn_constructor_args=(folder,),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=1),
            num_cpus=0,
            num_gpus=1,
        )
    )
    assert sum(row["rows"] for row in dataset.iter_rows()) == len(table)


def digest(folder: Path) -> str:
    """Returns a digest of the names and bytes of all shards."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha256.update(path.name.encode() + path.read_bytes())
    return sha256.hexdigest()


def main() -> None:
    """Maps in all ways in turn, checks that the shards are equal, and prints the ratios of the medians."""
    options = harness.option_parser(__doc__, images=2400, rounds=3).parse_args()
    print(harness.describe_machine())
    table = pa.table({"number": range(options.images)})
    compute = ComputeConfig(gpu=True, shard_rows=SHARD_ROWS)
    digests = set()

    def measure(way: str) -> float:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            start = time.perf_counter()
            if way == "Ray Data":
                map_with_ray_data(table, folder)
            else:
                reading = read if way == "read apart" else None
                map_table(table, folder, worker=map_rows, read=reading, label=way, compute=compute, network=True)
            seconds = time.perf_counter() - start
            digests.add(digest(folder))
        return options.images / seconds

    with cluster():
        sides = {way: functools.partial(measure, way) for way in ("one actor", "read apart", "Ray Data")}
        measured = harness.measure_in_turn(sides, options.rounds)
    assert len(digests) == 1, "the ways wrote different shards"

    medians = harness.print_medians(measured, "images/s")
    print(f"{'limit':10}{1 / FORWARD_SECONDS:10.2f} images/s: the forward passes alone")
    against_ray_data = medians["read apart"] / medians["Ray Data"]
    print(
        f"ratio {against_ray_data:.2f} target 1: images/s of a mapping on GPUs that reads apart, relative to Ray Data"
    )
    ratio = medians["read apart"] / medians["one actor"]
    print(f"ratio {ratio:.2f} target {TARGET}: images/s of a mapping on a GPU that reads on four CPUs of another node")


if __name__ == "__main__":
    main()
