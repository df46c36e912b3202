"""Segmentation network + images -> labels, plain and after the dense CRF (PREDICTIONS_SCHEMA)."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from mcis.datasets.decode import encode_labels, resize_labels
from mcis.datasets.images import read_rgb
from mcis.datasets.maps import PREDICTIONS_SCHEMA
from mcis.models.backbones import to_unit
from mcis.models.crf import dense_crf
from mcis.models.segmenters import predict
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import crf_parameters, load_segmenter, move_channels_last, normalization_of


class Predictor:
    """Maps rows of the index to predictions, over the configured scales and mirror images.

    An image that is read smaller is predicted, and refined by the CRF, at that size; its labels, rather than their
    probabilities, are brought back to the size of its file, by nearest neighbor, so that memory stays bounded.

    Args:
        weights: the folder of the trained network.
        classes: K.
        gpu: whether the network runs on a GPU.
    """

    def __init__(self, config: Config, weights: Path, classes: int, gpu: bool):
        self.config, self.max_side, self.device = (
            config.predict,
            config.data.max_side,
            torch.device("cuda" if gpu else "cpu"),
        )
        model = load_segmenter(config.segmenter, weights, classes)
        self.model = move_channels_last(model, self.device)
        self.normalize = normalization_of(config.segmenter.backbone)

    def __call__(self, rows: pa.Table) -> pa.Table:
        predictions = []
        for row in rows.select(["image_id", "uri", "height", "width"]).to_pylist():
            plain, refined = self._labels(row["uri"], row["height"], row["width"])
            predictions.append({"image_id": row["image_id"], "plain": plain, "crf": refined})
        return pa.Table.from_pylist(predictions, schema=PREDICTIONS_SCHEMA)

    def _labels(self, uri: str, height: int, width: int) -> tuple[bytes, bytes | None]:
        """An image's labels as PNG, without the CRF and with it, or None where there is none."""
        config = self.config
        rgb = read_rgb(uri, max_side=self.max_side)
        image = self.normalize(to_unit(torch.from_numpy(rgb[None]).to(self.device)))[0]
        probabilities = predict(self.model, image, scales=config.scales, mirror=config.mirror, crop=config.crop)
        plain = probabilities.cpu().numpy()

        def png(of_labels: NDArray[np.float32]) -> bytes:
            return encode_labels(resize_labels(of_labels.argmax(0).astype(np.uint8), height, width))

        refined = png(dense_crf(rgb, plain, crf_parameters(config.crf))) if config.crf.iterations else None
        return png(plain), refined
