"""The related images of a run's localization maps, as configured."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcis.datasets.sampling.related_images import (
    RELATED_IMAGE_RULES,
    Relations,
    draw_related_images,
    rounded_unit_vectors,
)
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import of_source, split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table

VECTORS = "vectors"
"""The table of the images' vectors in the output of the stage localize, where its maps are related to nearest ones."""


def read_vectors(folder: Path) -> NDArray[np.float32]:
    """The vectors (N, C') of that table, see `rounded_unit_vectors`."""
    return rounded_unit_vectors(
        np.stack(read_table(folder)["vector"].to_numpy(zero_copy_only=False)).astype(np.float32)
    )


def draw_relations(
    config: LocalizeConfig, seed: int, tags: Tags, source: NDArray[np.bool_], vectors: NDArray[np.float32] | None = None
) -> Relations:
    """The related images of all maps, as configured; arguments as of `related_images.draw_related_images`."""
    return draw_related_images(
        tags,
        source,
        seed=seed,
        related=config.related,
        related_by=config.related_by,
        related_may_repeat=config.related_may_repeat,
        contrastive=config.method.contrastive,
        vectors=vectors,
    )


class MapRelations(NamedTuple):
    """What the finished maps of a run were made of.

    Attributes:
        rows: the N tagged training images, as the index has them.
        relations: of their maps; an image is a position in `rows`.
    """

    rows: pa.Table
    relations: Relations

    def of(self, row: int) -> Iterator[tuple[int, list[int]]]:
        """The class index of each map of an image, and its related images."""
        for number in range(*self.relations.start[row : row + 2].tolist()):
            yield int(self.relations.tag[number]), self.relations.related[number].tolist()


def relations_of_run(config: Config, context: RunContext) -> MapRelations | None:
    """The related images of the maps that the stage localize wrote; None where maps are of a single round."""
    if not config.localize.related:
        return None
    rows = split_rows(context, "train", tagged=True)
    asked = RELATED_IMAGE_RULES[config.localize.related_by].needs_vectors
    vectors = read_vectors(context.inputs["localize"] / VECTORS) if asked else None
    tags = Tags.from_index(rows["tags"], len(context.classes))
    return MapRelations(rows, draw_relations(config.localize, config.seed, tags, of_source(rows), vectors))
