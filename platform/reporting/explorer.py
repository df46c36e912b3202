"""Collects the data of the section "Try a threshold" of a run's page: training images with their maps.

For each map and pixel, the page embeds the number of the interval between two thresholds that contains the score, as in
the stage `evaluate`, but at the size of the embedded picture. If the ground truth is not larger than SIDE pixels, the
script of the page (templates/explorer.js) computes the same IoU as the stage.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from mcis.datasets.images.decode import fit_picture
from mcis.datasets.images.label_masks import resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.images.value_range import ValueRange
from mcis.models.counts import intervals
from mcis.models.localization import score_maps
from mcis.platform.config.sections import Config
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.reporting.html import data_uri, packed, printable
from mcis.platform.reporting.panels import Panel, labels
from mcis.platform.runs.scores import Curve, Score

SIDE = 512
"""Longest side in pixels of an embedded picture and of everything that is computed with it."""
_MAX_IMAGES = 12
"""Maximum number of images; each takes about 200 kB, and the attention to its related images as much again."""
_THUMBNAIL_SIDE = 96
"""Longer side of a related image in pixels."""
_MAX_RELATED = 8
"""Maximum number of related images that are shown per map."""


def explorer_data(
    config: Config,
    classes: Sequence[str],
    panels: Sequence[Panel],
    relations: MapRelations | None,
    pair_data_of: Callable[[Panel, int], dict[str, Any]] | None = None,
    *,
    scores: Sequence[Score],
    curves: Mapping[str, Curve],
) -> dict[str, Any] | None:
    """Collects the data that the script of the page reads, as JSON values. Arrays are zlib-compressed, in base64.

    Args:
        config: Configuration of the run.
        classes: The K class names.
        panels: The gallery; the first training images with maps are used.
        relations: Related images of the maps; None for single-round maps.
        pair_data_of: Returns maps, attention and gates of an image (`PairData`), given its panel and its position in
            the rows of the relations; None if they are not shown.
        scores: Scores of the run.
        curves: Curves of the run; the one of these maps is shown.

    Returns:
        The data, or None if no training image has maps.
    """
    explored = [panel for panel in panels if panel.split == "train" and panel.maps][:_MAX_IMAGES]
    if not explored:
        return None

    bins = config.evaluate.thresholds
    curve = _curve(config.localize.related_of_maps, scores, curves)
    image_ids = relations.rows["image_id"].to_pylist() if relations else []
    row_of = {image_id: row for row, image_id in enumerate(image_ids)}
    images = []
    for panel in explored:
        image = _image_data(panel, config.map_scale, bins)
        image["related"] = []
        image["attention"] = None
        if relations:
            row = row_of[panel.image_id]
            image["related"] = list(_related(relations, row, config.data.value_range))
            image["attention"] = pair_data_of(panel, row) if pair_data_of else None
        images.append(image)

    start = curve["threshold"] if curve else config.pseudo_masks.threshold
    label_data = {}
    for number, label in labels(classes).items():
        label_data[str(number)] = {"name": printable(label.name), "color": label.color}
    return {
        "labels": label_data,
        "curve": curve,
        "thresholds": [f"{number / bins:.3g}" for number in range(bins)],
        "start": min(round(start * bins), bins - 1),
        "images": images,
    }


def _curve(related: int | None, scores: Sequence[Score], curves: Mapping[str, Curve]) -> dict[str, Any] | None:
    """mIoU of all scored training images at each threshold, and its best value; None if the maps are not scored."""
    for score in scores:
        if score.output == "localization_maps" and score.related == related and math.isfinite(score.miou):
            mious = [miou if math.isfinite(miou) else None for miou in curves[score.name].mious]
            return {
                "name": score.name,
                "split": score.split,
                "images": score.images,
                "miou": score.miou,
                "mious": mious,
                "threshold": score.threshold,
            }
    return None


def _related(relations: MapRelations, row: int, value_range: ValueRange | None) -> Iterator[dict[str, Any]]:
    """Yields for each map of an image its label, the number of its related images, and some of them."""
    for tag, related in relations.maps_of(row):
        shown_rows = list(dict.fromkeys(related))[:_MAX_RELATED]
        tiles = []
        for image in relations.rows.take(shown_rows).select(["image_id", "uri"]).to_pylist():
            rgb = read_rgb(image["uri"], max_side=_THUMBNAIL_SIDE, value_range=value_range)
            picture = Image.fromarray(rgb)
            tiles.append({"id": printable(image["image_id"]), "picture": data_uri(picture, "JPEG")})
        yield {"label": tag + 1, "number": len(related), "tiles": tiles}


def _image_data(panel: Panel, scale: str, bins: int) -> dict[str, Any]:
    """An image with its truth and its maps, at most SIDE pixels on the longer side."""
    image = fit_picture(panel.image, SIDE).rgb
    maps = panel.maps
    assert maps is not None
    height, width = image.shape[:2]
    scores = score_maps(torch.from_numpy(maps.maps), maps.grids, scale, height, width).numpy()
    map_labels = maps.classes + 1
    truth = None if panel.truth is None else packed(resize_labels(panel.truth, height, width))
    return {
        "id": printable(panel.image_id),
        "height": height,
        "width": width,
        "full": panel.full_size,
        "picture": data_uri(Image.fromarray(image), "JPEG"),
        "truth": truth,
        "labels": map_labels.tolist(),
        "maps": packed(intervals(scores, bins).astype("<u2")),
        "strongest": packed(map_labels[scores.argmax(axis=0)].astype(np.uint8)),
    }
