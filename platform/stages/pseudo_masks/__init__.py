"""Stage 5: localization maps + background cue -> pseudo masks (MASKS_SCHEMA) of tagged training images and negatives.

A negative, which shows none of the classes, has no localization map. Its mask is all background.
"""

import collections
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import join_shortened
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.masks import tags_of_mask
from mcis.datasets.index import Listing
from mcis.datasets.tables.shards import Shards
from mcis.platform.config.sections import Config
from mcis.platform.engine.errors import fewer_processes
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.outputs.corrected_masks import CORRECTED, with_corrected
from mcis.platform.outputs.imported_files import IMPORTED_FILE, palette_note, unused_note
from mcis.platform.outputs.read_index import read_image_ids, rows_in_split, split_rows
from mcis.platform.outputs.regions import RowsWithRegions, check_regions, regions_digest, with_regions
from mcis.platform.outputs.tables import DIFFERS_FROM_INDICES, with_maps_position
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import contents_digest, file_stamps, read_table
from mcis.platform.runs.results import MasksResult, Problem
from mcis.platform.runs.scores import FULL_SUPERVISION, percent
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.pseudo_masks.making import GROUND_TRUTH, MakeMasks, copy_truth, import_masks
from mcis.platform.stages.pseudo_masks.needed_files import (
    background_cue,
    check_saliency_is_no_truth,
    check_truth_exists,
    made_by_rule,
    mask_files,
    rows_of_rule,
    will_use_saliency,
    with_imported,
)

