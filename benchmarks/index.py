"""Images per second that the index verifies, and its speed if nothing has changed.

The upper limit, measured in turn, is reading, decoding and hashing the same files in one process per core. The index is
the stage itself in a running Ray, from listing the files to the written tables. Each first run has a new workspace.
"""

import hashlib
import tempfile
import time
from pathlib import Path

import harness
import jpeg_files
import pyarrow as pa
import pyarrow.parquet as pq

from mcis.datasets.images.decode import decode_picture
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.workspace import Workspace

TARGET_UNCHANGED = 20
TARGET_FIRST = 0.7
CHUNK = 64


def plain_seconds(paths: list[str]) -> float:
    """Measures reading, decoding and hashing all files."""
    chunks = [paths[first : first + CHUNK] for first in range(0, len(paths), CHUNK)]
    with harness.process_pool() as pool:
        start = time.perf_counter()
        for _ in pool.imap_unordered(_verify, chunks):
            pass
        return time.perf_counter() - start


def _verify(paths: list[str]) -> list[str]:
    hashes = []
    for path in paths:
        data = Path(path).read_bytes()
        decode_picture(data)
        hashes.append(hashlib.sha256(data).hexdigest())
    return hashes


def index_seconds(table: Path, workspace: Path) -> float:
    """Runs the stage `index` and returns the seconds that the run records, including listing the files."""
    resolved = resolve("tags", "paper", {"data.tags.table": str(table)})
    result = pipeline.run(resolved, Workspace(workspace), "index", until="index")
    return result.context.seconds["index"]


def main() -> None:
    """Measures the sides in turn and prints the ratios of their medians."""
    options = harness.option_parser(__doc__, images=5000, rounds=3).parse_args()
    print(harness.describe_machine())
    measured: dict[str, list[float]] = {"plain": [], "first": [], "unchanged": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = jpeg_files.write_jpegs(folder / "images", options.images)
        table = folder / "tags.parquet"
        tags = [[f"class {number % 20}"] for number in range(len(paths))]
        pq.write_table(pa.table({"image": paths, "tags": tags}), table)
        resolved = resolve("tags", "paper", {"data.tags.table": str(table)})
        with ray_session(resolved.config.compute):
            index_seconds(table, folder / "warm-up")  # Ray starts its processes at the first task
            for number in range(options.rounds):
                workspace = folder / f"workspace{number}"
                measured["plain"].append(plain_seconds(paths))
                measured["first"].append(index_seconds(table, workspace))
                measured["unchanged"].append(index_seconds(table, workspace))

    print(f"{options.images} JPEGs of {jpeg_files.WIDTH}x{jpeg_files.HEIGHT}")
    medians = harness.print_medians(measured, "s", images=options.images)
    speedup = medians["first"] / medians["unchanged"]
    print(f"ratio {speedup:.1f} target {TARGET_UNCHANGED}: an unchanged index, times faster than the first")
    rate = medians["plain"] / medians["first"]
    print(f"ratio {rate:.2f} target {TARGET_FIRST}: images/s of the index, relative to plain reading and decoding")


if __name__ == "__main__":
    main()
