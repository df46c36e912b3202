"""Stage 5: localization maps + background cue -> pseudo masks (MASKS_SCHEMA) of tagged training images and negatives.

A negative, which shows none of the classes, has no localization map. Its mask is all background.
"""

import collections
import functools
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.images.decode import decode_labels, encode_labels, fitted_size, resize_labels
from mcis.datasets.images.label_masks import read_label_mask
from mcis.datasets.images.masks import read_saliency, tags_of_mask
from mcis.datasets.index import Listing
from mcis.datasets.storage.files import stamps
from mcis.datasets.tables.shards import Shards
from mcis.models.pseudo_masks import MASK_RULES, PseudoMask
from mcis.platform.config.saliency_commands import saliency_commands
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.networks.tagged_maps import AffinityWalk, tagged_maps
from mcis.platform.outputs.corrected_masks import CORRECTED, given_mask, with_corrected
from mcis.platform.outputs.imported_files import ImportedFiles, imported_masks, palette_note, unused_note
from mcis.platform.outputs.read_index import read_image_ids, rows_in_split, split_rows
from mcis.platform.outputs.regions import RowsWithRegions, add_regions, check_regions, regions_digest, with_regions
from mcis.platform.outputs.tables import DIFFERS_FROM_INDICES, IMPORTED_MASKS_SCHEMA, MASKS_SCHEMA, with_maps_position
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import contents_digest, file_stamps, read_table
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import FULL_SUPERVISION, percent
from mcis.platform.runs.workspace import Workspace

_MASKS_KEY = "pseudo_masks.masks"
_MIN_SHARE = 0.002
"""Minimum share of foreground pixels, and of background pixels, in all masks from which a network can learn."""
GROUND_TRUTH = "ground truth"
"""Value of the column `cue` of masks that are copied from the ground truth (full supervision)."""
NEGATIVE = "negative"
"""Value of the column `cue` of the masks of negatives."""
IMPORTED = "imported"
"""Value of the column `cue` of the masks of another program, and name of their rule."""


def background_cue(config: Config, rows: pa.Table) -> str:
    """What separates background from foreground in the masks that the rule makes of N images, as text.

    Args:
        config: configuration of the run.
        rows: columns `image_id`, `domain` and `saliency_uri` of these images (`_rows_of_rule`).

    Returns:
        The name of a mask rule; or, for the rule `auto`, `saliency`, `crf`, or `saliency, crf for U of N` if U images
        have no saliency map.

    Raises:
        UserError: the configuration requires saliency maps that some images lack.
    """
    section = config.pseudo_masks
    if not section.reads_saliency:
        return section.rule

    num_without = rows["saliency_uri"].null_count
    if section.rule == "auto":
        if num_without == len(rows):
            return "crf"
        return f"saliency, crf for {num_without} of {len(rows)}" if num_without else "saliency"
    if num_without:
        lacking = rows.filter(rows["saliency_uri"].is_null())
        commands = saliency_commands(config, lacking["domain"].unique().to_pylist())
        how = f" by {' and '.join(f'`{command}`' for command in commands)}" if commands else ""
        raise UserError(
            f"pseudo_masks.rule is {section.rule}, but {num_without} of {len(rows)} tagged training images have no "
            f"saliency map: {join_shortened(lacking['image_id'].to_pylist())}",
            "a saliency map for each tagged training image without a corrected mask",
            f"make the maps{how}; or set pseudo_masks.rule=auto, which uses the dense CRF for images without a "
            "saliency map; or pseudo_masks.rule=crf, which uses no saliency maps",
        )
    return section.rule


def _reads_saliency(config: Config, rows: pa.Table) -> bool:
    """Whether saliency maps are used for any of the images."""
    return config.pseudo_masks.reads_saliency and background_cue(config, rows) != "crf"


