"""Stage 3: classifier + index -> localization maps for the tags of every training image, float16 (MAPS_SCHEMA).

A map holds unscaled class activations at feature resolution; `models.localization.scale_maps` makes maps comparable.
There are two tables: `single` with single-round maps, and `maps` with maps that use related images (section 3.2).

Each image passes through the backbone once. If maps use related images, its features are written to files, one per
shard, as float16 or int8 (`localize.feature_type`). All workers map the files into memory. Workers therefore share the
page cache, and a map costs only its attention.

With `localize.maps` the maps are those of another program: the table `maps` has IMPORTED_MAPS_SCHEMA, and there is no
table `single`.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES, Relations
from mcis.datasets.storage.folders import copy_folder, names_in, remove
from mcis.datasets.tables.spans import ShardSpans
from mcis.datasets.tags import Tags
from mcis.platform.config.maps import LocalizeConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import training_features
from mcis.platform.engine.mapping import map_table, shards_of
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.outputs.read_index import from_source_domain, rows_in_split, split_rows, tagged_among_negatives
from mcis.platform.outputs.relations import RELATED_TABLE, VECTORS, draw_relations, read_vectors, relations_of_run
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.localization.imported import check_map_files, import_maps, map_file_contents
from mcis.platform.stages.localization.nearest import MAPS_PER_TASK, find_nearest_images
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, hop_table, read_images, relate_rows

EMBEDDED = "embedded"
"""Temporary folder of intermediate results: single-round maps, features, maps of self pairs, vectors, and maps of all
hops but the last."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError if maps of another program are wanted, but no file belongs to a training image."""
    if config.localize.is_imported:
        rows = rows_in_split(listing.table, "train", tagged=True)
        check_map_files(config.localize, rows["image_id"].to_pylist(), listing.table["image_id"].to_pylist())


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the format and the contents of the map files of another program."""
    return map_file_contents(config.localize, context) if config.localize.is_imported else None


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the localization maps of all tagged training images. After a kill only missing shards are computed.

    Raises:
        UserError: No training image has a tag, features exceed the range of float16, or maps of another program are
            missing or refused.
    """
    rows = split_rows(context, "train", tagged=True)
    num_train = len(split_rows(context, "train", columns=["tags"]))
    if not len(rows):
        raise UserError(f"none of {num_train} training images has a tag", "tagged images to localize", "add tags")

    if config.localize.is_imported:
        return import_maps(config, context)

    if _has_all_maps(config, context.output, len(rows)):
        relations = _relations_of_maps(config, context)
    else:
        relations = _make_maps(config, context, rows)

    counts: dict[str, Any] = {
        "images": len(rows),
        "images without tags": num_train - len(rows),
        "maps": int(pc.sum(pc.list_value_length(rows["tags"])).as_py()),
    }
    notes: tuple[str, ...] = ()
    if relations:
        tags = Tags.from_index(rows["tags"], len(context.classes))
        relation_counts, notes = describe_relations(config.localize, relations, tags)
        counts.update(relation_counts)
    remove(context.output / EMBEDDED)
    return StageResult(counts=counts, notes=notes)


def _has_all_maps(config: Config, output: Path, num_rows: int) -> bool:
    """Whether an earlier call made all maps, and was ended when it removed the intermediate results."""
    shards = shards_of(num_rows, config.compute.shard_rows).keys()
    return all(shards <= set(names_in(output / table)) for table in ("single", "maps"))


def _relations_of_maps(config: Config, context: RunContext) -> Relations | None:
    """The relations from which the maps in the output were made; None for single-round maps."""
    stage_outputs = {**context.stage_outputs, "localize": context.output}
    made = relations_of_run(config, dataclasses.replace(context, stage_outputs=stage_outputs))
    return made.relations if made else None


def _make_maps(config: Config, context: RunContext, rows: pa.Table) -> Relations | None:
    """Makes the maps of all images; returns the relations that they were made from, or None for single-round maps."""
    embedded = context.output / EMBEDDED
    _remove_other_shards(config, embedded, len(rows))
    _embed(config, context, rows, embedded)
    copy_folder(embedded / "single", context.output / "single")
    if config.localize.related:
        return _relate(config, context, rows, embedded)
    copy_folder(embedded / "single", context.output / "maps")
    return None


