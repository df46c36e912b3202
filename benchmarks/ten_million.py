"""What an index of ten million images takes: seconds of a rerun that finds all done, and the driver's memory.

The rows are made up: a Parquet table of ids, splits and 1 to 3 of 200 tags each (`pairs.synthetic`). No row has a
picture of its own: the table names 4000 real JPEGs in turn, each with its tags. So a file is looked at for every row,
by names that the kernel has in memory; of ten million files on a disk or a network it first has to fetch what it knows
of them.

Each part is a process of its own; of that are wall seconds, processor seconds, which other programs on the machine
change little, and the peak of resident memory. `first` and `again` are the command `mcis index tags`, Ray, MLflow and
report included: `first` finds the verdicts on the files in the workspace, as the index of a grown table does, and
writes the index; `again` finds it finished. The others are what later stages call: `list` reads the table, `keys`
computes what the index's key is made of, `verdicts` keeps and finds verdicts on as many different made-up files,
`pairs` builds the sampler of the training images' tags and draws a million pairs, `relations` draws the related and
the contrastive images of all maps.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pairs import CLASSES, synthetic

ROWS, FILES, CHUNK = 10_000_000, 4000, 2**20
SECONDS_TARGET, GIB_TARGET = 60, 3
RELATED = 3
"""Related images of a map, as the paper has it (`localize.related`)."""
NAME = "index-tags"


class Measured(NamedTuple):
    """Wall seconds of a part, processor seconds, and the peak of its process's resident memory, GiB."""

    wall: float
    processor: float
    gib: float


def make(folder: Path, rows: int) -> None:
    """Writes the stand-ins' files, `seen.parquet` with a row of each, and `table.parquet` with all rows."""
    from PIL import Image

    pixels, places = np.random.default_rng(0), []
    for number in range(FILES):
        path = folder / f"photographs/{number // 1000:04d}/photograph_{number:010d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
        places.append(str(path.relative_to(folder)))
    names, files = pa.array([f"class {k}" for k in range(CLASSES)]), pa.array(places)
    write(folder / "seen.parquet", names, files, FILES)
    write(folder / "table.parquet", names, files, rows)


