"""The related images of a run's localization maps, as configured."""

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.relations import Relations, draw
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig


def draw_relations(config: LocalizeConfig, seed: int, tags: Tags, source: NDArray[np.bool_]) -> Relations:
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
        bank=config.method.bank if config.method.evidence else 0,
    )
