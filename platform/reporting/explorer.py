"""What a reader of the report may try out: training images with their maps, to set against thresholds.

The page embeds, of each map and pixel, the interval between two thresholds that the score lies in, as the evaluation
counts it, at the size of the embedded picture and truth, at most SIDE pixels on the longer side: where the truth is no
larger, the IoU of the page's script (templates/explorer.js) is the one that the stage `evaluate` finds.
"""

import base64
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.images.decode import fit_picture, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.models.counts import intervals
from mcis.models.localization import score_maps
from mcis.platform.config.sections import Config
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.reporting.html import data_uri, printable
from mcis.platform.reporting.panels import Panel, labels
from mcis.platform.runs.scores import Curve, Score

SIDE = 512
"""Longest side of an embedded picture and of what is computed with it, pixels."""
_MOST_IMAGES = 12
"""Images of an explorer, some 200 kB each."""
_THUMBNAIL, _MOST_RELATED = 96, 8
"""Pixels of the longer side of a related image; how many of them are shown of a map's."""


def explorer_data(
    config: Config,
    classes: Sequence[str],
    panels: Sequence[Panel],
    relations: MapRelations | None,
    *,
    scores: Sequence[Score],
    curves: Mapping[str, Curve],
) -> dict[str, Any] | None:
    """What the script of the page reads of a run whose maps can be set against thresholds, or None.

    It is an object that JSON can hold; arrays are in it as base64 of zlib's format.

    Args:
        classes: K names.
        panels: of the gallery; the first ones that have maps are explored.
        relations: what the maps were made of; None for maps of a single round.
        scores, curves: of the run; the curve of these maps is shown beside.
    """
    explored = [panel for panel in panels if panel.split == "train" and panel.maps][:_MOST_IMAGES]
    if not explored:
        return None
    bins, curve = config.evaluate.thresholds, _curve(config.localize.related, scores, curves)
    row_of = {image_id: row for row, image_id in enumerate(relations.rows["image_id"].to_pylist() if relations else ())}
    images = []
    for panel in explored:
        related = _related(relations, row_of[panel.image_id]) if relations else ()
        images.append(_image_data(panel, config.maps.scale, bins) | {"related": list(related)})
    start = curve["threshold"] if curve else config.pseudo_masks.threshold
    return {
        "labels": {str(k): {"name": printable(of.name), "color": of.color} for k, of in labels(classes).items()},
        "curve": curve,
        "thresholds": [f"{number / bins:.3g}" for number in range(bins)],
        "start": min(round(start * bins), bins - 1),
        "images": images,
    }


def _curve(related: int, scores: Sequence[Score], curves: Mapping[str, Curve]) -> dict[str, Any] | None:
    """mIoU of the whole split over the thresholds, with what it is of and its best; None where not scored."""
    for score in scores:
        if score.what == "localization_maps" and score.related == related and math.isfinite(score.miou):
            mious = [miou if math.isfinite(miou) else None for miou in curves[score.name].mious]
            about = {"name": score.name, "split": score.split, "images": score.images, "miou": score.miou}
            return about | {"mious": mious, "threshold": score.threshold}
    return None


def _related(relations: MapRelations, row: int) -> Iterator[dict[str, Any]]:
    """By map of an image: its label, the number of its related images, some of them."""
    for tag, related in relations.maps_of(row):
        some = relations.rows.take(list(dict.fromkeys(related))[:_MOST_RELATED]).select(["image_id", "uri"]).to_pylist()
        pictures = (Image.fromarray(read_rgb(of["uri"], max_side=_THUMBNAIL)) for of in some)
        tiles = [
            {"id": printable(of["image_id"]), "picture": data_uri(picture, "JPEG")}
            for of, picture in zip(some, pictures, strict=True)
        ]
        yield {"label": tag + 1, "number": len(related), "tiles": tiles}


def _image_data(panel: Panel, scale: str, bins: int) -> dict[str, Any]:
    """An image at no more than SIDE pixels a side, with its truth and its maps."""
    image, maps = fit_picture(panel.image, SIDE).rgb, panel.maps
    assert maps is not None
    height, width = image.shape[:2]
    scores = score_maps(torch.from_numpy(maps.maps), maps.grids, scale, height, width).numpy()
    return {
        "id": printable(panel.image_id),
        "height": height,
        "width": width,
        "full": panel.full_size,
        "picture": data_uri(Image.fromarray(image), "JPEG"),
        "truth": None if panel.truth is None else _packed(resize_labels(panel.truth, height, width)),
        "labels": (maps.classes + 1).tolist(),
        "maps": _packed(intervals(scores, bins).astype("<u2")),
        "strongest": _packed((maps.classes + 1)[scores.argmax(axis=0)].astype(np.uint8)),
    }


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
