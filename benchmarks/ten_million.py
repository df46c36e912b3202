"""Cost of an index of ten million images: seconds of a rerun that finds everything finished, and the driver's memory.

The rows are synthetic: a Parquet table of ids, splits and 1 to 3 of 200 tags each (`pair_sampling.synthetic_tags`). The
rows share 4000 real JPEGs in turn, with each file's tags. Every row's file is checked, but the kernel has these files'
metadata in memory. For ten million files on a disk or network it would have to read their metadata first.

Each part runs in a separate process. The benchmark reports its wall seconds, its processor seconds, on which other
programs have little influence, and its peak resident memory. The parts `first` and `again` are the command `mcis index
tags`, including Ray, MLflow and the report: `first` finds the checks of the files in the workspace, like the index of a
table that has grown, and writes the index; `again` finds the index finished. The other parts are parts of stages:
`list` reads the table, `keys` computes the contents of the index's key, `checks` stores and finds checks of as many
different synthetic files, `pairs` builds the sampler of the training images' tags and draws a million pairs, and
`relations` draws the related and contrastive images of all maps.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pair_sampling import CLASSES, synthetic_tags

from mcis.datasets.tags import Tags

ROWS = 10_000_000
FILES = 4000
CHUNK = 2**20
"""Rows that are handled at a time."""
SECONDS_TARGET = 60
GIB_TARGET = 3
RELATED = 3
"""Related images per map, the paper's number (`localize.related`)."""
PAIRS = 10**6
NAME = "index-tags"
TABLE_SCHEMA = pa.schema([("image", pa.string()), ("id", pa.string()), ("split", pa.string()), ("tags", pa.string())])


class Measured(NamedTuple):
    """Wall seconds and processor seconds of a part, and the peak resident memory of its process in GiB."""

    wall: float
    processor: float
    gib: float


def write_inputs(folder: Path, rows: int) -> None:
    """Writes the JPEGs, `seen.parquet` with one row per JPEG, and `table.parquet` with all rows."""
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        path = folder / f"photographs/{number // 1000:04d}/photograph_{number:010d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
        paths.append(str(path.relative_to(folder)))
    write_table(folder / "seen.parquet", pa.array(paths), FILES)
    write_table(folder / "table.parquet", pa.array(paths), rows)


def write_table(path: Path, files: pa.Array, rows: int) -> None:
    """Writes a table of images. Every 50th file belongs to val, so that no content is in two splits."""
    tags = synthetic_tags(FILES)
    names = pa.array([f"class {k}" for k in range(CLASSES)])
    tag_lists = pa.ListArray.from_arrays(tags.start.astype(np.int32), names.take(pa.array(tags.values)))
    file_tags = pc.binary_join(tag_lists, ";")
    splits = pa.array(["train", "val"])
    with pq.ParquetWriter(path, TABLE_SCHEMA) as writer:
        for numbers in chunks(rows):
            file_numbers = numbers % len(files)
            is_val = file_numbers % 50 == 0
            columns = {
                "image": files.take(pa.array(file_numbers)),
                "id": pa.array([f"album_{n // 1000:06d}/photograph_{n:010d}" for n in numbers.tolist()]),
                "split": splits.take(pa.array(is_val.astype(np.int8))),
                "tags": file_tags.take(pa.array(file_numbers)),
            }
            writer.write_table(pa.table(columns, schema=TABLE_SCHEMA))


def chunks(rows: int) -> list[NDArray[np.int64]]:
    """Returns the numbers of all rows in chunks."""
    return [np.arange(first, min(first + CHUNK, rows)) for first in range(0, rows, CHUNK)]


def index_command(folder: Path, table: str) -> list[str]:
    """Returns the command `mcis index tags` for a table."""
    words = [sys.executable, "-m", "mcis.platform.cli", "index", "tags", str(folder / table), "--name", NAME]
    return [*words, "--workspace", str(folder / "workspace")]


def measure(command: list[str]) -> Measured:
    """Runs a process. Its output goes to the error stream."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    memory_unit = 1 if sys.platform == "darwin" else 1024
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * memory_unit / 2**30)


def list_rows(folder: Path, rows: int) -> None:
    """Reads the table."""
    from mcis.datasets.sources.tagged import list_tagged

    assert len(list_tagged(folder / "table.parquet").table) == rows


def compute_keys(folder: Path, rows: int) -> None:
    """Computes the contents of the index's key: the digest of the listing, and the stamps of all files."""
    from mcis.datasets.sources.tagged import list_tagged
    from mcis.datasets.tables.large_tables import table_digest
    from mcis.platform.runs.files import file_stamps

    table = list_tagged(folder / "table.parquet").table
    table_digest([table])
    file_stamps(table["uri"])