def _remove_other_shards(config: Config, embedded: Path, num_rows: int) -> None:
    """Removes all intermediate results if some were computed with another number of rows per shard."""
    shards = shards_of(num_rows, config.compute.shard_rows).values()
    spans = {(shard.first, shard.first + shard.num_rows) for shard in shards}
    for table in ("features", "single", VECTORS):
        found = ShardSpans(names_in(embedded / table))
        if not spans.issuperset(zip(found.first.tolist(), found.stop.tolist(), strict=True)):
            remove(embedded)
            return


def _embed(config: Config, context: RunContext, rows: pa.Table, embedded: Path) -> None:
    """Embeds all images: writes their single-round maps, and their features if maps use related images."""
    # The classifier was trained on the tagged images and the negatives, so the features of both are cached together.
    cached_rows = rows
    is_tagged = tagged_among_negatives(context)
    if not is_tagged.all():
        cached_rows = split_rows(context, "train", tagged=True, negatives=True)
    cached_outputs = training_features(cached_rows, config, context) if config.classifier.trains_on_features else None
    to_embed = embed_rows(rows, np.flatnonzero(is_tagged))

    weights = context.stage_outputs["train_classifier"]
    make_worker = functools.partial(Embed, config, weights, len(context.classes), cached_outputs, embedded)
    read = functools.partial(read_images, config, cached_outputs)
    _run_workers(config, to_embed, make_worker, embedded / "single", "embed", read)


def _relate(config: Config, context: RunContext, rows: pa.Table, embedded: Path) -> Relations:
    """Computes the maps with related images, hop by hop; returns the relations of the images."""
    localize = config.localize
    tags = Tags.from_index(rows["tags"], len(context.classes))
    rule = RELATED_IMAGE_RULES[localize.related_by]
    vectors = None
    related_images = None
    if rule.needs_vectors:
        copy_folder(embedded / VECTORS, context.output / VECTORS)  # the report reads them too
    if rule.is_nearest and len(tags.values) > MAPS_PER_TASK:
        related_images = find_nearest_images(tags, config.seed, localize.related, embedded, config.compute)
        copy_folder(embedded / RELATED_TABLE, context.output / RELATED_TABLE)
    elif rule.needs_vectors:
        vectors = read_vectors(context.output / VECTORS)
    relations = draw_relations(localize, config.seed, tags, from_source_domain(rows), vectors, related_images)

    weights = context.stage_outputs["train_classifier"]
    make_relater = functools.partial(Relate, config, weights, len(context.classes), embedded, from_source_domain(rows))
    to_relate = relate_rows(rows, relations, localize.hops)
    for hop in range(1, localize.hops):
        make_worker = functools.partial(make_relater, hop)
        _run_workers(config, to_relate, make_worker, embedded / hop_table(hop), f"localize, hop {hop}")
    make_worker = functools.partial(make_relater, localize.hops)
    _run_workers(config, to_relate, make_worker, context.output / "maps", "localize")
    return relations


def _run_workers(
    config: Config,
    rows: pa.Table,
    make_worker: Callable[[], Worker],
    table: Path,
    label: str,
    read: Worker | None = None,
) -> None:
    """Runs `map_table` with workers that run a network."""
    map_table(
        rows,
        table,
        make_worker=make_worker,
        read=read,
        label=label,
        compute=config.compute,
        network=True,
        memory_hint="lower localize.batch",
    )


def describe_relations(
    config: LocalizeConfig, relations: Relations, tags: Tags
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Counts the maps whose related images differ from the configured ones because there are too few images.

    Returns:
        The counts for the report, and notes.
    """
    num_maps = len(relations.tag)
    if config.related_by == "itself":
        return {"maps related to their own image alone": num_maps}, ()

    rule = RELATED_IMAGE_RULES[config.related_by]
    counts: dict[str, Any] = {}
    notes = []
    if rule.is_control:
        class_counts = np.bincount(relations.tag, minlength=tags.classes)
        everywhere = np.flatnonzero(class_counts == len(tags))
        num_with_class = int(np.isin(relations.tag, everywhere).sum())
        counts["maps related to images with their class, because all have it"] = num_with_class
        if num_with_class:
            notes.append(
                f"the related images of {num_with_class} map(s) have the map's class, because every image has it"
            )

    num_repeating = relations.num_repeating()
    counts["maps whose related images repeat"] = num_repeating
    if num_repeating and not config.related_may_repeat:
        notes.append(f"{num_repeating} map(s) {rule.repetition_note}")
    if config.method.contrastive:
        counts["maps with a contrastive part"] = int((np.diff(relations.contrastive_start) > 0).sum())
    return counts, tuple(notes)
