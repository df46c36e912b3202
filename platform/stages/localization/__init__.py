"""Stage 3: classifier + index -> localization maps of every training image's tags, float16 (MAPS_SCHEMA).

A map holds class activations at feature resolution, unscaled; `models.localization.scale_maps` makes them comparable.
Two tables: `single` holds the single-round maps, `maps` those with related images (section 3.2). Each image is embedded
once; its features are kept, float16, in memory-mapped files, one for each shard of the images, that all workers read,
so that memory stays bounded by what the operating system caches and a map costs attention alone. Where the features of
all images exceed `localize.features_gb`, images are embedded for each map that needs them; the maps are the same.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sampling.related_images import RELATED
from mcis.datasets.storage.copies import copy_folder, names_in, remove
from mcis.datasets.tags import Tags
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import cached, features_cache
from mcis.platform.engine.mapping import map_table, shards_of
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import of_source, of_split, split_rows
from mcis.platform.runs.relations import VECTORS, draw_relations, read_vectors
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import Workspace, fingerprint
from mcis.platform.stages.localization.features import feature_shape
from mcis.platform.stages.localization.notes import Noted, noted_of
from mcis.platform.stages.localization.workers import Embed, Pool, Relate, embed_rows, relate_rows

_LOWER = "localize.batch"
"""What a worker takes less memory with."""
EMBEDDED = "embedded"
"""Folder of what is embedded while maps are made of it."""
_GIB = 2**30


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where related images are to be of a domain that no tagged training image is of."""
    if config.localize.related:
        _check_domain(config, of_split(listing.table, "train", tagged=True))


def inputs(config: Config, context: RunContext) -> None:
    """The images are the index's; they depend on nothing else outside."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the localization maps of all tagged training images; after a kill only missing shards are computed.

    Raises:
        UserError: no training image has a tag, or none is of the domain that related images are to be of.
    """
    rows, all_images = split_rows(context, "train", tagged=True), len(split_rows(context, "train", columns=["tags"]))
    if not len(rows):
        raise UserError(f"none of {all_images} training images has a tag", "tagged images to localize", "add tags")
    maps = int(pc.sum(pc.list_value_length(rows["tags"])).as_py())
    counts = {"images": len(rows), "images without tags": all_images - len(rows), "maps": maps}
    noted, busy, part = Noted({}, []), 0.0, context.part
    relations, source = None, of_source(rows)
    if config.localize.related:
        _check_domain(config, rows)
        tags = Tags.of_index(rows["tags"], len(context.classes))
        vectors = _vectors(config, context, rows) if RELATED[config.localize.related_by].vectors else None
        relations = draw_relations(config.localize, config.seed, tags, source, vectors)
        noted = noted_of(config.localize, relations, tags, source)
    wanted = shards_of(len(rows), config.compute.shard_rows).keys()
    if not all(wanted <= set(names_in(part / table)) for table in ("single", "maps")):
        embedded, busy = _embedded(config, context, rows)
        if relations is not None:
            features = embedded / "features" if _keeps(config, context, len(rows)) else None
            arguments = *_arguments(config, context, rows), features, _selves(config, embedded), rows, source
            related = relate_rows(rows, relations)
            busy += _map(config, related, Relate, arguments, part / "maps", "localize")
            if features is None:
                noted.notes.append(
                    f"the features of {len(rows)} images exceed localize.features_gb={config.localize.features_gb:g}: "
                    "images were embedded for each map that needed them"
                )
        copy_folder(embedded / "single", part / "single")
        if relations is None:
            copy_folder(part / "single", part / "maps")
    remove(part / EMBEDDED)
    return StageResult(busy=busy, counts=counts | noted.counts, notes=tuple(noted.notes))


def _arguments(config: Config, context: RunContext, rows: pa.Table) -> tuple[Any, ...]:
    """What all workers are made of."""
    pretrained, outputs = classifier_weights(config, context.workspace), None
    if config.classifier.from_features and pretrained:
        outputs = features_cache(rows, config.classifier, pretrained, context, config.compute, images=len(rows))
    return config, context.inputs["train_classifier"], len(context.classes), config.compute.gpu, outputs


def _map(config: Config, rows: pa.Table, worker: Any, arguments: tuple[Any, ...], table: Path, label: str) -> float:
    """Maps rows into a table by workers with a network; returns the busy seconds."""
    compute = config.compute
    return map_table(rows, worker, arguments, table, label=label, compute=compute, network=True, lower=_LOWER).busy


def _vectors(config: Config, context: RunContext, rows: pa.Table) -> NDArray[np.float32]:
    """Of all images, by which the nearest ones are found, (N, C'); the table is kept, as the report asks for it."""
    folder, numbered = context.part / VECTORS, rows.append_column("position", pa.array(np.arange(len(rows))))
    _map(config, numbered, Pool, _arguments(config, context, rows), folder, "vectors")
    return read_vectors(folder)


def _bytes(config: Config, context: RunContext, images: int) -> int:
    """Of the features of so many images, float16."""
    shape = feature_shape(config, context.inputs["train_classifier"], len(context.classes))
    return 2 * images * math.prod(shape)


def _keeps(config: Config, context: RunContext, images: int) -> bool:
    """Whether the features of all images are kept until their maps are made, or for further runs."""
    localize = config.localize
    wanted = localize.related > 0 or localize.keep_features
    return wanted and _bytes(config, context, images) <= localize.features_gb * _GIB


def _selves(config: Config, embedded: Path) -> Path | None:
    """The folder of the self pairs' maps, which the released maps have alone."""
    localize = config.localize
    return embedded / "selves" if localize.related and localize.method.name == "released" else None


def _embedded(config: Config, context: RunContext, rows: pa.Table) -> tuple[Path, float]:
    """A folder with the single-round maps, the features where they are kept, and the self pairs' maps; busy seconds."""
    busy, localize = 0.0, config.localize
    keeps, selves = _keeps(config, context, len(rows)), _selves(config, Path())

    def fill(folder: Path) -> None:
        nonlocal busy
        features = folder / "features" if keeps else None
        arguments = *_arguments(config, context, rows), features, _selves(config, folder)
        busy += _map(config, embed_rows(rows), Embed, arguments, folder / "single", "embed")

    if localize.keep_features and keeps:
        what = (
            context.result("train_classifier", StageResult).identity,
            [localize.extra_scales, localize.mirror, localize.batch, config.compute.shard_rows, selves is not None],
            made_with(__name__, config.compute.device),
            [rows["content_hash"].to_pylist(), rows["tags"].to_pylist()],
        )
        size, bound = _bytes(config, context, len(rows)), int(localize.features_gb * _GIB)
        if folder := cached(f"embedded-{fingerprint(what)}", fill, context, size, bound):
            return folder, busy
    fill(context.part / EMBEDDED)
    return context.part / EMBEDDED, busy


def _check_domain(config: Config, rows: pa.Table) -> None:
    """Raises UserError where none of the rows is of the domain that related images are to be of."""
    domain = config.localize.related_from
    if domain != "both" and not (of_source(rows) == (domain == "source")).any():
        raise UserError(
            f"localize.related_from is {domain}, but no tagged training image of setting {config.setting} is of it",
            "single-label images beside a setting's own" if domain == "source" else "images of the setting's own",
            "set localize.related_from=both, or a setting such as voc+single",
        )