def store_and_find_checks(folder: Path, rows: int) -> None:
    """Stores checks of synthetic files, as many at a time as the index does, and finds all of them."""
    from mcis.datasets.tables.large_tables import take_rows
    from mcis.platform.runs.image_checks import STORED_CHECK_SCHEMA, StoredChecks, store_checks
    from mcis.platform.runs.workspace import Workspace

    workspace = Workspace(folder / "checks")
    file_parts = []
    for numbers in chunks(rows):
        count = len(numbers)
        columns = {
            "uri": pa.array([f"{folder}/album_{n // 1000:06d}/photograph_{n:010d}.jpg" for n in numbers.tolist()]),
            "size": pa.array(numbers * 7 + 1),
            "changed": pa.array(numbers * 10**9),
            "height": pa.repeat(pa.scalar(480, pa.int32()), count),
            "width": pa.repeat(pa.scalar(640, pa.int32()), count),
            "content_hash": pa.array([content_hash(n) for n in numbers.tolist()]),
            "reason": pa.nulls(count, pa.string()),
        }
        for field in STORED_CHECK_SCHEMA:
            columns.setdefault(field.name, pa.nulls(count, field.type))
        checks = pa.table(columns, schema=STORED_CHECK_SCHEMA)
        store_checks(workspace, checks)
        file_parts.append(checks.select(["uri", "size", "changed"]))

    stored = StoredChecks(workspace)
    positions = stored.find(pa.concat_tables(file_parts))
    step = max(1, rows // 1000)
    found = take_rows(stored.checks, positions[::step])["content_hash"].to_pylist()
    assert sorted(found) == [content_hash(number) for number in range(0, rows, step)]


def content_hash(number: int) -> str:
    """Returns the content hash of a synthetic file."""
    return f"{number:064x}"


def read_tags(folder: Path) -> tuple[Tags, NDArray[np.bool_]]:
    """Returns the tags of the index's training images, and whether each image is from the source domain."""
    from mcis.platform.outputs.read_index import from_source_domain, split_rows
    from mcis.platform.runs.workspace import Workspace

    index = Workspace(folder / "workspace", create=False).outputs(NAME)["index"] / "index.parquet"
    rows = split_rows(index, "train", tagged=True, columns=["tags", "domain"])
    return Tags.from_index(rows["tags"], CLASSES), from_source_domain(rows)


def draw_pairs(folder: Path, rows: int) -> None:
    """Builds the sampler of pairs and draws a million pairs."""
    from mcis.datasets.sampling.pairs import PairSampler

    tags, _ = read_tags(folder)
    sampler = PairSampler(tags, seed=0)
    for first in range(0, PAIRS, 4096):
        sampler.rows(first, first + 4096)


def draw_relations(folder: Path, rows: int) -> None:
    """Draws the related and contrastive images of all maps."""
    from mcis.datasets.sampling.related_images import draw_related_images

    tags, is_source = read_tags(folder)
    draw_related_images(tags, is_source, seed=0, related=RELATED, contrastive=True)


PARTS: dict[str, Callable[[Path, int], None]] = {
    "list": list_rows,
    "keys": compute_keys,
    "checks": store_and_find_checks,
    "pairs": draw_pairs,
    "relations": draw_relations,
}
STEPS = ("list", "keys", "checks", "first", "again", "pairs", "relations")
"""All parts in their order. `first` and `again` are the command."""


def main() -> None:
    """Writes the table, runs the parts in turn and prints what each took."""
    parser = harness.option_parser(__doc__, rows=ROWS)
    parser.add_argument("--folder", type=Path, help="folder of the table, which is written if missing [temporary]")
    parser.add_argument("--only", nargs="+", default=STEPS, choices=STEPS, help="parts to run [all]")
    parser.add_argument("--part", choices=PARTS, help="run one part in this process")
    options = parser.parse_args()
    if options.part:
        PARTS[options.part](options.folder, options.rows)
        return

    print(harness.describe_machine())
    measured = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "table.parquet").exists():
            write_inputs(folder, options.rows)
        measure(index_command(folder, "seen.parquet"))  # stores the checks of the files

        this_script = [sys.executable, __file__, "--folder", str(folder), "--rows", str(options.rows)]
        for name in options.only:
            command = [*this_script, "--part", name] if name in PARTS else index_command(folder, "table.parquet")
            part = measure(command)
            measured[name] = part
            print(f"{name:10}{part.wall:8.1f} s wall {part.processor:8.1f} s processor {part.gib:6.2f} GiB", flush=True)

    images = f"{options.rows / 1e6:g} M images"
    if "again" in measured:
        wall = measured["again"].wall
        print(f"ratio {wall:.0f} target at most {SECONDS_TARGET}: time to rerun a finished index of {images}, seconds")
    peak = max(part.gib for part in measured.values())
    print(f"ratio {peak:.2f} target at most {GIB_TARGET}: peak memory of the driver with {images}, GiB")


if __name__ == "__main__":
    main()