def write(path: Path, names: pa.Array, files: pa.Array, rows: int) -> None:
    """A table of image, id, split and tags; every 50th file is in val, so that no content is in two splits."""
    tags = synthetic(FILES)
    of_file = pc.binary_join(
        pa.ListArray.from_arrays(tags.start.astype(np.int32), names.take(pa.array(tags.values))), ";"
    )
    schema = pa.schema([("image", pa.string()), ("id", pa.string()), ("split", pa.string()), ("tags", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, CHUNK):
            numbers = np.arange(first, min(first + CHUNK, rows))
            file = pa.array(numbers % len(files))
            splits = pa.array(["train", "val"]).take(pa.array((numbers % len(files) % 50 == 0).astype(np.int8)))
            ids = pa.array([f"album_{n // 1000:06d}/photograph_{n:010d}" for n in numbers.tolist()])
            writer.write_table(pa.table([files.take(file), ids, splits, of_file.take(file)], schema=schema))


def command(folder: Path, table: str) -> list[str]:
    """The words of `mcis index tags`."""
    words = [sys.executable, "-m", "mcis.platform.cli", "index", "tags", str(folder / table), "--name", NAME]
    return [*words, "--workspace", str(folder / "workspace")]


def measure(words: list[str]) -> Measured:
    """Runs a process; its output goes to the error stream."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    unit = 1 if sys.platform == "darwin" else 1024
    wall = time.perf_counter() - began
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 2**30)


def list_rows(folder: Path, rows: int) -> None:
    """Reads the table."""
    from mcis.datasets.sources.tagged import list_tagged

    assert len(list_tagged(folder / "table.parquet").table) == rows


def keys(folder: Path, rows: int) -> None:
    """Computes what the index's key is made of: the listing, and the stamp of every file."""
    from mcis.datasets.sources.tagged import list_tagged
    from mcis.datasets.tables.large_tables import table_digest
    from mcis.platform.runs.files import file_stamps

    table = list_tagged(folder / "table.parquet").table
    table_digest([table])
    file_stamps(table["uri"])


def verdicts(folder: Path, rows: int) -> None:
    """Keeps verdicts on made-up files, as many at a time as the index does, and finds them all."""
    from mcis.datasets.tables.large_tables import take_rows
    from mcis.platform.runs.image_checks import VERDICT_SCHEMA, KeptVerdicts, keep_verdicts
    from mcis.platform.runs.workspace import Workspace

    workspace = Workspace(folder / "verdicts")
    parts = []
    for first in range(0, rows, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, rows))
        of_number = [f"{number:064x}" for number in numbers.tolist()]
        columns = {
            "uri": pa.array([f"{folder}/album_{n // 1000:06d}/photograph_{n:010d}.jpg" for n in numbers.tolist()]),
            "size": pa.array(numbers * 7 + 1),
            "changed": pa.array(numbers * 10**9),
            "height": pa.repeat(pa.scalar(480, pa.int32()), len(numbers)),
            "width": pa.repeat(pa.scalar(640, pa.int32()), len(numbers)),
            "content_hash": pa.array(of_number),
            "reason": pa.nulls(len(numbers), pa.string()),
        }
        made = pa.table(columns, schema=VERDICT_SCHEMA)
        keep_verdicts(workspace, made)
        parts.append(made.select(["uri", "size", "changed"]))
    files = pa.concat_tables(parts)
    kept = KeptVerdicts(workspace)
    found = kept.find(files)
    assert sorted(take_rows(kept.verdicts, found[:: max(1, rows // 1000)])["content_hash"].to_pylist()) == [
        f"{number:064x}" for number in range(0, rows, max(1, rows // 1000))
    ]


def _tags(folder: Path) -> tuple[Any, Any]:
    """The tags of the training images of the index, and which of them are of the domain source."""
    from mcis.datasets.tags import Tags
    from mcis.platform.outputs.read_index import from_source_domain, split_rows
    from mcis.platform.runs.workspace import Workspace

    file = Workspace(folder / "workspace", create=False).outputs(NAME)["index"] / "index.parquet"
    rows = split_rows(file, "train", tagged=True, columns=["tags", "domain"])
    return Tags.from_index(rows["tags"], CLASSES), from_source_domain(rows)


def pairs(folder: Path, rows: int) -> None:
    """Builds the sampler of pairs and draws a million."""
    from mcis.datasets.sampling.pairs import PairSampler

    sampler = PairSampler(_tags(folder)[0], seed=0)
    for first in range(0, 10**6, 4096):
        sampler.rows(first, first + 4096)


def relations(folder: Path, rows: int) -> None:
    """Draws the images that all maps are made of."""
    from mcis.datasets.sampling.related_images import draw_related_images

    tags, source = _tags(folder)
    draw_related_images(tags, source, seed=0, related=RELATED, contrastive=True)


PARTS: dict[str, Callable[[Path, int], None]] = {
    "list": list_rows,
    "keys": keys,
    "verdicts": verdicts,
    "pairs": pairs,
    "relations": relations,
}


STEPS = ("list", "keys", "verdicts", "first", "again", "pairs", "relations")
"""All parts, in their order; those that PARTS lacks are the command."""


def main() -> None:
    """Makes the table, runs the parts in turn and prints what each took."""
    parser = machine.arguments(__doc__, rows=ROWS)
    parser.add_argument("--folder", type=Path, help="where the table is or will be made; kept, unless it is none")
    parser.add_argument("--only", nargs="+", default=STEPS, choices=STEPS, help="parts that are run; default: all")
    parser.add_argument("--part", choices=PARTS, help="of the script itself: one part, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](arguments.folder, arguments.rows)
        return
    print(machine.describe())
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "table.parquet").exists():
            make(folder, arguments.rows)
        itself = [sys.executable, __file__, "--folder", str(folder), "--rows", str(arguments.rows), "--part"]
        measure(command(folder, "seen.parquet"))  # keeps the verdicts on the files
        measured = {}
        for name in arguments.only:
            measured[name] = part = measure([*itself, name] if name in PARTS else command(folder, "table.parquet"))
            print(f"{name:10}{part.wall:8.1f} s wall {part.processor:8.1f} s processor {part.gib:6.2f} GiB", flush=True)
    if "again" in measured:
        wall = measured["again"].wall
        print(f"ratio {wall:.0f} target at most {SECONDS_TARGET}: seconds of a rerun of a finished index of 10 M")
    most = max(part.gib for part in measured.values())
    print(f"ratio {most:.2f} target at most {GIB_TARGET}: GiB of the driver in each part with 10 M images")


if __name__ == "__main__":
    main()
