"""Images per second that the index verifies, and how much faster it is when nothing has changed.

The limit, measured in turn: reading, decoding and hashing the same files in as many processes as there are cores. The
index is the stage itself, in a Ray that is up, from the listing to the written tables; each first run has its own
workspace.
"""

import hashlib
import tempfile
import time
from pathlib import Path

import machine
import photos
import pyarrow as pa
import pyarrow.parquet as pq

from mcis.datasets.images.decode import decode_picture
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.workspace import Workspace


def bare(paths: list[str]) -> float:
    """Seconds of reading, decoding and hashing all files."""
    with machine.processes() as pool:
        began = time.perf_counter()
        for _ in pool.imap_unordered(_verify, [paths[i : i + 64] for i in range(0, len(paths), 64)]):
            pass
        return time.perf_counter() - began


def _verify(paths: list[str]) -> list[str]:
    out = []
    for path in paths:
        data = Path(path).read_bytes()
        decode_picture(data)
        out.append(hashlib.sha256(data).hexdigest())
    return out


def indexed(table: Path, workspace: Path) -> float:
    """Seconds of the stage index, its listing included, as the run records them."""
    resolved = resolve("tags", "paper", {"data.tags.table": str(table)})
    result = pipeline.run(resolved, Workspace(workspace), "index", until="index")
    return result.context.seconds["index"]


def main() -> None:
    """Measures the sides in turn and prints the ratios of their medians."""
    arguments = machine.arguments(__doc__, images=5000, rounds=3).parse_args()
    print(machine.describe())
    measured: dict[str, list[float]] = {"bare": [], "first": [], "again": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = photos.make(Path(folder) / "images", arguments.images)
        table = Path(folder) / "tags.parquet"
        pq.write_table(pa.table({"image": paths, "tags": [[f"class {i % 20}"] for i in range(len(paths))]}), table)
        resolved = resolve("tags", "paper", {"data.tags.table": str(table)})
        with ray_session(resolved.config.compute):
            indexed(table, Path(folder) / "warm-up")  # Ray starts its processes at the first task
            for number in range(arguments.rounds):
                workspace = Path(folder) / f"workspace{number}"
                measured["bare"].append(bare(paths))
                measured["first"].append(indexed(table, workspace))
                measured["again"].append(indexed(table, workspace))
    print(f"{arguments.images} JPEGs of {photos.WIDTH}x{photos.HEIGHT}")
    medians = machine.medians(measured, "s", images=arguments.images)
    print(f"ratio {medians['first'] / medians['again']:.1f} target 20: an unchanged index, times faster than the first")
    rate = medians["bare"] / medians["first"]
    print(f"ratio {rate:.2f} target 0.7: images/s of the index, of bare reading and decoding")


if __name__ == "__main__":
    main()
