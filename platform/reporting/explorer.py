"""What a reader of the report may try out: training images with their maps as they are kept, to set against thresholds.

The page embeds a map at its own size, and its script (templates/explorer_numbers.js) resizes it, scales it and compares
it with a threshold as the evaluation does. It computes at the size of the embedded picture and truth, at most SIDE
pixels on the longer side: where the truth is no larger, its IoU is the one that the stage `evaluate` finds.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.images.decode import fit_picture, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.platform.config.sections import Config
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.reporting.html import data_uri, shown
from mcis.platform.reporting.panels import Panel, Steps, Tile, labels

SIDE = 512
"""Longest side of an embedded picture and of what is computed with it, pixels."""
_MOST_IMAGES = 12
"""Images of an explorer, some 200 kB each."""
_THUMBNAIL, _MOST_RELATED = 96, 8
"""Pixels of the longer side of a related image; how many of them are shown of a map's."""


class Related(NamedTuple):
    """The images that a map was made with.

    Attributes:
        tag: index of the map's class.
        number: how many there are, those that come twice counted twice.
        tiles: some of them, titled by their ids.
    """

    tag: int
    number: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Explorer:
    """Images whose maps can be set against thresholds i / bins.

    Attributes:
        images: panels with maps.
        related_images: by image what each of its maps was made with; empty for maps of a single round.
        scale: of the maps, as of `models.localization.scale_maps`.
        bins: number of thresholds.
        threshold: at which a reader begins where the maps were not scored.
        related: number of related images of each map.
    """

    images: Sequence[Panel]
    related_images: Mapping[str, Sequence[Related]]
    scale: str
    bins: int
    threshold: float
    related: int


def explorer_of_run(config: Config, panels: Sequence[Panel], relations: MapRelations | None) -> Explorer | None:
    """The explorer of the gallery's first images that have maps; None where there are none."""
    with_maps = [panel for panel in panels if panel.split == "train" and panel.kept][:_MOST_IMAGES]
    if not with_maps:
        return None
    related: dict[str, list[Related]] = {}
    if relations:
        row_of = {image_id: row for row, image_id in enumerate(relations.rows["image_id"].to_pylist())}
        related = {panel.image_id: list(_related(relations, row_of[panel.image_id])) for panel in with_maps}
    return Explorer(
        images=with_maps,
        related_images=related,
        scale=config.maps.scale,
        bins=config.evaluate.thresholds,
        threshold=config.pseudo_masks.threshold,
        related=config.localize.related,
    )


def _related(relations: MapRelations, row: int) -> Iterator[Related]:
    for tag, related in relations.of(row):
        some = relations.rows.take(list(dict.fromkeys(related))[:_MOST_RELATED]).select(["image_id", "uri"]).to_pylist()
        tiles = (Tile(of["image_id"], Image.fromarray(read_rgb(of["uri"], max_side=_THUMBNAIL))) for of in some)
        yield Related(tag, len(related), tuple(tiles))


def explorer_data(
    explorer: Explorer, classes: Sequence[str], curve: dict[str, Any] | None, attention: Sequence[Steps]
) -> dict[str, Any]:
    """What the script of the page reads: an object that JSON can hold; arrays are in it as base64 of zlib's format.

    Args:
        classes: K names.
        curve: mIoU of the whole split over the thresholds, with what it is of and its best; None where not scored.
        attention: the steps of maps that the page shows; an image names its own by their positions.
    """
    names = {str(label): {"name": shown(name), "color": color} for label, (name, color) in labels(classes).items()}
    values: dict[str, Any] = {"scale": explorer.scale, "bins": explorer.bins, "labels": names, "curve": curve}
    values["thresholds"] = [f"{number / explorer.bins:.3g}" for number in range(explorer.bins)]
    start = explorer.threshold if curve is None else curve["threshold"]
    values["start"] = min(round(start * explorer.bins), explorer.bins - 1)
    images = []
    for image in explorer.images:
        steps = [number for number, of in enumerate(attention) if of.image_id == image.image_id]
        images.append(_image_data(image, explorer.related_images.get(image.image_id, ()), steps))
    return values | {"images": images}


def _image_data(panel: Panel, related: Sequence[Related], steps: list[int]) -> dict[str, Any]:
    """An image at no more than SIDE pixels a side."""
    image, maps = fit_picture(panel.image, SIDE).rgb, panel.kept
    assert maps is not None
    return {
        "id": shown(panel.image_id),
        "height": image.shape[0],
        "width": image.shape[1],
        "full": panel.full_size,
        "picture": data_uri(Image.fromarray(image), "JPEG"),
        "truth": None if panel.truth is None else _packed(resize_labels(panel.truth, *image.shape[:2])),
        "labels": (maps.classes + 1).tolist(),
        "maps": _packed(maps.maps.astype("<f4")),
        "grids": [grid._asdict() for grid in maps.grids],
        "related": [
            {
                "label": of.tag + 1,
                "number": of.number,
                "tiles": [{"id": shown(tile.title), "picture": data_uri(tile.picture, "JPEG")} for tile in of.tiles],
            }
            for of in related
        ],
        "steps": steps,
    }


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