class MakeMasks:
    """Makes the pseudo masks of index rows; returns a table of MASKS_SCHEMA.

    Args:
        classes: number of classes K.
        maps: table of localization maps.
        affinity_net: folder of a trained affinity network for the random walk; None without a random walk.
        gpu: whether this network runs on a GPU.
    """

    def __init__(self, config: Config, classes: int, maps: Shards, affinity_net: Path | None, gpu: bool):
        self.config = config
        self.classes = classes
        self.maps = maps
        self.walk = AffinityWalk(config, affinity_net, gpu) if affinity_net else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._mask(row) for row in rows.to_pylist()], schema=MASKS_SCHEMA)

    def _mask(self, row: dict[str, Any]) -> dict[str, Any]:
        """Row of MASKS_SCHEMA for a row of the index."""
        if row.get(CORRECTED):
            return _given_row(row, row[CORRECTED], self.classes, self.config.data.max_side, CORRECTED)
        if row["is_negative"]:
            return _negative_row(row, self.config.data.max_side)

        section = self.config.pseudo_masks
        rule_name = section.rule
        if rule_name == "auto":
            rule_name = "saliency" if row["saliency_uri"] is not None else "crf"
        rule = MASK_RULES[rule_name]
        saliency = self._saliency(row) if rule.reads_saliency else None
        maps = tagged_maps(row, self.maps, self.config, saliency=saliency, walk=self.walk)
        maps = add_regions(maps, row, section)
        return _mask_row(row, rule(maps, section.rule_values(rule_name)), rule_name)

    def _saliency(self, row: dict[str, Any]) -> NDArray[np.uint8]:
        """Reads the saliency map of an image, resized bilinearly to the size of its mask, (H, W)."""
        saliency = read_saliency(row["saliency_uri"], (row["height"], row["width"]))
        height, width = fitted_size(row["height"], row["width"], self.config.data.max_side)
        return np.array(Image.fromarray(saliency).resize((width, height), Image.Resampling.BILINEAR))


def _mask_row(row: dict[str, Any], pseudo_mask: PseudoMask, cue: str) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a pseudo mask."""
    mask = pseudo_mask.mask
    return {
        "image_id": row["image_id"],
        "labels": encode_labels(pseudo_mask.labels),
        "mask": encode_labels(mask),
        "ignored": float((mask == IGNORE).mean()),
        "foreground": float(((mask > 0) & (mask < IGNORE)).mean()),
        "cue": cue,
    }


def copy_truth(classes: int, max_side: int | None, rows: pa.Table) -> pa.Table:
    """Copies ground-truth masks into a table of pseudo masks (MASKS_SCHEMA), for full supervision.

    Args:
        classes: number of classes K.
        max_side: longest side, in pixels, to which masks are reduced (nearest neighbor); None for full size.
        rows: index rows.
    """
    masks = []
    for row in rows.to_pylist():
        if row["mask_uri"] is None and row["is_negative"]:
            masks.append(_negative_row(row, max_side))
        else:
            masks.append(_given_row(row, row["mask_uri"], classes, max_side, GROUND_TRUTH))
    return pa.Table.from_pylist(masks, schema=MASKS_SCHEMA)


def import_masks(classes: int, max_side: int | None, rows: pa.Table) -> pa.Table:
    """Reads the masks of another program into a table of pseudo masks (IMPORTED_MASKS_SCHEMA).

    Labels keep the size of the image, at which they are scored; ignored pixels count as background there.

    Args:
        classes: number of classes K.
        max_side: longest side, in pixels, to which the masks that are trained on are reduced (nearest neighbor).
        rows: index rows with the columns `corrected` and `imported`.
    """
    masks = []
    for row in rows.to_pylist():
        other_classes: list[int] = []
        differs_from_indices = False
        if row[CORRECTED]:
            mask_row = _given_row(row, row[CORRECTED], classes, max_side, CORRECTED)
        elif row["is_negative"]:
            mask_row = _negative_row(row, max_side)
        else:
            mask, differs_from_indices = read_label_mask(row[IMPORTED], (row["height"], row["width"]), classes)
            labels = np.where(mask == IGNORE, 0, mask).astype(np.uint8)
            trained = resize_labels(mask, *fitted_size(row["height"], row["width"], max_side))
            mask_row = _mask_row(row, PseudoMask(labels, trained), IMPORTED)
            other_classes = sorted(set(tags_of_mask(labels, classes, row[IMPORTED])) - set(row["tags"]))
        masks.append({**mask_row, "other_classes": other_classes, DIFFERS_FROM_INDICES.name: differs_from_indices})
    return pa.Table.from_pylist(masks, schema=IMPORTED_MASKS_SCHEMA)


def _negative_row(row: dict[str, Any], max_side: int | None) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a negative: all background, at the size at which the image is read."""
    background = np.zeros(fitted_size(row["height"], row["width"], max_side), np.uint8)
    return _mask_row(row, PseudoMask(background, background), NEGATIVE)


