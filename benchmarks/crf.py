"""Pseudo masks per second of the stage with the dense CRF, relative to pydensecrf in plain processes.

The plain processes, one per core, decode each image, resize its maps, run pydensecrf for both background thresholds and
encode the labels. The stage's worker does the same in the tasks of a running Ray, from rows of the index to written
shards. Both sides use the recipe's parameters, and their labels are compared.
"""

import functools
import io
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import harness
import jpeg_files
import numpy as np
import pyarrow as pa
import pydensecrf.densecrf as pydensecrf
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.grids import pixel_grid
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import ray_session
from mcis.platform.outputs.tables import map_rows
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.stages.pseudo_masks.making import MakeMasks

TARGET = 0.95
SIDE = 24
"""Side of the maps in positions."""
SHARD_ROWS = 4
CERTAINTY = 0.7
"""Probability of each pixel's initial label."""
CLASSES = 20
TAGS = (3, 7)


class Row(NamedTuple):
    """An image file and its maps of TAGS, (2, SIDE, SIDE)."""

    path: str
    maps: NDArray[np.float32]


def draw_maps(rng: np.random.Generator) -> NDArray[np.float32]:
    """Draws a map in [0, 1] with one maximum for each tag, (2, SIDE, SIDE)."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    center_y, center_x = rng.random((2, 2, 1, 1))
    maps = np.exp(-((y - center_y) ** 2 + (x - center_x) ** 2) / 0.05)
    return maps.astype(np.float16).astype(np.float32)


def build_config() -> Config:
    """Returns the configuration with the dense CRF as rule and maps that are scores already."""
    overrides = ["pseudo_masks.rule=crf", "maps.scale=maximum", f"compute.shard_rows={SHARD_ROWS}"]
    return resolve("voc", "scratch", overrides=overrides).config


def run_plain(rows: list[Row]) -> tuple[float, list[bytes]]:
    """Runs the plain processes. Returns their seconds and the labels of each image as PNG."""
    with harness.process_pool() as pool:
        start = time.perf_counter()
        labels = list(pool.imap(_make_mask, rows))
        return time.perf_counter() - start, labels


def _make_mask(row: Row) -> bytes:
    torch.set_num_threads(1)
    config = build_config().pseudo_masks
    rgb = np.array(Image.open(io.BytesIO(Path(row.path).read_bytes())).convert("RGB"))
    height, width = rgb.shape[:2]
    maps = torch.from_numpy(row.maps)[None]
    resized = functional.interpolate(maps, (height, width), mode="bicubic")[0].numpy().clip(0)
    scores = resized / resized.max(axis=(1, 2), keepdims=True)

    foreground = _refine(rgb, scores, config.threshold)
    background = _refine(rgb, scores, config.background_threshold)
    mask = np.where(foreground > 0, foreground, np.where(background == 0, 0, 255)).astype(np.uint8)
    encode_labels(mask)
    return encode_labels(foreground)


def _refine(rgb: NDArray[np.uint8], scores: NDArray[np.float32], threshold: float) -> NDArray[np.uint8]:
    """Refines the labels that scores (2, H, W) have at a background threshold."""
    parameters = build_config().pseudo_masks.crf
    height, width = rgb.shape[:2]
    background = np.full((1, height, width), threshold, np.float32)
    winners = np.concatenate([background, scores]).argmax(axis=0)
    is_winner = np.arange(3)[:, None] == winners.ravel()
    unary = np.where(is_winner, -np.log(CERTAINTY), -np.log((1 - CERTAINTY) / 2))

    crf = pydensecrf.DenseCRF2D(width, height, 3)
    crf.setUnaryEnergy(unary.astype(np.float32))
    crf.addPairwiseGaussian(sxy=parameters.position_std, compat=parameters.position_weight)
    crf.addPairwiseBilateral(
        sxy=parameters.bilateral_std, srgb=parameters.color_std, rgbim=rgb, compat=parameters.bilateral_weight
    )
    refined = np.asarray(crf.inference(parameters.iterations)).argmax(axis=0).reshape(height, width)
    labels = np.array([0, *(tag + 1 for tag in TAGS)], np.uint8)
    return labels[refined]


def run_stage(table: pa.Table, maps: Path, out: Path) -> tuple[float, list[bytes]]:
    """Runs the stage's mapping. Returns its seconds and the labels of each image as PNG."""
    config = build_config()
    start = time.perf_counter()
    make_worker = functools.partial(MakeMasks, config, CLASSES, Shards(maps), None, False)
    map_table(table, out, make_worker=make_worker, label="pseudo masks", compute=config.compute, shard_rows=SHARD_ROWS)
    seconds = time.perf_counter() - start
    labels = read_table(out)["labels"].to_pylist()
    shutil.rmtree(out)
    return seconds, labels


