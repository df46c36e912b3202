"""Collects the data of the section "Maps and related images" of a run's page (Fig. 1 and 2b of the paper).

For a few training images, the classifier embeds the image and the related images of its maps again, on the CPU, as the
stage `localize` did. The page then embeds the attention between them at a coarse resolution, in 8 bits, so a
related image takes 20 to 40 kB, and never more than 120 kB. `_MAX_PAIRS` bounds their number.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES
from mcis.datasets.tables.quantized import dequantize, quantize
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_float_images
from mcis.models.coattention import pair_domains, target_is_image_n
from mcis.models.grids import Grid, Grids, pixel_grids
from mcis.models.localization import embed, score_maps
from mcis.models.pair_attention import attention_weights, coarse_attention, shared_gate
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.html import data_uri, packed, printable
from mcis.platform.reporting.panels import Panel

SIDE = 16
"""Maximum number of positions and of cells along a side: attention has at most 16^4 entries of one byte."""
POINTS = 64
"""Number of points along a side at which maps and gates are embedded."""
_MAX_PAIRS = 8
"""Maximum number of related images of an image for which attention is shown, over all its maps."""
_MAX_CONTRASTED = 8
"""Maximum number of images that a contrastive map is made with here."""
_PICTURE_SIDE = 256
"""Longer side of a related image in pixels."""


class PairData:
    """Computes the data of one training image after another.

    Args:
        config: Configuration of the run.
        classes: Number of classes K.
        classifier: Folder of the trained classifier.
        single: Table of the single-round maps.
        relations: Related images of the maps.
    """

    def __init__(self, config: Config, classes: int, classifier: Path, single: Path, relations: MapRelations):
        self.config = config
        self.relations = relations
        self.single = Shards(single)
        self.model = load_trained(build_classifier(config.classifier, classes), classifier)
        self.has_gates = config.classifier.attention == "co+contrastive"
        self.can_contrast = self.has_gates and not RELATED_IMAGE_RULES[config.localize.related_by].is_control
        self.features: dict[int, Tensor] = {}
        side = config.classifier.input_size
        self.image_shape = (1, 3, side, side)

    @torch.inference_mode()
    def __call__(self, panel: Panel, row: int) -> dict[str, Any]:
        """Maps, attention and gates of a training image, as JSON values.

        Args:
            panel: The image, with maps.
            row: Its position in the rows of the relations.
        """
        maps = panel.maps
        assert maps is not None
        single = image_maps(self.single, panel.image_id)
        relations = list(self.relations.maps_of(row))[:_MAX_PAIRS]
        pairs_per_map = max(1, _MAX_PAIRS // len(relations))
        self.features = {}  # of one image and its related images at a time

        entries = []
        for number, (tag, related) in enumerate(relations):
            shown = list(dict.fromkeys(related))[:pairs_per_map]
            points_by_kind = {
                "single round": _map_points(torch.from_numpy(single.maps[number]), single.grids),
                "with related images": _map_points(torch.from_numpy(maps.maps[number]), maps.grids),
            }
            contrasted = self._images_without(tag, relations)
            if self.can_contrast and contrasted:
                points_by_kind["contrastive"] = self._contrastive_points(row, tag, contrasted)
            entries.append(
                {
                    "label": tag + 1,
                    "kinds": [{"name": name, "points": packed(points)} for name, points in points_by_kind.items()],
                    "related": len(related),
                    "contrasted": len(contrasted),
                    "pairs": [self._pair(row, other) for other in shown],
                }
            )
        return {"points": POINTS, "can_contrast": self.can_contrast, "has_gates": self.has_gates, "maps": entries}

    def _images_without(self, tag: int, relations: Sequence[tuple[int, list[int]]]) -> list[int]:
        """Returns the images of a contrastive map: related images of the other tags, without this tag (section 4.5)."""
        tags = self.relations.rows["tags"]
        images = []
        for other_tag, related in relations:
            if other_tag != tag:
                images += [image for image in related if tag not in tags[image].as_py()]
        return images[:_MAX_CONTRASTED]

    def _contrastive_points(self, row: int, tag: int, images: Sequence[int]) -> np.ndarray:
        """The contrastive map of an image (Eq. 6-8), at the points of the page."""
        target = self._embedding(row)
        activations = []
        for other in images:
            query = self._query(row, other, target_first=True)
            activations.append(self.model.contrastive_maps(query, target, self._embedding(other)[None], tag)[0])
        return _map_points(torch.stack(activations).mean(dim=0), self._grids(target))

    def _pair(self, row: int, other: int) -> dict[str, Any]:
        """Attention of an image to a related image, and the gates of both."""
        target = self._embedding(row)
        partner = self._embedding(other)
        weights = attention_weights(self._query(row, other, target_first=True), partner, self.model.form)
        coarse = coarse_attention(weights, self._grids(target), self._grids(partner), SIDE)
        flat = coarse.weights.flatten(0, 1).flatten(1)
        largest = flat.amax(dim=1)
        shares = (flat / largest[:, None] * 255).round().to(torch.uint8)

        gates: list[str] = []
        if self.has_gates:
            w_b = self.model.w_b.weight[0, :, 0, 0]
            reverse = attention_weights(self._query(row, other, target_first=False), target, self.model.form)
            gates.append(_gate_points(shared_gate(weights, partner, w_b), self._grids(target)))
            gates.append(_gate_points(shared_gate(reverse, target, w_b), self._grids(partner)))

        image = self.relations.rows.take([other]).to_pylist()[0]
        picture = read_rgb(image["uri"], max_side=_PICTURE_SIDE, value_range=self.config.data.value_range)
        return {
            "id": printable(image["image_id"]),
            "labels": [tag + 1 for tag in image["tags"]],
            "picture": data_uri(Image.fromarray(picture), "JPEG"),
            "height": picture.shape[0],
            "width": picture.shape[1],
            "targets": _as_json(coarse.targets),
            "cells": _as_json(coarse.cells),
            "largest": packed(largest.numpy().astype("<f4")),
            "shares": packed(shares.numpy()),
            "gates": gates,
        }

    def _query(self, row: int, other: int, *, target_first: bool) -> Tensor:
        """F^T W_P of an image in the pair of a target and a related image (Eq. 2), (HW, C).

        Args:
            row, other: Positions of the target and of the related image.
            target_first: Whether to return it for the target rather than for the related image.
        """
        method = self.config.localize.method
        domain = self.relations.rows["domain"]
        is_source = torch.tensor(domain[row].as_py() == "source")
        other_is_source = torch.tensor([domain[other].as_py() == "source"])
        target_is_n = target_is_image_n(is_source, other_is_source, method.target)
        query = self.model.query(
            self._embedding(row if target_first else other),
            pair_domains=pair_domains(is_source, other_is_source),
            target_is_n=target_is_n if target_first else ~target_is_n,
            identity=method.w_p == "identity",
        )
        return query.reshape(-1, query.shape[-1])

    def _embedding(self, row: int) -> Tensor:
        """Features of an image, (C, h, w), rounded like those that maps are made from (`localize.feature_type`)."""
        if row not in self.features:
            localize = self.config.localize
            uri = self.relations.rows["uri"][row].as_py()
            side = self.config.classifier.input_size
            pixels = read_rgb(uri, side, value_range=self.config.data.value_range)
            images = self.model.backbone.normalize(to_float_images(torch.from_numpy(pixels)[None]))
            features = embed(
                self.model.backbone,
                self.model.standardize,
                images,
                extra_scales=localize.extra_scales,
                hflip=localize.hflip,
            )
            if localize.feature_type == "int8":
                rounded = torch.from_numpy(dequantize(quantize(features.numpy()), features.shape[1:]))
            else:
                rounded = features.half().float()
            self.features[row] = rounded[0]
        return self.features[row]

    def _grids(self, features: Tensor) -> Grids:
        return self.model.backbone.layout.grids(self.image_shape, features.shape)


def _map_points(activation: Tensor, grids: Grids) -> np.ndarray:
    """A map (h, w), clipped at 0 and divided by its maximum, at the points of the page, in 8 bits."""
    points = score_maps(activation[None], grids, "maximum", POINTS, POINTS)[0]
    return (points * 255).round().numpy().astype(np.uint8)


def _gate_points(gate: Tensor, grids: Grids) -> str:
    """A gate (hw,) at the points of the page, in 8 bits."""
    gate = gate.unflatten(0, (grids.rows.num_positions, grids.columns.num_positions))
    points = resample(gate, grids, pixel_grids(POINTS, POINTS))
    return packed((points * 255).round().numpy().astype(np.uint8))


def _as_json(grids: Grids) -> dict[str, dict[str, float]]:
    def side(grid: Grid) -> dict[str, float]:
        return {"first": grid.first, "step": grid.step, "positions": grid.num_positions}

    return {"rows": side(grids.rows), "columns": side(grids.columns)}
