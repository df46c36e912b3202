"""Tables of a run -> PNG files: localization maps with overlays, pseudo masks, predictions."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from mcis.datasets.classes import palette
from mcis.datasets.errors import UserError
from mcis.datasets.images import read_rgb
from mcis.datasets.index import shown
from mcis.datasets.maps import Shards
from mcis.datasets.sources.lists import name_below
from mcis.models.localization import score_maps
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import heat_picture
from mcis.platform.runs.progress import bar
from mcis.platform.runs.read_index import open_index
from mcis.platform.runs.workspace import Workspace, written_aside

TABLES: dict[str, tuple[str, str]] = {
    "maps": ("localize", "maps"),
    "masks": ("pseudo_masks", "masks"),
    "predictions": ("predict", "predictions"),
}
"""What is exported: the stage, and its table."""
_AT_ONCE = 4
"""Threads that write pictures."""


def export(workspace: Workspace, name: str, what: str, out: Path) -> int:
    """Writes the pictures of a run below `out`, by image id, and returns how many there are.

    Maps: `<id>/<class>.png`, 8-bit gray at the image's size, each map clipped at 0 and divided by its maximum, for any
    `maps.scale`, and `<id>/<class>.overlay.jpg`. Masks (255 = ignore) and predictions (after the CRF where there is
    one): `<id>.png`, palette PNGs; `labels.csv` says which label is which class, and its color. Beside masks `cues.csv`
    says of each image which background cue its mask was made with.

    Raises:
        UserError: `what` is none of TABLES, the run has not come so far, or an image id would lead out of the folder.
    """
    if what not in TABLES:
        raise UserError(f"export {what}", f"one of {', '.join(TABLES)}", "choose one of them")
    index = open_index(workspace, name)
    table = _table(workspace, name, what)
    rows = {row["image_id"]: row for row in index.index.select(["image_id", "uri", "height", "width"]).to_pylist()}
    outside = [image_id for image_id in rows if name_below(image_id) is None]
    if outside:
        raise UserError(
            f"image id(s) that lead out of {out}: {shown(outside)}",
            "relative names",
            "correct the ids of the data set",
        )
    if what == "maps":
        shards = Shards(table)
        return _write_all(
            (rows[image_id] for image_id in shards),
            lambda row: _write_maps(shards, row, index.classes, out),
            label=f"export {what}",
            total=len(shards.shard_of),
        )
    write_bytes(out / "labels.csv", labels_table(index.classes).encode())
    files = sorted(table.glob("part-*.parquet"))
    if what == "masks":
        write_bytes(out / "cues.csv", _cues_table(files).encode())
    return _write_all(
        (row for file in files for row in _labels(pq.read_table(file), what)),
        lambda row: _write_labels(row, out),
        label=f"export {what}",
        total=sum(pq.read_metadata(file).num_rows for file in files),
    )


def _table(workspace: Workspace, name: str, what: str) -> Path:
    """The folder of the table that is exported."""
    stage, table = TABLES[what]
    reached = workspace.outputs(name)
    if stage not in reached:
        raise UserError(
            f"run {name!r} has no {what}: it has come to {shown(list(reached))}",
            f"a run that has passed the stage {stage}",
            f"repeat the run's command with --until {stage}, or without --until",
        )
    return reached[stage] / table


def _write_all(
    rows: Iterable[dict[str, Any]], write: Callable[[dict[str, Any]], int], *, label: str, total: int
) -> int:
    """Writes the pictures of all rows, some at once; returns how many `write` says it wrote."""
    written = 0
    with bar(label, total, "images") as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        for done, count in enumerate(pool.map(write, rows), 1):
            written += count
            progress.update(done)
    return written


def _labels(table: pa.Table, what: str) -> Iterator[dict[str, Any]]:
    for row in table.to_pylist():
        png = row["mask"] if what == "masks" else row["crf"] or row["plain"]
        yield {"image_id": row["image_id"], "png": png}


def labels_table(classes: Sequence[str]) -> str:
    """label,class,red,green,blue: background is 0, class index k is k + 1, 255 is ignored."""
    text, colors = io.StringIO(), palette()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["label", "class", "red", "green", "blue"])
    for label, name in [(0, "background"), *enumerate(classes, 1), (255, "ignore")]:
        lines.writerow([label, name, *colors[label].tolist()])
    return text.getvalue()


def _cues_table(files: Iterable[Path]) -> str:
    """image,cue: of each pseudo mask."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["image", "cue"])
    for file in files:
        lines.writerows(row.values() for row in pq.read_table(file, columns=["image_id", "cue"]).to_pylist())
    return text.getvalue()


def _write_labels(row: dict[str, Any], out: Path) -> int:
    write_bytes(out / f"{name_below(row['image_id'])}.png", row["png"])
    return 1


def _write_maps(shards: Shards, row: dict[str, Any], classes: tuple[str, ...], out: Path) -> int:
    image_maps = shards.maps(row["image_id"])
    assert image_maps is not None, f"no localization map of {row['image_id']} in its own table"
    activations = torch.from_numpy(image_maps.maps)
    maps = score_maps(activations, image_maps.grids, "maximum", row["height"], row["width"]).numpy()
    image = Image.fromarray(read_rgb(row["uri"]))
    folder = out / str(name_below(row["image_id"]))
    for k, heat in zip(image_maps.classes.tolist(), maps, strict=True):
        name = classes[k].replace("/", "_")
        gray = BytesIO()
        Image.fromarray((heat * 255).round().astype(np.uint8)).save(gray, "PNG")
        write_bytes(folder / f"{name}.png", gray.getvalue())
        write_bytes(folder / f"{name}.overlay.jpg", encode(heat_picture(image, [(classes[k], heat)], classes), "JPEG"))
    return len(maps)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with written_aside(path) as aside:
        aside.write_bytes(content)
