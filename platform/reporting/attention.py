"""A picture of how related images make a localization map: where an image looks, and what is found again where."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mcis.datasets.images import read_rgb
from mcis.datasets.maps import Shards
from mcis.datasets.tags import Tags
from mcis.models.backbones import normalize, to_unit
from mcis.models.classifier import pair_kinds
from mcis.models.coattention import positions
from mcis.models.localization import embed, resize_maps, scale_maps, single_round
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier
from mcis.platform.reporting.panels import UNUSED, Steps, heat_picture
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows
from mcis.platform.runs.relations import draw_relations

_SHOWN = 3  # related images
_SIDE = 120


def attention_steps(config: Config, context: RunContext, image_ids: list[str]) -> list[Steps]:
    """For each map of some training images how it came to be, a picture a step.

    The image with its single-round map; up to three related images with the attention that each of their positions
    receives from the positions of the image where the final map is strong; the co-attentive map, `unused` where the
    final one is made of evidence alone; what evidence added, `found again`; the map as it is used. Embedded here once
    more, for the eye alone.
    """
    if not config.localize.related:
        return []
    rows = split_rows(context, "train", tagged=True)
    relations = draw_relations(
        config.localize, config.seed, Tags.of_index(rows["tags"], len(context.classes)), _is_source(rows)
    )
    place = {image_id: n for n, image_id in enumerate(rows["image_id"].to_pylist())}
    maker = _Maker(config, context, rows)
    out = []
    for image_id in image_ids:
        for number in range(*relations.start[place[image_id] : place[image_id] + 2].tolist()):
            tag = int(relations.tag[number])
            related = relations.related[number].tolist()[:_SHOWN]
            out.append(Steps(image_id, context.classes[tag], maker.steps(place[image_id], tag, related)))
    return out


def _is_source(rows: pa.Table) -> NDArray[np.bool_]:
    return np.array(rows["domain"].to_pylist()) == "source"


class _Maker:
    def __init__(self, config: Config, context: RunContext, rows: pa.Table):
        self.config, self.classes, self.rows = config, context.classes, rows
        self.model = load_classifier(config.classifier, context.inputs["train_classifier"], len(context.classes))
        self.maps = Shards(context.inputs["localize"] / "maps")
        self.source = torch.from_numpy(_is_source(rows))

    def _features(self, places: list[int]) -> Tensor:
        size, how = self.config.classifier.input_size, self.config.localize
        pixels = np.stack([read_rgb(self.rows["uri"][place].as_py(), size) for place in places])
        images = normalize(to_unit(torch.from_numpy(pixels)))
        return embed(self.model.backbone, images, extra_scales=how.extra_scales, mirror=how.mirror)

    @torch.inference_mode()
    def steps(self, place: int, tag: int, related: list[int]) -> tuple[tuple[str, Image.Image], ...]:
        """The tiles of one map."""
        how = self.config.localize
        target, near = self._features([place])[0], self._features(related)
        single = single_round(target[None], self.model.phi.weight, self.model.phi.bias)[0, tag]
        found = self.maps.maps(self.rows["image_id"][place].as_py())
        assert found is not None
        final = torch.from_numpy(found.maps[found.classes.tolist().index(tag)])
        out = [self._tile("single round", place, tag, single)]
        if self.model.attention != "none":
            own, others = self.source[place], self.source[torch.tensor(related)]
            facing: dict[str, Any] = {"kind": pair_kinds(own, others), "target_is_n": own & ~others}
            query = self.model.query(target, **facing)
            attention = torch.softmax(query @ positions(near, self.model.affinity).transpose(1, 2), dim=2)
            strong = final.flatten() >= final.flatten().quantile(0.8)
            received = attention[:, strong].mean(dim=1).view(len(related), *near.shape[2:])
            out += [self._tile("attended to", other, tag, one) for other, one in zip(related, received, strict=True)]
            co = self.model.co_map(target, near, tag, **facing)
            out.append(self._tile("co-attentive" if how.method.name != "evidence" else UNUSED, place, tag, co))
        if how.method.name == "evidence":
            out.append(self._tile("found again", place, tag, final.float() - single))
        return (*out, self._tile("the map", place, tag, final))

    def _tile(self, title: str, place: int, tag: int, heat: Tensor) -> tuple[str, Image.Image]:
        image = Image.fromarray(read_rgb(self.rows["uri"][place].as_py()))
        scores = resize_maps(scale_maps(heat[None].float(), "range"), image.height, image.width)[0].numpy()
        name = self.classes[tag]
        picture = heat_picture(image, [(name, scores)], self.classes)
        return title, picture.resize((max(1, round(_SIDE * image.width / image.height)), _SIDE))
