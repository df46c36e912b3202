"""Ground-truth masks with predictions for the benchmarks: VOC's masks from a folder, or similar synthetic masks.

Predictions are the masks themselves, shifted and relabeled. They need no network and have a network's errors: edges
next to the object's edges, missed objects and confused classes.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE, VOC_CLASSES
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.platform.outputs.tables import PREDICTIONS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import write_table
from mcis.platform.runs.results import IndexResult, PredictResult, write_result
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

WIDTH = 500
HEIGHT = 375
RING = 5
"""Size of a synthetic mask and width of the ignored ring around its objects in pixels, the same as in VOC."""
SHARD_ROWS = 32
"""Rows per shard of the predictions, the same as in the stage `predict`."""


def mask_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that choose masks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--masks", type=Path, help="folder of masks, such as VOC's SegmentationClassAug [synthetic masks]"
    )
    parser.add_argument("--images", type=int, default=1449, help="number of masks")
    return parser


def find_or_draw(masks: Path | None, images: int, folder: Path) -> list[Path]:
    """Returns the first `images` files of the folder `masks`. None: draws masks into `folder`."""
    if masks is not None:
        return sorted(masks.glob("*.png"))[:images]

    folder.mkdir(parents=True)
    paths = [folder / f"{number:06d}.png" for number in range(images)]
    for number, path in enumerate(paths):
        path.write_bytes(encode_labels(draw_mask(np.random.default_rng([0, number]))))
    return paths


def draw_mask(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draws one to four wavy objects, each in an ignored ring: (HEIGHT, WIDTH), or upright like some of VOC's masks."""
    height, width = (HEIGHT, WIDTH) if rng.random() < 0.8 else (WIDTH, HEIGHT)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.uint8)
    for _ in range(rng.integers(1, 5)):
        radius = rng.integers(15, 150)
        center_y = rng.integers(height)
        center_x = rng.integers(width)
        angle = np.arctan2(y - center_y, x - center_x)
        waves = 1 + 0.2 * np.sin(angle * rng.integers(2, 7)) + 0.1 * np.sin(angle * rng.integers(7, 15))
        distance = np.hypot(y - center_y, (x - center_x) * rng.uniform(0.6, 1.6)) - radius * waves
        mask[distance < RING / 2] = IGNORE
        mask[distance < -RING / 2] = rng.integers(1, len(VOC_CLASSES) + 1)
    return mask


def distort(truth: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Makes a prediction from a mask: shifts it by up to 12 pixels, removes some classes and confuses others."""
    labels = np.arange(256, dtype=np.uint8)
    labels[IGNORE] = 0
    for label in np.unique(truth[(truth > 0) & (truth < IGNORE)]):
        luck = rng.random()
        if luck < 0.15:
            labels[label] = 0
        elif luck < 0.3:
            labels[label] = rng.integers(1, len(VOC_CLASSES) + 1)
    shifted = np.roll(truth, rng.integers(-12, 13, 2), axis=(0, 1))
    return labels[shifted]


def prepare_evaluation(root: Path, paths: list[Path], *, name: str = "masks", seed: int = 1) -> RunContext:
    """Writes the index and two predictions, `plain` and `crf`, of each mask, and returns the context of `evaluate`."""
    workspace = Workspace(root)
    index = workspace.output("index", name)
    output = workspace.output("predict", name)
    rows = []
    predictions = []
    for number, path in enumerate(paths):
        truth = decode_labels(path.read_bytes())
        height, width = truth.shape
        plain = encode_labels(distort(truth, np.random.default_rng([seed, 0, number])))
        crf = encode_labels(distort(truth, np.random.default_rng([seed, 1, number])))
        predictions.append({"image_id": path.stem, "plain": plain, "crf": crf})
        rows.append(
            {
                "image_id": path.stem,
                "split": "val",
                "height": height,
                "width": width,
                "tags": [0],
                "is_negative": False,
                "mask_uri": str(path),
                # the evaluation does not read these
                "uri": f"/absent/{path.stem}.jpg",
                "domain": "target",
                "content_hash": "",
                "saliency_uri": None,
            }
        )

    write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    for first in range(0, len(rows), SHARD_ROWS):
        shard = pa.Table.from_pylist(predictions[first : first + SHARD_ROWS], schema=PREDICTIONS_SCHEMA)
        write_table(output / "predictions" / f"part-{first:08d}-{first + len(shard):08d}.parquet", shard)
    write_result(index, IndexResult(classes=VOC_CLASSES), key=name)
    write_result(output, PredictResult(split="val"), key=name)
    return RunContext(
        workspace=workspace,
        name=name,
        output=workspace.output("evaluate", name),
        tracker=Tracker(workspace, name, identity=""),
        origins={},
        stage_outputs={"index": index, "predict": output},
    )
