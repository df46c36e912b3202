"""Stage 6: segmentation network + images of a split -> labels, plain and after the dense CRF (PREDICTIONS_SCHEMA)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mcis.datasets.decode import encode_labels
from mcis.datasets.errors import UserError
from mcis.datasets.images import read_rgb
from mcis.datasets.maps import PREDICTIONS_SCHEMA
from mcis.models.backbones import normalize, to_unit
from mcis.models.crf import dense_crf
from mcis.models.segmenters import predict
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import uses_gpu
from mcis.platform.networks.build import load_segmenter
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows
from mcis.platform.stages.pseudo_masks import crf_parameters


class Predict:
    """Image rows -> predictions."""

    def __init__(self, config: Config, weights: Path, classes: int, gpu: bool):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.model = load_segmenter(config.segmenter, weights, classes).to(self.device)

    def __call__(self, rows: pa.Table) -> pa.Table:
        c, out = self.config.predict, []
        for row in rows.to_pylist():
            rgb = read_rgb(row["uri"])
            image = normalize(to_unit(torch.from_numpy(rgb[None]).to(self.device)))[0]
            probabilities = predict(self.model, image, scales=c.scales, mirror=c.mirror, crop=c.crop).cpu().numpy()
            refined = None
            if c.crf.iterations:
                refined = encode_labels(dense_crf(rgb, probabilities, crf_parameters(c.crf)).argmax(0).astype(np.uint8))
            plain = encode_labels(probabilities.argmax(0).astype(np.uint8))
            out.append({"image_id": row["image_id"], "plain": plain, "crf": refined})
        return pa.Table.from_pylist(out, schema=PREDICTIONS_SCHEMA)


def predicted_split(config: Config, there: Mapping[str, int]) -> str:
    """The split whose images are predicted, of those that are there with so many images.

    Raises:
        UserError: a split without an image is asked for.
    """
    if config.predict.split == "auto":
        return "val" if there.get("val") else "train"
    if not there.get(config.predict.split):
        raise UserError(
            f"predict.split is {config.predict.split}, which has no image",
            f"one of {', '.join(there)}",
            "set predict.split to one of them, or name a list for that split",
        )
    return config.predict.split


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Predicts every image of a split, over the configured scales and mirror images."""
    gpu = uses_gpu(config.compute)
    split = predicted_split(config, context.summary("index")["counts"]["images"])
    rows = split_rows(context, split)
    mapped = map_table(
        rows,
        Predict,
        (config, context.inputs["train_segmenter"], len(context.classes), gpu),
        context.part / "predictions",
        label="predict",
        shard_rows=min(config.compute.shard_rows, 32),
        gpu=gpu,
    )
    return {"busy": mapped.busy, "split": split, "counts": {"images": len(rows)}}
