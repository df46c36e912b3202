"""Stage 3: classifier + index -> localization maps of every training image's tags, float16 (MAPS_SCHEMA).

A map holds class activations at feature resolution, unscaled; `models.localization.scale_maps` makes them comparable.
Two tables: `single` holds the single-round maps, `maps` those with related images (section 3.2). Each image is embedded
once; where maps have related images, its features are kept, float16, in memory-mapped files, one for each shard of the
images, that all workers read: memory stays bounded by what the system caches, and a map costs attention alone.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES, Relations
from mcis.datasets.storage.folders import copy_folder, names_in, remove
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import features_cache
from mcis.platform.engine.mapping import Worker, map_table, shards_of
from mcis.platform.outputs.read_index import from_source_domain, split_rows
from mcis.platform.outputs.relations import VECTORS, draw_relations, read_vectors
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, relate_rows

EMBEDDED = "embedded"
"""Folder of what maps are made of, meanwhile: `single`, `features`, `selves` of released maps, maps of earlier hops."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the localization maps of all tagged training images; after a kill only missing shards are computed.

    Raises:
        UserError: no training image has a tag.
    """
    rows, all_images = split_rows(context, "train", tagged=True), len(split_rows(context, "train", columns=["tags"]))
    if not len(rows):
        raise UserError(f"none of {all_images} training images has a tag", "tagged images to localize", "add tags")
    tags, part = Tags.from_index(rows["tags"], len(context.classes)), context.part
    counts, notes = dict[str, Any](), tuple[str, ...]()
    network = config, context.inputs["train_classifier"], len(context.classes)
    embedded, outputs = part / EMBEDDED, None
    if config.classifier.trains_on_features:
        outputs = features_cache(rows, config, context)
    shards = shards_of(len(rows), config.compute.shard_rows)
    made = [name for table in ("single", VECTORS) for name in names_in(embedded / table)]
    if any(name.startswith("part-") and name not in shards for name in made):
        remove(embedded)  # of another division, as are the features and vectors beside it
    make_embedder = functools.partial(Embed, *network, outputs, embedded)
    _map(config, embed_rows(rows), make_embedder, embedded / "single", "embed")
    copy_folder(embedded / "single", part / "single")
    if config.localize.related:
        vectors = None
        if RELATED_IMAGE_RULES[config.localize.related_by].needs_vectors:  # the report reads them, too
            copy_folder(embedded / VECTORS, part / VECTORS)
            vectors = read_vectors(part / VECTORS)
        relations = draw_relations(config.localize, config.seed, tags, from_source_domain(rows), vectors)
        make_relater = functools.partial(Relate, *network, embedded, from_source_domain(rows))
        hops = config.localize.hops
        to_relate = relate_rows(rows, relations, hops)
        for hop in range(1, hops):
            make_worker = functools.partial(make_relater, hop)
            _map(config, to_relate, make_worker, embedded / f"maps-{hop}", f"localize, hop {hop}")
        _map(config, to_relate, functools.partial(make_relater, hops), part / "maps", "localize")
        counts, notes = related_counts(config.localize, relations, tags)
    else:
        copy_folder(embedded / "single", part / "maps")
    remove(part / EMBEDDED)
    maps = int(pc.sum(pc.list_value_length(rows["tags"])).as_py())
    counts = {"images": len(rows), "images without tags": all_images - len(rows), "maps": maps} | counts
    return StageResult(counts=counts, notes=notes)


def _map(config: Config, rows: pa.Table, make_worker: Callable[[], Worker], table: Path, label: str) -> None:
    """Maps rows into a table by workers with a network."""
    map_table(
        rows,
        table,
        make_worker=make_worker,
        label=label,
        compute=config.compute,
        network=True,
        memory_hint="localize.batch",
    )


def related_counts(config: LocalizeConfig, relations: Relations, tags: Tags) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Counts for the report of maps that lack related images as they are asked for, and notes on them."""
    rule, maps = RELATED_IMAGE_RULES[config.related_by], len(relations.tag)
    if config.related_by == "itself":
        return {"maps related to their own image alone": maps}, ()
    counts, notes = {}, []
    if rule.is_control:
        everywhere = np.flatnonzero(np.bincount(relations.tag, minlength=tags.classes) == len(tags))
        having = int(np.isin(relations.tag, everywhere).sum())
        counts["maps related to images of their class for want of others"] = having
        if having:
            notes.append(f"{having} map(s) are related to images of their class, not of others: every image has it")
    ordered = np.sort(relations.related, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ordered == relations.image[:, None]).any(axis=1)
    counts["maps whose related images repeat"] = int(repeats.sum())
    if repeats.any() and not config.related_may_repeat:
        notes.append(f"{repeats.sum()} map(s) {rule.repetition_note}")
    if config.method.contrastive:
        counts["maps with a contrastive part"] = int((np.diff(relations.contrastive_start) > 0).sum())
    return counts, tuple(notes)
