"""Classifier + pairs of images -> their scores of unshared classes, with the gate and without it (Eq. 1, 10)."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.backbone_outputs import Features
from mcis.models.backbones import to_unit
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import load_classifier, move_channels_last

PAIR_SCORES_SCHEMA = pa.schema(
    [
        pa.field("exclusive_m", pa.list_(pa.float32()), nullable=False, metadata={"about": "of m without n, (K,)"}),
        pa.field("exclusive_n", pa.list_(pa.float32()), nullable=False, metadata={"about": "of n without m, (K,)"}),
        pa.field("basic_m", pa.list_(pa.float32()), nullable=False, metadata={"about": "of m alone, (K,)"}),
        pa.field("basic_n", pa.list_(pa.float32()), nullable=False, metadata={"about": "of n alone, (K,)"}),
    ]
)

_BATCH = 4


class ScorePairs:
    """Maps rows of pairs, columns m, n and kind, to their scores (PAIR_SCORES_SCHEMA).

    Args:
        weights: the folder of the trained classifier of `classes` classes, with contrastive co-attention.
        gpu: whether the network runs on a GPU.
        images: URIs of the images that m and n number, or what the frozen backbone makes of them.
    """

    def __init__(self, config: ClassifierConfig, weights: Path, classes: int, gpu: bool, images: list[str] | Features):
        self.config, self.device, self.images = config, torch.device("cuda" if gpu else "cpu"), images
        self.model = move_channels_last(load_classifier(config, weights, classes), self.device)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        return pa.concat_tables([self._scores(rows.slice(first, _BATCH)) for first in range(0, len(rows), _BATCH)])

    def _scores(self, rows: pa.Table) -> pa.Table:
        m, n = (self.model.embedding(self._outputs(rows[name].to_numpy())) for name in "mn")
        kind = torch.from_numpy(rows["kind"].to_numpy().astype(np.int64)).to(self.device)
        scores = self.model.pair_scores(m, n, kind if self.config.kinds > 1 else None)
        columns = {name: getattr(scores, name).float().cpu().tolist() for name in PAIR_SCORES_SCHEMA.names}
        return pa.table(columns, schema=PAIR_SCORES_SCHEMA)

    def _outputs(self, positions: NDArray[np.int64]) -> Tensor:
        if isinstance(self.images, Features):
            return torch.from_numpy(self.images(positions)).to(self.device).float()
        pixels = np.stack([read_rgb(self.images[position], self.config.input_size) for position in positions])
        images = self.model.backbone.normalize(to_unit(torch.from_numpy(pixels).to(self.device)))
        outputs: Tensor = self.model.backbone(images)
        return outputs
