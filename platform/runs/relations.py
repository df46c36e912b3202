"""The related images of a run's localization maps, as configured."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.neighbors import rounded
from mcis.datasets.relations import Relations, draw
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.runs.workspace import read_table

VECTORS = "vectors"
"""The table of the images' vectors in the output of the stage localize, where its maps are related to nearest ones."""


def read_vectors(folder: Path) -> NDArray[np.float32]:
    """The vectors (N, C') of that table, as `neighbors.nearest_images` takes them."""
    return rounded(np.stack(read_table(folder)["vector"].to_numpy(zero_copy_only=False)).astype(np.float32))


def draw_relations(
    config: LocalizeConfig,
    seed: int,
    tags: Tags,
    source: NDArray[np.bool_],
    vectors: NDArray[np.float32] | None = None,
) -> Relations:
    """The related images of all maps, as configured; arguments as of `relations.draw`."""
    return draw(
        tags,
        source,
        seed=seed,
        related=config.related,
        related_by=config.related_by,
        related_may_repeat=config.related_may_repeat,
        related_from=config.related_from,
        contrastive=config.method.contrastive,
        vectors=vectors,
    )
