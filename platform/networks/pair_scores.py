"""Classifier + pairs of images -> their scores of unshared classes, with the gate and without it (Eq. 1, 10)."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from mcis.datasets.images import read_rgb
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


class ScorePairs:
    """Maps rows of pairs, columns uri_m, uri_n and kind, to their scores (PAIR_SCORES_SCHEMA).

    Args:
        weights: the folder of the trained classifier of `classes` classes, with contrastive co-attention.
        gpu: whether the network runs on a GPU.
    """

    def __init__(self, config: ClassifierConfig, weights: Path, classes: int, gpu: bool):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.model = move_channels_last(load_classifier(config, weights, classes), self.device)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        m, n = (self.model.embed(self._images(rows[name].to_pylist())) for name in ("uri_m", "uri_n"))
        kind = torch.from_numpy(rows["kind"].to_numpy().astype(np.int64)).to(self.device)
        scores = self.model.pair_scores(m, n, kind if self.config.kinds > 1 else None)
        columns = {name: getattr(scores, name).float().cpu().tolist() for name in PAIR_SCORES_SCHEMA.names}
        return pa.table(columns, schema=PAIR_SCORES_SCHEMA)

    def _images(self, uris: list[str]) -> Tensor:
        pixels = np.stack([read_rgb(uri, self.config.input_size) for uri in uris])
        return self.model.backbone.normalize(to_unit(torch.from_numpy(pixels).to(self.device)))