def write_maps(folder: Path, maps: list[NDArray[np.float32]]) -> None:
    """Writes the maps of all images as the stage `localize` does. Image ids are the images' numbers."""
    count = len(maps)
    ids = [str(number) for number in range(count) for _ in TAGS]
    grid = pixel_grid(SIDE)
    shard = folder / f"part-{0:08d}-{count:08d}.parquet"
    write_table(shard, map_rows(ids, list(TAGS) * count, np.concatenate(maps), grid))


def index_rows(paths: list[str]) -> pa.Table:
    """Returns the columns of an index that the stage reads."""
    count = len(paths)
    files = jpeg_files.file_rows(paths)
    return pa.table(
        {
            "image_id": [str(number) for number in range(count)],
            "tags": [list(TAGS)] * count,
            "is_negative": [False] * count,
            "width": [jpeg_files.WIDTH] * count,
            "height": [jpeg_files.HEIGHT] * count,
            "uri": files["uri"],
            "content_hash": files["content_hash"],
            "saliency_uri": pa.nulls(count, pa.string()),
        }
    )


def agreement(labels: list[bytes], expected: list[bytes]) -> float:
    """Returns the mean fraction of pixels with the same label."""
    fractions = []
    for png, expected_png in zip(labels, expected, strict=True):
        fractions.append((decode_labels(png) == decode_labels(expected_png)).mean())
    return float(np.mean(fractions))


def main() -> None:
    """Measures both sides in turn and prints the ratio of their medians."""
    options = harness.option_parser(__doc__, images=48, rounds=3).parse_args()
    print(harness.describe_machine())
    measured: dict[str, list[float]] = {"plain": [], "stage": []}
    agreements = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = jpeg_files.write_jpegs(folder / "images", options.images)
        maps = [draw_maps(np.random.default_rng([0, number])) for number in range(options.images)]
        write_maps(folder / "maps", maps)
        table = index_rows(paths)
        rows = [Row(path, image_maps) for path, image_maps in zip(paths, maps, strict=True)]
        with ray_session(build_config().compute):
            run_stage(table.slice(0, 4 * SHARD_ROWS), folder / "maps", folder / "warm-up")
            for number in range(options.rounds):
                seconds, expected = run_plain(rows)
                measured["plain"].append(seconds)
                seconds, labels = run_stage(table, folder / "maps", folder / f"masks{number}")
                measured["stage"].append(seconds)
                agreements.append(agreement(labels, expected))

    print(f"{options.images} JPEGs of {jpeg_files.WIDTH}x{jpeg_files.HEIGHT}, two CRFs of 3 labels each")
    medians = harness.print_medians(measured, "s", images=options.images)
    print(f"equal labels: {100 * min(agreements):.3f} % of the pixels")
    ratio = medians["plain"] / medians["stage"]
    print(f"ratio {ratio:.2f} target {TARGET}: pseudo masks/s with the dense CRF, relative to plain processes")


if __name__ == "__main__":
    main()
