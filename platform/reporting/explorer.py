"""What a reader of the report may try out: training images with their maps as they are kept, to set against thresholds.

The page embeds a map at its own size, and its script (templates/explorer_numbers.js) resizes it, scales it and compares
it with a threshold as the evaluation does. It computes at the size of the embedded picture and truth, at most SIDE
pixels on the longer side: where the truth is no larger, its IoU is the one that the stage `evaluate` finds.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.images.decode import fit_picture, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.outputs.relations import MapRelations
from mcis.platform.outputs.tables import ImageMaps, image_maps
from mcis.platform.reporting.html import data_uri, shown
from mcis.platform.reporting.panels import Panel, Steps, Tile, labels
from mcis.platform.runs.context import RunContext

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
class ExplorerImage:
    """An image with what is set against thresholds.

    Attributes:
        image: (h, w, 3) uint8 RGB, at most SIDE pixels a side.
        truth: (h, w) uint8 labels, 255 ignored; None where there is none.
        full_size: height and width of the image's file, at which the program scores it, pixels.
        maps: its maps as the stage localize keeps them.
        related: what each of them was made with; empty for maps of a single round.
    """

    image_id: str
    image: NDArray[np.uint8]
    truth: NDArray[np.uint8] | None
    full_size: tuple[int, int]
    maps: ImageMaps
    related: tuple[Related, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Explorer:
    """Images whose maps can be set against thresholds i / bins.

    Attributes:
        scale: of the maps, as of `models.localization.scale_maps`.
        bins: number of thresholds.
        threshold: at which a reader begins where the maps were not scored.
        related: number of related images of each map.
    """

    images: Sequence[ExplorerImage]
    scale: str
    bins: int
    threshold: float
    related: int


def explorer_of_run(
    config: Config, context: RunContext, panels: Sequence[Panel], relations: MapRelations | None
) -> Explorer | None:
    """The explorer of the gallery's first images that have maps; None where there are none."""
    with_maps = {panel.image_id: panel for panel in panels if panel.split == "train" and panel.maps}
    if not with_maps:
        return None
    table = Shards(context.inputs["localize"] / "maps")
    rows = relations.rows if relations else split_rows(context, "train", tagged=True)
    row_of = {image_id: row for row, image_id in enumerate(rows["image_id"].to_pylist())}
    images = []
    for image_id, panel in list(with_maps.items())[:_MOST_IMAGES]:
        row, maps = row_of[image_id], image_maps(table, image_id)
        assert maps is not None, f"no localization map of the tagged image {image_id}"
        image = fit_picture(panel.image, SIDE).rgb
        images.append(
            ExplorerImage(
                image_id=image_id,
                image=image,
                truth=None if panel.truth is None else resize_labels(panel.truth, *image.shape[:2]),
                full_size=(rows["height"][row].as_py(), rows["width"][row].as_py()),
                maps=maps,
                related=tuple(_related(relations, row)) if relations else (),
            )
        )
    return Explorer(
        images=images,
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
        images.append(_image_data(image, steps))
    return values | {"images": images}


def _image_data(image: ExplorerImage, steps: list[int]) -> dict[str, Any]:
    rows, columns = image.maps.grids
    height, width = image.image.shape[:2]
    return {
        "id": shown(image.image_id),
        "height": height,
        "width": width,
        "full": list(image.full_size),
        "picture": data_uri(Image.fromarray(image.image), "JPEG"),
        "truth": None if image.truth is None else _packed(image.truth),
        "labels": (image.maps.classes + 1).tolist(),
        "maps": _packed(image.maps.maps.astype("<f4")),
        "grids": [grid._asdict() for grid in (rows, columns)],
        "related": [
            {
                "label": of.tag + 1,
                "number": of.number,
                "tiles": [{"id": shown(tile.title), "picture": data_uri(tile.picture, "JPEG")} for tile in of.tiles],
            }
            for of in image.related
        ],
        "steps": steps,
    }


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
