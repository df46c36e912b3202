"""Ground-truth masks with predictions for the benchmarks: VOC's from a folder, or drawn ones of the same sort.

Predictions are the masks themselves, shifted and relabeled: they need no network, and their errors are those of one,
edges beside the object's, objects missed, and classes confused.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE, VOC_CLASSES
from mcis.datasets.images.decode import decode_labels, encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.platform.outputs.tables import PREDICTIONS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import write_table
from mcis.platform.runs.results import IndexResult, PredictResult, write_result
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

WIDTH, HEIGHT, RING = 500, 375, 5
"""Size of a drawn mask and width of the ignored ring around its objects, pixels; as VOC has them."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that say which masks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--masks", type=Path, help="folder of masks, such as VOC's SegmentationClassAug [drawn ones]")
    parser.add_argument("--images", type=int, default=1449, help="masks to take, or to draw")
    return parser


def find_or_draw(given: Path | None, images: int, folder: Path) -> list[Path]:
    """The files of the first masks of a folder; where none is given, of masks drawn into `folder`."""
    if given is not None:
        return sorted(given.glob("*.png"))[:images]
    folder.mkdir(parents=True)
    paths = [folder / f"{number:06d}.png" for number in range(images)]
    for number, path in enumerate(paths):
        path.write_bytes(encode_labels(draw(np.random.default_rng([0, number]))))
    return paths


def draw(rng: np.random.Generator) -> NDArray[np.uint8]:
    """A mask of one to four wavy objects, each in an ignored ring; (HEIGHT, WIDTH), or upright as some of VOC are."""
    height, width = (HEIGHT, WIDTH) if rng.random() < 0.8 else (WIDTH, HEIGHT)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.uint8)
    for _ in range(rng.integers(1, 5)):
        radius, center = rng.integers(15, 150), (rng.integers(height), rng.integers(width))
        angle = np.arctan2(y - center[0], x - center[1])
        waves = 1 + 0.2 * np.sin(angle * rng.integers(2, 7)) + 0.1 * np.sin(angle * rng.integers(7, 15))
        distance = np.hypot(y - center[0], (x - center[1]) * rng.uniform(0.6, 1.6)) - radius * waves
        mask[distance < RING / 2] = IGNORE
        mask[distance < -RING / 2] = rng.integers(1, len(VOC_CLASSES) + 1)
    return mask


def predicted(truth: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """A prediction of a mask: its labels shifted by up to 12 pixels, some classes missed and some taken for others."""
    labels = np.arange(256, dtype=np.uint8)
    labels[IGNORE] = 0
    for label in np.unique(truth[(truth > 0) & (truth < IGNORE)]):
        luck = rng.random()
        if luck < 0.3:
            labels[label] = 0 if luck < 0.15 else rng.integers(1, len(VOC_CLASSES) + 1)
    shifted = np.roll(truth, rng.integers(-12, 13, 2), axis=(0, 1))
    return labels[shifted]


def evaluable(root: Path, paths: list[Path], *, name: str = "masks", seed: int = 1) -> RunContext:
    """A run of a workspace that has come to predictions of these masks, two of each: `plain` and `crf`."""
    workspace = Workspace(root)
    index, output = (workspace.output(stage, name) for stage in ("index", "predict"))
    rows, predictions = [], []
    for number, path in enumerate(paths):
        truth = decode_labels(path.read_bytes())
        plain, refined = (encode_labels(predicted(truth, np.random.default_rng([seed, n, number]))) for n in range(2))
        predictions.append({"image_id": path.stem, "plain": plain, "crf": refined})
        height, width = truth.shape
        of_image = {"image_id": path.stem, "split": "val", "height": height, "width": width, "tags": [0]}
        unread = {"uri": f"/absent/{path.stem}.jpg", "domain": "target", "content_hash": "", "saliency_uri": None}
        rows.append({**of_image, **unread, "mask_uri": str(path)})
    write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    for first in range(0, len(rows), 32):  # as the stage predict writes them
        shard = pa.Table.from_pylist(predictions[first : first + 32], schema=PREDICTIONS_SCHEMA)
        write_table(output / "predictions" / f"part-{first:08d}-{first + len(shard):08d}.parquet", shard)
    write_result(index, IndexResult(classes=VOC_CLASSES), key=name)
    write_result(output, PredictResult(split="val"), key=name)
    inputs, part = {"index": index, "predict": output}, workspace.output("evaluate", name)
    tracker = Tracker(workspace, name, identity="")
    return RunContext(workspace=workspace, name=name, part=part, tracker=tracker, origins={}, inputs=inputs)
