"""Stage 5: localization maps + background cue -> pseudo masks (MASKS_SCHEMA) of the tagged training images."""

import collections
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels, encode_labels, fitted_size
from mcis.datasets.images.masks import read_saliency, tags_of_mask
from mcis.datasets.index import Listing, shown
from mcis.datasets.storage.files import stamp
from mcis.datasets.tables.shards import Shards
from mcis.models.pseudo_masks import MASK_RULES, PseudoMask
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import Worker, map_table
from mcis.platform.networks.tagged_maps import AffinityWalk, tagged_maps
from mcis.platform.outputs.corrected_masks import CORRECTED, given_mask, with_corrected
from mcis.platform.outputs.read_index import rows_in_split, split_rows
from mcis.platform.outputs.tables import MASKS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import file_stamps, read_table
from mcis.platform.runs.results import MasksResult
from mcis.platform.runs.scores import FULL_SUPERVISION, percent
from mcis.platform.runs.workspace import Workspace

_LEAST = 0.002
"""Share of foreground, and of background, over all masks, below which these teach nothing."""
GROUND_TRUTH = "ground truth"
"""Cue of the masks of full supervision."""


def background_cue(config: PseudoMasksConfig, rows: pa.Table) -> str:
    """The background cue of the images: the name of a rule for masks, or `saliency, crf for U of N`.

    Raises:
        UserError: the configuration asks for saliency maps and some images have none.
    """
    without = rows["saliency_uri"].null_count
    if not config.reads_saliency:
        return config.rule
    if config.rule != "auto":
        if not without:
            return config.rule
        lacking = rows.filter(rows["saliency_uri"].is_null())["image_id"].to_pylist()
        raise UserError(
            f"pseudo_masks.rule is {config.rule}, but {without} of {len(rows)} training images have no "
            f"saliency map: {shown(lacking)}",
            "a saliency map for each tagged training image, as the recipes paper and released have it",
            "add the maps; or pseudo_masks.rule=auto, which makes the masks of images without a map with "
            "the dense CRF; or pseudo_masks.rule=crf, which makes all masks so and reads no saliency map",
        )
    if without == len(rows):
        return "crf"
    return "saliency" if not without else f"saliency, crf for {without} of {len(rows)}"


def _reads_saliency(config: Config, rows: pa.Table) -> bool:
    """Whether some of the images' masks are made with saliency maps."""
    return config.pseudo_masks.reads_saliency and background_cue(config.pseudo_masks, rows) != "crf"


