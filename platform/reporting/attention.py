"""Pictures of how related images make a localization map: where an image attends, and what matches again."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_unit
from mcis.models.coattention import pair_kinds, positions, seen_from_n
from mcis.models.localization import embed, score_maps
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.outputs.tables import image_maps
from mcis.platform.reporting.panels import Steps, Tile, heat_picture
from mcis.platform.runs.context import RunContext

_SHOWN = 3
"""Related images that are shown of a map's."""
_HEIGHT = 120
"""Pixels."""


def attention_steps(
    config: Config, context: RunContext, relations: MapRelations, image_ids: Sequence[str]
) -> list[Steps]:
    """How the maps of some training images were made, one picture per step.

    The image with its single-round map; up to three related images with the attention that each of their positions
    receives from the positions of the image where the final map is strong; the co-attentive map; the map as it is used.
    The images are embedded here once more, for display alone.
    """
    row_of = {image_id: row for row, image_id in enumerate(relations.rows["image_id"].to_pylist())}
    maker = _Maker(config, context, relations)
    return [
        Steps(image_id, context.classes[tag], maker.tiles(row_of[image_id], tag, related[:_SHOWN]))
        for image_id in image_ids
        for tag, related in relations.of(row_of[image_id])
    ]


class _Maker:
    """Draws the steps of maps; a row is a position among the tagged training images, which are those of `relations`."""

    def __init__(self, config: Config, context: RunContext, relations: MapRelations):
        self.config, self.classes, self.rows = config, context.classes, relations.rows
        self.model = load_classifier(config.classifier, context.inputs["train_classifier"], len(context.classes))
        self.maps = Shards(context.inputs["localize"] / "maps")
        self.source, self.form = torch.from_numpy(relations.source), self.model.affinity.form

    @torch.inference_mode()
    def tiles(self, row: int, tag: int, related: list[int]) -> tuple[Tile, ...]:
        """The steps of the map of an image's tag with some related images."""
        embedding = self._embeddings([row])[0]
        single = self.model.activations(embedding[None])[0, tag]
        final = self._final_map(row, tag)
        tiles = [self._tile("single round", row, tag, single)]
        tiles += self._co_attention(row, tag, related, embedding, final)
        return (*tiles, self._tile("the map", row, tag, final))

    def _co_attention(self, row: int, tag: int, related: list[int], embedding: Tensor, final: Tensor) -> list[Tile]:
        """The attention that each related image receives from where the map is strong, and the co-attentive map."""
        of_related = self._embeddings(related)
        query, keys = self._query(row, related, embedding), positions(self.model.keys(of_related), self.form)
        attention = torch.softmax(query @ keys.transpose(1, 2), dim=2)
        strong = final.flatten() >= final.flatten().quantile(0.8)
        received = attention[:, strong].mean(dim=1).view(len(related), *of_related.shape[2:])
        tiles = [self._tile("attended to", image, tag, heat) for image, heat in zip(related, received, strict=True)]
        co_attentive = self.model.co_maps(query, embedding, of_related, tag).mean(dim=0)
        return [*tiles, self._tile("co-attentive", row, tag, co_attentive)]

    def _query(self, row: int, related: list[int], embedding: Tensor) -> Tensor:
        """The image's side of the affinity to each related image, (R, HW, C'), or to all, (HW, C')."""
        method = self.config.localize.method
        if method.affinity == "identity":
            return self.model.query(embedding, identity=True)
        source, of_related = self.source[row], self.source[torch.tensor(related)]
        target_is_n = seen_from_n(source, of_related, method.target)
        return self.model.query(embedding, kind=pair_kinds(source, of_related), target_is_n=target_is_n)

    def _embeddings(self, rows: list[int]) -> Tensor:
        """Embeddings (N, D, H, W) of some images."""
        size, localize = self.config.classifier.input_size, self.config.localize
        pixels = np.stack([read_rgb(self.rows["uri"][row].as_py(), size) for row in rows])
        images = self.model.backbone.normalize(to_unit(torch.from_numpy(pixels)))
        scales, mirror = localize.extra_scales, localize.mirror
        return embed(self.model.backbone, self.model.embedding, images, extra_scales=scales, mirror=mirror)

    def _final_map(self, row: int, tag: int) -> Tensor:
        """The map (H, W) that the stage wrote."""
        image_id = self.rows["image_id"][row].as_py()
        image = image_maps(self.maps, image_id)
        assert image is not None, f"no localization map of the tagged image {image_id}"
        return torch.from_numpy(image.maps[image.classes.tolist().index(tag)])

    def _tile(self, title: str, row: int, tag: int, heat: Tensor) -> Tile:
        image = Image.fromarray(read_rgb(self.rows["uri"][row].as_py()))
        size = self.config.classifier.input_size
        grids = self.model.backbone.layout.grids((size, size), heat.shape)
        scores = score_maps(heat[None], grids, "range", image.height, image.width)[0].numpy()
        picture = heat_picture(image, [(self.classes[tag], scores)], self.classes)
        return Tile(title, picture.resize((max(1, round(_HEIGHT * image.width / image.height)), _HEIGHT)))
