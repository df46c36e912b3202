"""Pseudo masks a second by the dense CRF, as the stage maps images in parallel, of bare pydensecrf processes.

Bare processes, as many as cores, decode each image, resize its maps, run pydensecrf for both background thresholds and
encode the labels. The stage's worker does the same in the tasks of a Ray that is up, from rows of the index to written
shards. Both sides have the recipe's parameters, and their labels are compared.
"""

import functools
import io
import shutil
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import photos
import pyarrow as pa
import pydensecrf.densecrf as pydensecrf
import torch
from PIL import Image
from torch.nn import functional

from mcis.datasets.images.decode import decode_labels, encode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.grids import Grid
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import ray_session
from mcis.platform.outputs.tables import map_rows
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.stages.pseudo_masks import MakeMasks

TARGET = 0.95
SIDE, SHARD = 24, 4
CERTAINTY = 0.7
CLASSES = 20
Row = tuple[str, np.ndarray, np.ndarray]


def drawn_maps(rng: np.random.Generator) -> np.ndarray:
    """Maps of two tags, (2, SIDE, SIDE) in [0, 1]: a bump each."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    centers = rng.random((2, 2, 1, 1))
    return np.exp(-((y - centers[0]) ** 2 + (x - centers[1]) ** 2) / 0.05).astype(np.float16).astype(np.float32)


def configured() -> Config:
    """The recipe's configuration, with masks by the dense CRF and maps that are scores as they are."""
    overrides = ["pseudo_masks.rule=crf", "maps.scale=maximum", f"compute.shard_rows={SHARD}"]
    return resolve("voc", "scratch", overrides=overrides).config


def bare(rows: list[Row]) -> tuple[float, list[bytes]]:
    """Seconds of the bare processes, and the labels of each image as PNG."""
    with machine.processes() as pool:
        began = time.perf_counter()
        labels = list(pool.imap(_mask, rows))
        return time.perf_counter() - began, labels


def _mask(row: Row) -> bytes:
    torch.set_num_threads(1)
    config, (path, tags, maps) = configured().pseudo_masks, row
    p = config.crf
    rgb = np.array(Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB"))
    height, width = rgb.shape[:2]
    resized = functional.interpolate(torch.from_numpy(maps)[None], (height, width), mode="bicubic")[0].numpy().clip(0)
    scores = resized / resized.max(axis=(1, 2), keepdims=True)
    refined = []
    for background in (config.threshold, config.background_threshold):
        winners = np.concatenate([np.full((1, height, width), background, np.float32), scores]).argmax(axis=0)
        unary = np.where(np.arange(3)[:, None] == winners.ravel(), -np.log(CERTAINTY), -np.log((1 - CERTAINTY) / 2))
        crf = pydensecrf.DenseCRF2D(width, height, 3)
        crf.setUnaryEnergy(unary.astype(np.float32))
        crf.addPairwiseGaussian(sxy=p.position_std, compat=p.position_weight)
        crf.addPairwiseBilateral(sxy=p.bilateral_std, srgb=p.color_std, rgbim=rgb, compat=p.bilateral_weight)
        winners = np.asarray(crf.inference(p.iterations)).argmax(axis=0).reshape(height, width)
        refined.append(np.array([0, *(tags + 1)], np.uint8)[winners])
    mask = np.where(refined[0] > 0, refined[0], np.where(refined[1] == 0, 0, 255)).astype(np.uint8)
    encode_labels(mask)
    return encode_labels(refined[0])


def stage(table: pa.Table, maps: Path, out: Path) -> tuple[float, list[bytes]]:
    """Seconds of the stage's mapping, and the labels of each image as PNG."""
    config = configured()
    began = time.perf_counter()
    make_worker = functools.partial(MakeMasks, config, CLASSES, Shards(maps), None, False)
    map_table(table, out, make_worker=make_worker, label="pseudo masks", compute=config.compute, shard_rows=SHARD)
    seconds = time.perf_counter() - began
    labels = read_table(out)["labels"].to_pylist()
    shutil.rmtree(out)
    return seconds, labels


def main() -> None:
    """Measures both sides in turn and prints the ratio of their medians."""
    given = machine.arguments(__doc__, images=48, rounds=3).parse_args()
    print(machine.describe())
    measured: dict[str, list[float]] = {"bare": [], "stage": []}
    agreement = []
    with tempfile.TemporaryDirectory() as folder:
        paths = photos.make(Path(folder) / "images", given.images)
        ids = [str(number) for number in range(given.images)]
        maps = [drawn_maps(np.random.default_rng([0, number])) for number in range(given.images)]
        tags = np.array([3, 7])
        repeated = [image_id for image_id in ids for _ in tags]
        grid = Grid(0.5 / SIDE, 1 / SIDE, SIDE)
        shard = Path(folder) / "maps" / f"part-{0:08d}-{given.images:08d}.parquet"
        write_table(shard, map_rows(repeated, tags.tolist() * given.images, np.concatenate(maps), grid))
        columns = {"image_id": ids, "tags": [tags.tolist()] * given.images}
        columns |= {"width": [photos.WIDTH] * given.images, "height": [photos.HEIGHT] * given.images}
        read = {name: photos.rows(paths)[name] for name in ("uri", "content_hash")}
        table = pa.table(columns | read | {"saliency_uri": pa.nulls(given.images, pa.string())})
        with ray_session(configured().compute):
            stage(table.slice(0, 4 * SHARD), shard.parent, Path(folder) / "warm-up")
            for number in range(given.rounds):
                seconds, expected = bare([(path, tags, of) for path, of in zip(paths, maps, strict=True)])
                measured["bare"].append(seconds)
                seconds, labels = stage(table, shard.parent, Path(folder) / f"masks{number}")
                measured["stage"].append(seconds)
                pairs = [(decode_labels(a), decode_labels(b)) for a, b in zip(labels, expected, strict=True)]
                agreement.append(float(np.mean([(a == b).mean() for a, b in pairs])))
    print(f"{given.images} JPEGs of {photos.WIDTH}x{photos.HEIGHT}, two CRFs of 3 labels each")
    medians = machine.medians(measured, "s", images=given.images)
    print(f"labels that are the same: {100 * min(agreement):.3f} % of the pixels")
    ratio = medians["bare"] / medians["stage"]
    print(f"ratio {ratio:.2f} target {TARGET}: pseudo masks/s by the dense CRF, of bare pydensecrf processes")


if __name__ == "__main__":
    main()
