"""Pictures of how related images make a localization map: where the strong positions of an image attend in them."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mcis.datasets.images.squares import read_rgb
from mcis.models.backbones import to_unit
from mcis.models.coattention import pair_kinds, positions, seen_from_n
from mcis.models.localization import embed, score_maps
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.reporting.panels import Panel, Steps, Tile, heat_picture
from mcis.platform.runs.context import RunContext

_SHOWN = 3
"""Related images that are shown of a map's."""
_HEIGHT = 120
"""Pixels."""


@torch.inference_mode()
def attention_steps(
    config: Config, context: RunContext, relations: MapRelations, panels: Sequence[Panel]
) -> list[Steps]:
    """Each map of some training images, beside up to three related images with the attention that these receive.

    It is the attention that each of their positions receives from the positions of the image where the map is strong.
    The images are embedded here once more, for display alone.
    """
    localize, size, uris = config.localize, config.classifier.input_size, relations.rows["uri"]
    model = load_classifier(config.classifier, context.inputs["train_classifier"], len(context.classes))
    source = torch.from_numpy(relations.source)

    def embeddings(rows: list[int]) -> Tensor:
        """Embeddings (N, D, H, W) of some images."""
        pixels = np.stack([read_rgb(uris[row].as_py(), size) for row in rows])
        images = model.backbone.normalize(to_unit(torch.from_numpy(pixels)))
        return embed(
            model.backbone, model.embedding, images, extra_scales=localize.extra_scales, mirror=localize.mirror
        )

    def received(row: int, related: list[int], heat: Tensor) -> Tensor:
        """The attention that related images receive, (R, H, W), from the strongest fifth of a map (H, W)."""
        own, others = embeddings([row])[0], embeddings(related)
        if localize.method.affinity == "identity":
            query = model.query(own, identity=True)
        else:
            of_related = source[torch.tensor(related)]
            target_is_n = seen_from_n(source[row], of_related, localize.method.target)
            query = model.query(own, kind=pair_kinds(source[row], of_related), target_is_n=target_is_n)
        keys = positions(model.keys(others), model.affinity.form)
        strong = heat.flatten() >= heat.flatten().quantile(0.8)
        attention = torch.softmax(query @ keys.transpose(1, 2), dim=2)
        return attention[:, strong].mean(dim=1).view(len(related), *others.shape[2:])

    def tile(title: str, row: int, name: str, heat: Tensor) -> Tile:
        image = Image.fromarray(read_rgb(uris[row].as_py()))
        grids = model.backbone.layout.grids((size, size), heat.shape)
        scores = score_maps(heat[None], grids, "range", image.height, image.width)[0].numpy()
        picture = heat_picture(image, [(name, scores)], context.classes)
        return Tile(title, picture.resize((max(1, round(_HEIGHT * image.width / image.height)), _HEIGHT)))

    steps, row_of = [], {image_id: row for row, image_id in enumerate(relations.rows["image_id"].to_pylist())}
    for panel in panels:
        row, kept = row_of[panel.image_id], panel.kept
        assert kept is not None
        for tag, all_related in relations.of(row):
            name, related = context.classes[tag], all_related[:_SHOWN]
            heat = torch.from_numpy(kept.maps[kept.classes.tolist().index(tag)])
            tiles = [tile("the map", row, name, heat)]
            of_related = zip(related, received(row, related, heat), strict=True)
            tiles += [tile("attended to", other, name, attention) for other, attention in of_related]
            steps.append(Steps(panel.image_id, name, tuple(tiles)))
    return steps