_MIN_SHARE = 0.002
"""Minimum share of foreground pixels, and of background pixels, in all masks from which a network can learn."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Checks that tagged training images have the saliency maps or ground-truth masks that pseudo masks need.

    Raises:
        UserError: A required saliency map is missing or is the ground-truth mask; with full supervision, a
            ground-truth mask is missing; the corrected masks do not match the images; or files of segments or
            detections are missing or damaged.
    """
    rows = rows_in_split(listing.table, "train", tagged=True, negatives=True)
    rows = with_corrected(rows, config.data.corrected_masks, listing.image_ids())
    if config.supervision == "full":
        check_truth_exists(rows)
    elif config.pseudo_masks.is_imported:
        files = mask_files(config.pseudo_masks)
        tagged_ids = rows.filter(pc.invert(rows["is_negative"]))["image_id"].to_pylist()
        files.check_any_matches(tagged_ids, listing.image_ids())
    elif will_use_saliency(config, rows_of_rule(rows)):
        check_saliency_is_no_truth(rows_of_rule(rows))
    elif config.pseudo_masks.regions:
        with_files = _with_regions(config, rows, listing.classes, listing.image_ids()).rows
        check_regions(with_files, config.pseudo_masks, config.data.max_pixels)
    elif config.pseudo_masks.rule == "segments":
        require_module("skimage.segmentation", extra="segments")


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the longest side of masks, stamps of the saliency maps or ground-truth masks that are
    read or the contents of the files of other programs, and stamps of corrected masks."""
    rows = _rows(config, context)
    rule_rows = rows_of_rule(rows)
    files: Any = None
    if config.supervision == "full":
        files = file_stamps(rows["mask_uri"])
    elif config.pseudo_masks.is_imported:
        imported = with_imported(config.pseudo_masks, rows, read_image_ids(context))
        files = contents_digest(imported[IMPORTED_FILE].to_pylist())
    elif will_use_saliency(config, rule_rows):
        files = file_stamps(rule_rows["saliency_uri"])
    elif config.pseudo_masks.regions:
        files = regions_digest(rule_rows["image_id"].to_pylist(), config.pseudo_masks, read_image_ids(context))
    elif config.pseudo_masks.rule == "segments":
        files = f"scikit-image {importlib.metadata.version('scikit-image')}"  # its superpixels
    return config.data.max_side, files, file_stamps(rows[CORRECTED])


def run(config: Config, context: RunContext) -> MasksResult:
    """Makes the pseudo masks in parallel, or copies the ground truth with full supervision.

    Raises:
        UserError: A saliency map or a mask is missing, unreadable or of the wrong size.
    """
    rows = _rows(config, context)
    is_full = config.supervision == "full"
    rule_rows = rows_of_rule(rows)
    cue = GROUND_TRUTH if is_full else background_cue(config, rule_rows)
    notes: list[str] = []
    if config.pseudo_masks.regions and not is_full:
        rows, region_notes = _with_regions(config, rows, context.classes, read_image_ids(context))
        notes += region_notes
    _make_masks(config, context, rows)

    masks = read_table(context.output / "masks", ["ignored", "foreground", "cue"])
    tagged_masks = masks.filter(pc.invert(rows["is_negative"]))
    ignored = float(pc.mean(tagged_masks["ignored"]).as_py())
    foreground = float(pc.mean(tagged_masks["foreground"]).as_py())
    ignored_masks = masks.filter(pc.greater_equal(masks["ignored"], 1.0))
    corrected_counts, contradictions = _compare_corrected_masks(context, rows)

    notes += _rule_notes(config, cue, has_rule_rows=len(rule_rows) > 0)
    notes += _imported_notes(config, context, len(tagged_masks), ignored)
    for group in pc.value_counts(ignored_masks["cue"]).to_pylist():
        reason = "they have too little foreground" if group["values"] == "saliency" else "all their pixels are 255"
        notes.append(f"{group['counts']} pseudo mask(s) are ignored entirely, because {reason}")
    if contradictions:
        notes.append(
            f"corrected masks contradict the tags, which are not changed, in {len(contradictions)} cases: "
            f"{join_shortened(contradictions)}"
        )
    return MasksResult(
        background_cue=cue,
        counts={
            "masks": len(rows),
            "masks by domain and cue": _count_by_domain_and_cue(rows["domain"], masks["cue"]),
            "corrected masks by class": corrected_counts,
            "ignored whole": len(ignored_masks),
            "ignored share": round(ignored, 4),
        },
        notes=tuple(notes),
        problem=_problem(len(tagged_masks), foreground, ignored),
    )


def _rows(config: Config, context: RunContext) -> pa.Table:
    """Tagged training images and negatives, with the file of the corrected mask or null in the column `corrected`."""
    rows = split_rows(context, "train", tagged=True, negatives=True)
    return with_corrected(rows, config.data.corrected_masks, read_image_ids(context))


def _with_regions(config: Config, rows: pa.Table, classes: Sequence[str], all_ids: Iterable[str]) -> RowsWithRegions:
    """Adds the segments or detections of the images whose masks the rule makes."""
    return with_regions(rows, made_by_rule(rows).to_pylist(), config.pseudo_masks, classes, all_ids)


def _make_masks(config: Config, context: RunContext, rows: pa.Table) -> None:
    """Writes the table of masks."""
    worker: Worker | None = None
    make_worker: Callable[[], Worker] | None = None
    if config.supervision == "full":
        worker = functools.partial(copy_truth, len(context.classes), config.data.max_side)
    elif config.pseudo_masks.is_imported:
        rows = with_imported(config.pseudo_masks, rows, read_image_ids(context))
        worker = functools.partial(import_masks, len(context.classes), config.data.max_side)
    else:
        maps = Shards(context.stage_outputs["localize"] / "maps")
        affinity_net = context.stage_outputs.get("train_affinity")
        gpu = config.uses_random_walk and config.compute.gpu
        make_worker = functools.partial(MakeMasks, config, len(context.classes), maps, affinity_net, gpu)
        rows = with_maps_position(rows)
    map_table(
        rows,
        context.output / "masks",
        worker=worker,
        make_worker=make_worker,
        label="pseudo masks",
        compute=config.compute,
        network=config.uses_random_walk,
        memory_hint=f"lower data.max_side, or {fewer_processes()}",
    )


def _count_by_domain_and_cue(domains: pa.ChunkedArray, cues: pa.ChunkedArray) -> dict[str, int]:
    """Returns the number of masks of each `<domain>, <cue>`, in the order in which these first appear."""
    table = pa.table({"domain": domains, "cue": cues})
    # In one thread, the groups are in the order of their first rows.
    groups = table.group_by(["domain", "cue"], use_threads=False).aggregate([("cue", "count")])
    return {f"{group['domain']}, {group['cue']}": group["cue_count"] for group in groups.to_pylist()}


def _rule_notes(config: Config, cue: str, *, has_rule_rows: bool) -> list[str]:
    """Notes on supervision by the ground truth, or on the background cue that the rule `auto` chose.

    Args:
        config: The configuration.
        cue: See `background_cue`.
        has_rule_rows: Whether the rule makes a mask of any tagged image. If not, all have corrected masks.
    """
    if config.supervision == "full":
        return [FULL_SUPERVISION]
    if config.pseudo_masks.rule != "auto":
        return []
    if not has_rule_rows:
        return ["no background cue is used, because all tagged images have corrected masks"]
    reasons = {"saliency": "all images have saliency maps", "crf": "there are no saliency maps"}
    return [f"background cue: {cue}, because {reasons.get(cue, 'these images have no saliency map')}"]


def _imported_notes(config: Config, context: RunContext, num_tagged: int, ignored: float) -> list[str]:
    """Notes on masks of another program: ignored pixels, classes that are no tags, palettes, and files that are not
    read."""
    if not config.pseudo_masks.is_imported:
        return []

    notes = []
    if ignored:
        notes.append(
            f"{percent(ignored)} of the pixels of imported masks are 255: not trained on, and scored as background"
        )
    masks = read_table(context.output / "masks", ["image_id", "other_classes", DIFFERS_FROM_INDICES.name])
    others = masks.filter(pc.greater(pc.list_value_length(masks["other_classes"]), 0))
    if len(others):
        names = []
        for row in others.to_pylist():
            names.append(f"{row['image_id']} ({', '.join(context.classes[tag] for tag in row['other_classes'])})")
        notes.append(
            f"{len(others)} imported mask(s) contain classes without a tag, kept as they are: {join_shortened(names)}"
        )
    notes += palette_note("mask", pc.sum(masks[DIFFERS_FROM_INDICES.name]).as_py() or 0, num_tagged)
    files = mask_files(config.pseudo_masks)
    return notes + unused_note("mask", files.folder, len(files.files), num_tagged)


def _compare_corrected_masks(context: RunContext, rows: pa.Table) -> tuple[dict[str, int], list[str]]:
    """Counts the corrected masks that contain each class, and describes their contradictions to the tags."""
    masks = Shards(context.output / "masks", ["mask"])
    counts: collections.Counter[str] = collections.Counter()
    contradictions = []
    rows = rows.select(["image_id", "tags", CORRECTED]).append_column("position", pa.array(np.arange(len(rows))))
    for row in rows.filter(pc.is_valid(rows[CORRECTED])).to_pylist():
        mask = decode_labels(masks.rows(row["image_id"], row["position"])["mask"][0].as_py())
        found = tags_of_mask(mask, len(context.classes), row["image_id"])
        counts.update(context.classes[tag] for tag in found)
        for tag in set(found) ^ set(row["tags"]):
            verb = "lacks" if tag in row["tags"] else "contains"
            contradictions.append(f"{row['image_id']} {verb} {context.classes[tag]}")
    return dict(counts), contradictions


def _problem(num_masks: int, foreground: float, ignored: float) -> Problem | None:
    """Why a network cannot learn from the masks of tagged images; None if it can.

    Args:
        num_masks: Number of these masks.
        foreground: Mean share of foreground pixels, in [0, 1].
        ignored: Mean share of ignored pixels, in [0, 1].
    """
    background = 1 - foreground - ignored
    if min(foreground, background) >= _MIN_SHARE:
        return None
    return Problem(
        f"a network cannot learn from the {num_masks} pseudo masks: on average {percent(foreground)} of the pixels are "
        f"foreground, {percent(background)} background and {percent(ignored)} ignored",
        f"at least {percent(_MIN_SHARE)} foreground and at least {percent(_MIN_SHARE)} background",
        "look at the localization maps and the saliency maps in the report; then try other thresholds "
        "(pseudo_masks.threshold, pseudo_masks.background_threshold, pseudo_masks.min_foreground_fraction), another "
        "maps.scale, or another pseudo_masks.rule",
    )
