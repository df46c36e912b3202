"""Which maps are made together: rounds whose features fit a bound, and the tables that the workers read."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.related_images import Relations, feature_rounds
from mcis.platform.config.maps import LocalizeConfig

_GIB = 2**30


class Plan(NamedTuple):
    """The rounds of all maps.

    Attributes:
        maps: of each round, the ascending numbers of the maps that it makes.
        images: of each round, the ascending positions of the images whose features it keeps.
        shape: of what is kept of an image, (C, H, W).
        gib: size of the largest round's features.
    """

    maps: list[NDArray[np.int64]]
    images: list[NDArray[np.int64]]
    shape: tuple[int, int, int]
    gib: float


def plan_rounds(config: LocalizeConfig, relations: Relations, shape: tuple[int, int, int], classes: int) -> Plan:
    """The rounds that keep to the bound `localize.features_gb`.

    Args:
        shape: of what is kept of an image, (C, H, W), float16.

    Raises:
        UserError: a single map exceeds the bound.
    """
    bound, image_bytes = config.features_gb, 2 * math.prod(shape)
    try:
        maps = feature_rounds(relations, classes, int(bound * _GIB // image_bytes))
    except ValueError as error:
        raise UserError(
            f"localize.features_gb={bound:g} holds the features of {int(bound * _GIB // image_bytes)} images: {error}",
            "space for the images that a map is made of",
            "set localize.features_gb=1 or more",
        ) from None
    images = [relations.images_of(each) for each in maps]
    return Plan(maps, images, shape, max(map(len, images)) * image_bytes / _GIB)


class Round(NamedTuple):
    """One round.

    Attributes:
        folder: where its tables `single` and `maps` and its features lie.
        images: ascending positions of the images whose features it keeps.
        to_embed: what `Embed` reads.
        to_relate: what `Relate` reads.
        label: such as ` 2/3`; empty for the only round.
    """

    folder: Path
    images: NDArray[np.int64]
    to_embed: pa.Table
    to_relate: pa.Table
    label: str

    @property
    def features(self) -> Path:
        """The folder of its features."""
        return self.folder / "features"


def round_folders(plan: Plan, folder: Path) -> list[Path]:
    """Where the rounds' tables lie: below `folder`."""
    return [folder / f"round-{n}" for n in range(len(plan.maps))]


def rounds_of(plan: Plan, folders: Sequence[Path], rows: pa.Table, relations: Relations) -> Iterator[Round]:
    """The rounds in their order. An image's single-round map is made in the first round that embeds the image.

    Args:
        folders: where each round's tables lie.
    """
    embedded = np.zeros(len(rows), bool)
    for number, (own_folder, maps, images) in enumerate(zip(folders, plan.maps, plan.images, strict=True), 1):
        yield Round(
            folder=own_folder,
            images=images,
            to_embed=embed_rows(rows, relations.start, images, ~embedded[images]),
            to_relate=relate_rows(rows, relations, maps, images),
            label=f" {number}/{len(folders)}" if len(folders) > 1 else "",
        )
        embedded[images] = True


def embed_rows(
    rows: pa.Table, start: NDArray[np.int64], images: NDArray[np.int64], fresh: NDArray[np.bool_]
) -> pa.Table:
    """What `Embed` reads: rows of `images`, each with its `slot` in the features, its first map, and `fresh`.

    Args:
        start: where each image's maps begin, (N + 1,).
        images: positions in `rows`, (n,), ascending.
        fresh: whether an image is embedded for the first time, (n,).
    """
    columns = {"slot": np.arange(len(images)), "position": images, "first_map": start[images], "fresh": fresh}
    part = rows.select(["image_id", "uri", "content_hash", "domain", "tags"]).take(pa.array(images))
    return pa.table({**{name: part[name] for name in part.column_names}, **columns})


def relate_rows(rows: pa.Table, relations: Relations, maps: NDArray[np.int64], images: NDArray[np.int64]) -> pa.Table:
    """What `Relate` reads: the images that have any of `maps`, with these maps.

    Columns: image_id, slot (its position in `images`), and lists with an entry per map: tags, maps (their numbers),
    related and others (lists of slots), and ranks (lists of the `others_rank` of the others).

    Args:
        maps: ascending numbers of maps.
        images: ascending positions of images, those that the maps are made of among them.
    """
    targets, first = np.unique(relations.image[maps], return_index=True)
    start = np.append(first, len(maps))
    of_others, counts = relations.others_of(maps)
    related = np.searchsorted(images, relations.related[maps])
    others, ranks = np.searchsorted(images, relations.others[of_others]), relations.others_rank[of_others]
    related_start = np.arange(len(maps) + 1) * related.shape[1]
    others_start = np.concatenate([[0], np.cumsum(counts)])
    return pa.table(
        {
            "image_id": rows["image_id"].take(pa.array(targets)),
            "slot": np.searchsorted(images, targets),
            "tags": _lists(start, relations.tag[maps]),
            "maps": _lists(start, maps),
            "related": _lists(start, _lists(related_start, related.reshape(-1))),
            "others": _lists(start, _lists(others_start, others)),
            "ranks": _lists(start, _lists(others_start, ranks)),
        }
    )


def _lists(starts: NDArray[np.int64], values: pa.Array | NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))
