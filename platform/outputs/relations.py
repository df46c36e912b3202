"""Draws the related images of the localization maps of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.sampling.nearest_images import rounded_unit_vectors
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES, Relations, draw_related_images
from mcis.datasets.storage.folders import path_exists
from mcis.datasets.tags import Positions, Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import from_source_domain, split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_shards, read_table

RELATED_TABLE = "related"
"""Table in the output of the stage `localize`, written for many images whose related images are nearest neighbors: the
number of each map, `map`, and its related images, `related`, as positions among the tagged training images."""
VECTORS = "vectors"
"""Table of image vectors in the output of the stage `localize`, written if related images are nearest neighbors."""


def vector_bytes(channels: int) -> int:
    """Returns about how many bytes the vector of an image takes in the table VECTORS: four per value and its index."""
    return 6 * channels


def read_vectors(folder: Path) -> NDArray[np.float32]:
    """Reads the image vectors, (N, C'), normalized and rounded (`rounded_unit_vectors`).

    Args:
        folder: The table VECTORS.
    """
    vectors = np.stack(read_table(folder)["vector"].to_numpy(zero_copy_only=False))
    return rounded_unit_vectors(vectors.astype(np.float32))


def read_related(folder: Path, maps: int, related: int) -> Positions:
    """Reads the related images of all maps, (T, R).

    Args:
        folder: The table RELATED_TABLE.
        maps: T.
        related: R.
    """
    images = np.empty((maps, related), np.uint32)
    for shard in read_shards(folder):
        values = shard["related"].combine_chunks().flatten().to_numpy()
        images[shard["map"].to_numpy()] = values.reshape(len(shard), related)
    return images


def draw_relations(
    config: LocalizeConfig,
    seed: int,
    tags: Tags,
    is_source: NDArray[np.bool_],
    vectors: NDArray[np.float32] | None = None,
    related_images: Positions | None = None,
) -> Relations:
    """Draws the related images of all maps for a configuration. For the arguments, see `draw_related_images`."""
    return draw_related_images(
        tags,
        is_source,
        seed=seed,
        related=config.related,
        related_by=config.related_by,
        related_may_repeat=config.related_may_repeat,
        contrastive=config.method.contrastive,
        vectors=vectors,
        related_images=related_images,
    )


class MapRelations(NamedTuple):
    """The images that a run's finished maps were made with.

    Attributes:
        rows: The N tagged training images, rows of the index.
        relations: The related images of their maps, as positions in `rows`.
    """

    rows: pa.Table
    relations: Relations

    def maps_of(self, row: int) -> Iterator[tuple[int, list[int]]]:
        """Yields the class index and the related images of each map of the image at position `row`."""
        first, end = self.relations.start[row : row + 2].tolist()
        for number in range(first, end):
            yield int(self.relations.tag[number]), self.relations.related[number].tolist()


def relations_of_run(config: Config, context: RunContext) -> MapRelations | None:
    """Returns the related images of the maps that the stage `localize` made; None for single-round or imported maps."""
    if not config.localize.related_of_maps:
        return None

    rows = split_rows(context, "train", tagged=True)
    tags = Tags.from_index(rows["tags"], len(context.classes))
    vectors = None
    related_images = None
    if RELATED_IMAGE_RULES[config.localize.related_by].needs_vectors:
        localized = context.stage_outputs["localize"]
        if path_exists(localized / RELATED_TABLE):
            related_images = read_related(localized / RELATED_TABLE, len(tags.values), config.localize.related)
        else:
            vectors = read_vectors(localized / VECTORS)
    is_source = from_source_domain(rows)
    return MapRelations(rows, draw_relations(config.localize, config.seed, tags, is_source, vectors, related_images))