def _given_row(row: dict[str, Any], uri: str, classes: int, max_side: int | None, cue: str) -> dict[str, Any]:
    """Row of MASKS_SCHEMA for a ground-truth or corrected mask."""
    mask = given_mask(row, uri, classes, max_side)
    labels = np.where(mask == IGNORE, 0, mask).astype(np.uint8)
    return _mask_row(row, PseudoMask(labels, mask), cue)


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Checks that tagged training images have the saliency maps or ground-truth masks that pseudo masks need.

    Raises:
        UserError: a required saliency map is missing or is the ground-truth mask; with full supervision, a
            ground-truth mask is missing; the corrected masks do not match the images; or files of segments or
            detections are missing or damaged.
    """
    rows = rows_in_split(listing.table, "train", tagged=True, negatives=True)
    rows = with_corrected(rows, config.data.corrected_masks)
    is_tagged = pc.invert(rows["is_negative"])
    if config.supervision == "full":
        if not pc.any(is_tagged).as_py():
            raise UserError("no training image has a tag", "tagged images, which training needs", "add tags")
        needs_mask = rows.filter(pc.or_(rows["mask_uri"].is_valid(), pc.invert(rows["is_negative"])))
        mask_stamps = stamps([uri or "" for uri in needs_mask["mask_uri"].to_pylist()])
        has_mask = [mask_stamp is not None for mask_stamp in mask_stamps]
        lacking = needs_mask.filter(pc.invert(pa.array(has_mask, pa.bool_())))["image_id"].to_pylist()
        if lacking:
            raise UserError(
                f"supervision is full, but {len(lacking)} of {len(rows)} tagged training images have no ground-truth "
                f"mask: {join_shortened(lacking)}",
                "a ground-truth mask for each, because the segmentation network is trained on them",
                "add the masks, or set supervision=tags",
            )
    elif config.pseudo_masks.masks is not None:
        files = _mask_files(config.pseudo_masks.masks)
        tagged_ids = rows.filter(is_tagged)["image_id"].to_pylist()
        files.check_any_matches(tagged_ids, listing.table["image_id"].to_pylist())
    elif _reads_saliency(config, _rows_of_rule(rows)):
        check_saliency_is_no_truth(_rows_of_rule(rows))
    elif config.pseudo_masks.regions:
        with_files = _with_regions(config, rows, listing.classes).rows
        check_regions(with_files, config.pseudo_masks, config.data.max_pixels)
    elif config.pseudo_masks.rule == "segments":
        require_module("skimage.segmentation", extra="segments")


def check_saliency_is_no_truth(rows: pa.Table) -> None:
    """Checks that no saliency map is the file of the image's ground-truth mask. Opens no file.

    Raises:
        UserError: a saliency map and a ground-truth mask are the same file, directly or through links.
    """
    has_both = rows.filter(pc.and_(rows["saliency_uri"].is_valid(), rows["mask_uri"].is_valid()))
    same = []
    for row in has_both.select(["image_id", "saliency_uri", "mask_uri"]).to_pylist():
        if os.path.realpath(row["saliency_uri"]) == os.path.realpath(row["mask_uri"]):
            same.append(row["image_id"])
    if same:
        raise UserError(
            f"saliency maps of {len(same)} of {len(rows)} training images are their ground-truth masks: "
            f"{join_shortened(same)}",
            "saliency maps that are not ground truth, which is used for scoring only",
            "use other saliency maps, or none: pseudo_masks.rule=crf",
        )


def inputs(config: Config, context: RunContext) -> Any:
    """Inputs of the stage key: the longest side of masks, stamps of the saliency maps or ground-truth masks that are
    read or the contents of the files of other programs, and stamps of corrected masks."""
    rows = _rows(config, context)
    rows_of_rule = _rows_of_rule(rows)
    files: Any = None
    if config.supervision == "full":
        files = file_stamps(rows["mask_uri"])
    elif config.pseudo_masks.masks is not None:
        imported = _with_imported(config.pseudo_masks.masks, rows, read_image_ids(context))
        files = contents_digest(imported[IMPORTED].to_pylist())
    elif _reads_saliency(config, rows_of_rule):
        files = file_stamps(rows_of_rule["saliency_uri"])
    elif config.pseudo_masks.regions:
        files = regions_digest(rows_of_rule["image_id"].to_pylist(), config.pseudo_masks)
    elif config.pseudo_masks.rule == "segments":
        files = f"scikit-image {importlib.metadata.version('scikit-image')}"  # its superpixels
    return config.data.max_side, files, file_stamps(rows[CORRECTED])


def _rows(config: Config, context: RunContext) -> pa.Table:
    """Tagged training images and negatives, with the file of the corrected mask or null in the column `corrected`."""
    return with_corrected(split_rows(context, "train", tagged=True, negatives=True), config.data.corrected_masks)


def _mask_files(folder: Path) -> ImportedFiles[str]:
    """Finds the masks of another program: paths by the name of their image."""
    return imported_masks(folder, "pseudo mask", _MASKS_KEY)


def _with_imported(folder: Path, rows: pa.Table, all_ids: Sequence[str]) -> pa.Table:
    """Adds the column `imported`: the mask of another program of each tagged image; null for negatives."""
    tagged_ids = rows.filter(pc.invert(rows["is_negative"]))["image_id"].to_pylist()
    matched = _mask_files(folder).match_all(tagged_ids, all_ids)
    file_of = dict(zip(tagged_ids, matched, strict=True))
    paths = [file_of.get(image_id) for image_id in rows["image_id"].to_pylist()]
    return rows.append_column(IMPORTED, pa.array(paths, pa.string()))


def _imported_notes(config: Config, context: RunContext, num_tagged: int, ignored: float) -> list[str]:
    """Notes on masks of another program: ignored pixels, classes that are no tags, palettes, and files that are not
    read."""
    folder = config.pseudo_masks.masks
    if folder is None:
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
    notes += palette_note("mask", int(pc.sum(masks[DIFFERS_FROM_INDICES.name]).as_py()), num_tagged)
    num_files = len(_mask_files(folder).files)
    return notes + unused_note("mask", folder, num_files, num_tagged)


def _with_regions(config: Config, rows: pa.Table, classes: Sequence[str]) -> RowsWithRegions:
    """Adds the segments or detections of the images whose masks the rule makes."""
    return with_regions(rows, _made_by_rule(rows).to_pylist(), config.pseudo_masks, classes)


def _made_by_rule(rows: pa.Table) -> pa.ChunkedArray:
    """Whether the mask of an image is made by the rule: not for negatives and images with a corrected mask."""
    return pc.and_(pc.invert(rows["is_negative"]), rows[CORRECTED].is_null())


def _rows_of_rule(rows: pa.Table) -> pa.Table:
    """The images whose masks the rule makes, with the columns that describe their background cue."""
    return rows.select(["image_id", "domain", "saliency_uri", "mask_uri"]).filter(_made_by_rule(rows))


def run(config: Config, context: RunContext) -> MasksResult:
    """Makes the pseudo masks in parallel, or copies the ground truth with full supervision.

    Raises:
        UserError: a saliency map or a mask is missing, unreadable or of the wrong size.
    """
    rows = _rows(config, context)
    is_full = config.supervision == "full"
    cue = GROUND_TRUTH if is_full else background_cue(config, _rows_of_rule(rows))
    notes: list[str] = []
    if config.pseudo_masks.regions and not is_full:
        rows, region_notes = _with_regions(config, rows, context.classes)
        notes += region_notes
    _make_masks(config, context, rows)

    masks = read_table(context.output / "masks", ["ignored", "foreground", "cue"])
    tagged_masks = masks.filter(pc.invert(rows["is_negative"]))
    ignored = float(pc.mean(tagged_masks["ignored"]).as_py())
    foreground = float(pc.mean(tagged_masks["foreground"]).as_py())
    num_ignored = int(pc.sum(pc.greater_equal(masks["ignored"], 1.0)).as_py())
    corrected_counts, contradictions = _compare_corrected_masks(context, rows)
    domains_and_cues = pa.table({"domain": rows["domain"], "cue": masks["cue"]})
    # In one thread, the groups are in the order of their first rows.
    cues = domains_and_cues.group_by(["domain", "cue"], use_threads=False).aggregate([("cue", "count")])

    if is_full:
        notes.append(FULL_SUPERVISION)
    elif config.pseudo_masks.rule == "auto":
        reasons = {"saliency": "all images have saliency maps", "crf": "there are no saliency maps"}
        notes.append(f"background cue: {cue}, because {reasons.get(cue, 'these images have no saliency map')}")
    notes += _imported_notes(config, context, len(tagged_masks), ignored)
    if num_ignored:
        notes.append(f"{num_ignored} pseudo mask(s) are ignored entirely, because they have too little foreground")
    if contradictions:
        notes.append(
            f"corrected masks contradict the tags, which are not changed, in {len(contradictions)} cases: "
            f"{join_shortened(contradictions)}"
        )
    return MasksResult(
        background_cue=cue,
        counts={
            "masks": len(rows),
            "masks by domain and cue": {
                f"{group['domain']}, {group['cue']}": group["cue_count"] for group in cues.to_pylist()
            },
            "corrected masks by class": corrected_counts,
            "ignored whole": num_ignored,
            "ignored share": round(ignored, 4),
        },
        notes=tuple(notes),
        problem=_problem(len(tagged_masks), foreground, ignored),
    )


def _make_masks(config: Config, context: RunContext, rows: pa.Table) -> None:
    """Writes the table of masks."""
    worker: Worker | None = None
    make_worker: Callable[[], Worker] | None = None
    if config.supervision == "full":
        worker = functools.partial(copy_truth, len(context.classes), config.data.max_side)
    elif config.pseudo_masks.masks is not None:
        rows = _with_imported(config.pseudo_masks.masks, rows, read_image_ids(context))
        worker = functools.partial(import_masks, len(context.classes), config.data.max_side)
    else:
        maps = Shards(context.inputs["localize"] / "maps")
        affinity_net = context.inputs.get("train_affinity")
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
        memory_hint="data.max_side or compute.cpus",
    )


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


def _problem(num_masks: int, foreground: float, ignored: float) -> tuple[str, str, str] | None:
    """Why a network cannot learn from the masks of tagged images, as the parts of a UserError; None if it can.

    Args:
        num_masks: number of these masks.
        foreground: mean share of foreground pixels, in [0, 1].
        ignored: mean share of ignored pixels, in [0, 1].
    """
    background = 1 - foreground - ignored
    if min(foreground, background) >= _MIN_SHARE:
        return None
    return (
        f"a network cannot learn from the {num_masks} pseudo masks: on average {percent(foreground)} of the pixels are "
        f"foreground, {percent(background)} background and {percent(ignored)} ignored",
        f"at least {percent(_MIN_SHARE)} foreground and at least {percent(_MIN_SHARE)} background",
        "look at the localization maps and the saliency maps in the report; then try other thresholds "
        "(pseudo_masks.threshold, pseudo_masks.background_threshold, pseudo_masks.min_foreground_fraction), another "
        "maps.scale, or another pseudo_masks.rule",
    )