class MakeMasks:
    """Image rows -> pseudo masks (MASKS_SCHEMA).

    Args:
        classes: K.
        maps: the localization maps.
        affinities: the folder of a trained affinity network that maps walk with, or None.
        gpu: whether that network runs on one.
    """

    def __init__(self, config: Config, classes: int, maps: Shards, affinities: Path | None, gpu: bool):
        self.config, self.classes, self.maps = config, classes, maps
        self.walk = AffinityWalk(config, affinities, gpu) if affinities else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._mask(row) for row in rows.to_pylist()], schema=MASKS_SCHEMA)

    def _mask(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of MASKS_SCHEMA, of a row of the index."""
        if row.get(CORRECTED):
            return _given_row(row, row[CORRECTED], self.classes, self.config.data.max_side, CORRECTED)
        masks = self.config.pseudo_masks
        cue = masks.rule
        if cue == "auto":
            cue = "saliency" if row["saliency_uri"] is not None else "crf"
        rule = MASK_RULES[cue]
        saliency = self._saliency(row) if rule.reads_saliency else None
        values = dict(masks) | (dict(getattr(masks, cue)) if rule.record else {})
        made = rule(tagged_maps(row, self.maps, self.config, saliency=saliency, walk=self.walk), values)
        return _mask_row(row, made, cue)

    def _saliency(self, row: dict[str, Any]) -> NDArray[np.uint8]:
        """The saliency map of an image at the size of its mask, (H, W), bilinear, averaging."""
        saliency = read_saliency(row["saliency_uri"], (row["height"], row["width"]))
        height, width = fitted_size(row["height"], row["width"], self.config.data.max_side)
        return np.array(Image.fromarray(saliency).resize((width, height), Image.Resampling.BILINEAR))


def _mask_row(row: dict[str, Any], made: PseudoMask, cue: str) -> dict[str, Any]:
    """A row of MASKS_SCHEMA."""
    return {
        "image_id": row["image_id"],
        "labels": encode_labels(made.labels),
        "mask": encode_labels(made.mask),
        "ignored": float((made.mask == IGNORE).mean()),
        "foreground": float(((made.mask > 0) & (made.mask < IGNORE)).mean()),
        "cue": cue,
    }


def copy_truth(classes: int, max_side: int | None, rows: pa.Table) -> pa.Table:
    """Image rows -> their ground-truth masks as a table of pseudo masks (MASKS_SCHEMA), for full supervision alone.

    Labels of K `classes` are resized by nearest neighbor, as `data.max_side` has it.
    """
    out = [_given_row(row, row["mask_uri"], classes, max_side, GROUND_TRUTH) for row in rows.to_pylist()]
    return pa.Table.from_pylist(out, schema=MASKS_SCHEMA)


def _given_row(row: dict[str, Any], uri: str, classes: int, max_side: int | None, cue: str) -> dict[str, Any]:
    """A row of MASKS_SCHEMA, of a true mask."""
    mask = given_mask(row, uri, classes, max_side)
    labels = np.where(mask == IGNORE, 0, mask).astype(np.uint8)
    return _mask_row(row, PseudoMask(labels, mask), cue)


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where tagged training images lack what masks are made of: saliency maps that are asked for and
    are no ground truth, or, where supervision is full, ground-truth masks."""
    rows = with_corrected(rows_in_split(listing.table, "train", tagged=True), config.data.corrected_masks)
    if config.supervision == "full":
        there = [uri is not None and stamp(uri) is not None for uri in rows["mask_uri"].to_pylist()]
        without = rows.filter(pa.array([not mask for mask in there]))["image_id"].to_pylist()
        if without:
            raise UserError(
                f"supervision is full, but {len(without)} of {len(rows)} tagged training images have no ground-truth "
                f"mask: {shown(without)}",
                "a mask of each of them, which the segmentation network is to learn from",
                "add the masks, or set supervision=tags",
            )
    elif _reads_saliency(config, rows):
        check_saliency_is_no_truth(rows)


def check_saliency_is_no_truth(rows: pa.Table) -> None:
    """Raises UserError where the saliency map of an image in a listing is the file of its ground-truth mask, under
    whatever path: truth is kept out of training. No file is opened."""
    both = rows.filter(pc.and_(rows["saliency_uri"].is_valid(), rows["mask_uri"].is_valid()))
    same = [
        row["image_id"]
        for row in both.select(["image_id", "saliency_uri", "mask_uri"]).to_pylist()
        if os.path.realpath(row["saliency_uri"]) == os.path.realpath(row["mask_uri"])
    ]
    if same:
        raise UserError(
            f"saliency maps of {len(same)} of {len(rows)} training images are their ground-truth masks: {shown(same)}",
            "saliency maps that know no ground truth, which is for scores alone",
            "name other saliency maps, or none: pseudo_masks.rule=crf reads none",
        )


def inputs(config: Config, context: RunContext) -> Any:
    """The size of the masks, and stamps of saliency maps that are a cue, corrected masks, truth (supervision full)."""
    rows = with_corrected(split_rows(context, "train", tagged=True), config.data.corrected_masks)
    files: Any = None
    if config.supervision == "full":
        files = file_stamps(rows["mask_uri"])
    elif _reads_saliency(config, rows):
        files = file_stamps(rows["saliency_uri"])
    return config.data.max_side, files, file_stamps(rows[CORRECTED])


def run(config: Config, context: RunContext) -> MasksResult:
    """Makes the pseudo masks in parallel tasks, or copies the ground truth where supervision is full.

    Raises:
        UserError: a saliency map or a mask is missing, unreadable or of another size.
    """
    rows = with_corrected(split_rows(context, "train", tagged=True), config.data.corrected_masks)
    full = config.supervision == "full"
    cue = GROUND_TRUTH if full else background_cue(config.pseudo_masks, rows)
    worker: Worker | None = None
    make_worker: Callable[[], Worker] | None = None
    if full:
        worker = functools.partial(copy_truth, len(context.classes), config.data.max_side)
    else:
        maps = Shards(context.inputs["localize"] / "maps")
        affinities = context.inputs.get("train_affinity")
        gpu = config.uses_random_walk and config.compute.gpu
        make_worker = functools.partial(MakeMasks, config, len(context.classes), maps, affinities, gpu)
    map_table(
        rows,
        context.part / "masks",
        worker=worker,
        make_worker=make_worker,
        label="pseudo masks",
        compute=config.compute,
        network=config.uses_random_walk,
        memory_hint="data.max_side or compute.cpus",
    )
    masks = read_table(context.part / "masks", ["ignored", "foreground", "cue"])
    ignored, foreground = (float(pc.mean(masks[name]).as_py()) for name in ("ignored", "foreground"))
    whole = int(pc.sum(pc.greater_equal(masks["ignored"], 1.0)).as_py())
    notes = []
    if full:
        notes.append(FULL_SUPERVISION)
    elif config.pseudo_masks.rule == "auto":
        why = {"saliency": "there are saliency maps", "crf": "there are no saliency maps"}
        notes.append(f"background cue: {cue}, because {why.get(cue, 'the others have no saliency map')}")
    if whole:
        notes.append(f"{whole} pseudo mask(s) are ignored whole: too little foreground")
    of_corrected = _corrected_counts(context, rows, notes)
    cues = collections.Counter(zip(rows["domain"].to_pylist(), masks["cue"].to_pylist(), strict=True))
    return MasksResult(
        background_cue=cue,
        counts={
            "masks": len(rows),
            "masks by domain and cue": {", ".join(pair): count for pair, count in cues.items()},
            "corrected masks by class": of_corrected,
            "ignored whole": whole,
            "ignored share": round(ignored, 4),
        },
        notes=tuple(notes),
        problem=_problem(len(rows), foreground, ignored),
    )


def _corrected_counts(context: RunContext, rows: pa.Table, notes: list[str]) -> dict[str, int]:
    """How many corrected masks hold each class; adds to the notes which of them contradict their images' tags."""
    masks, counts, against = Shards(context.part / "masks", ["mask"]), collections.Counter[str](), list[str]()
    for row in rows.filter(pc.is_valid(rows[CORRECTED])).select(["image_id", "tags"]).to_pylist():
        made = masks.rows(row["image_id"])
        found = tags_of_mask(decode_labels(made["mask"][0].as_py()), len(context.classes), row["image_id"])
        counts.update(context.classes[k] for k in found)
        for k in set(found) ^ set(row["tags"]):
            against.append(f"{row['image_id']} {'lacks' if k in row['tags'] else 'holds'} {context.classes[k]}")
    if against:
        notes.append(f"{len(against)} corrected masks contradict the tags, which stay as they are: {shown(against)}")
    return dict(counts)


def _problem(masks: int, foreground: float, ignored: float) -> tuple[str, str, str] | None:
    """Why so many masks teach nothing: of their pixels, the share of foreground or of background is next to none."""
    background = 1 - foreground - ignored
    if min(foreground, background) >= _LEAST:
        return None
    return (
        f"the {masks} pseudo masks teach nothing: on average {percent(foreground)} of one is foreground, "
        f"{percent(background)} background and {percent(ignored)} ignored",
        f"at least {percent(_LEAST)} of both foreground and background",
        "look at the localization maps in the report and at the saliency maps; then try other thresholds "
        "(pseudo_masks.threshold, background_threshold, min_foreground_fraction), another maps.scale, or "
        "pseudo_masks.rule",
    )
