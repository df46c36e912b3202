"""The images of a comparison: those whose scores differ most between cases and some at random, with every mask."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels, resize_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tables.shards import Shards
from mcis.platform.outputs.counts import PLAIN, WITH_CRF
from mcis.platform.outputs.read_index import truth_of_row
from mcis.platform.reporting.comparison import Comparison
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.files import read_table

_MAX_SIDE = 480
"""Pixels of the longer side at which images are read: twice what the page shows."""
_TABLES = {"segmentation": ("predict", "predictions"), "pseudo_masks": ("pseudo_masks", "masks")}
"""What is shown -> the stage that made it, and its table."""


class Chosen(NamedTuple):
    """An image, and whether its scores differ most; else it was drawn."""

    image_id: str
    differs_most: bool


class Shown(NamedTuple):
    """A case's mask of an image, as the prediction or pseudo mask of a panel; of several seeds, the first one's.

    Attributes:
        run: whose mask it is.
        which: of segmentation `plain` or `with CRF`.
        miou: of this image, percent; NaN where the image has no truth.
    """

    case: str
    run: str
    which: str
    panel: Panel
    miou: float


class ComparedImage(NamedTuple):
    """An image as a panel without masks but its truth, and the masks of all cases."""

    chosen: Chosen
    panel: Panel
    masks: list[Shown]


class ComparedImages(NamedTuple):
    """Images by what is shown of them.

    Attributes:
        what: `segmentation` or `pseudo_masks`.
        common: how many images all cases have a mask of.
    """

    what: str
    common: int
    images: list[ComparedImage]


def compared_images(comparison: Comparison, count: int) -> list[ComparedImages]:
    """Images of which every case has a mask: half of them those that differ most, the others drawn by the seed.

    Args:
        count: of images, at most, for the predictions and for the pseudo masks each; 0 = none.

    Raises:
        UserError: the baseline's index, a photograph or a ground-truth mask cannot be read.
    """
    whats = [what for what in _TABLES if any(score.what == what for score in comparison.scores)]
    try:
        return [_compared(comparison, what, count) for what in whats] if count else []
    except UserError as error:
        raise UserError(error.found, error.expected, f"{error.remedy}, or show no images by --images 0") from None


def choose(image_ids: Sequence[str], mious: Sequence[Mapping[str, float]], count: int, *, seed: int) -> list[Chosen]:
    """Chooses up to `count` images, half of them, rounded up, by the range of their scores, the largest first.

    Images of equal ranges come in the order of their ids, and one on which the cases are equal does not differ most.
    The others are drawn by (seed, position of the image), so that they depend on nothing else.

    Args:
        image_ids: sorted.
        mious: by image, of each case; an image that one of them lacks or has as NaN has no range.
    """
    scores = np.array([[of.get(image_id, np.nan) for image_id in image_ids] for of in mious])
    ranges = scores.max(axis=0) - scores.min(axis=0)
    order = np.argsort(-np.nan_to_num(ranges), kind="stable")
    most = [int(i) for i in order[: (count + 1) // 2] if ranges[i] > 0]
    drawn = np.argsort(uniforms(Draw.COMPARED_IMAGES, seed, 0, np.arange(len(image_ids)))[:, 0], kind="stable")
    others = [int(i) for i in drawn if i not in most][: count - len(most)]
    return [Chosen(image_ids[i], True) for i in most] + [Chosen(image_ids[i], False) for i in others]


def _compared(comparison: Comparison, what: str, count: int) -> ComparedImages:
    stage, table = _TABLES[what]
    runs = [case.runs[0] for case in comparison.cases]
    if any(stage not in run.outputs for run in runs):
        return ComparedImages(what, 0, [])
    tables = [Shards(run.outputs[stage] / table) for run in runs]
    common = sorted(set.intersection(*(set(of) for of in tables)))
    mious = [_mious(comparison, what, run.name) for run in runs]
    compared = [of for of in mious if of]  # of a run that is not compared there are none
    chosen = choose(common, compared, count, seed=comparison.settings.seed)
    panels = _panels(comparison, [of.image_id for of in chosen])
    images = []
    for of in chosen:
        panel, masks = panels[of.image_id], []
        for case, masks_of_case, miou in zip(comparison.cases, tables, mious, strict=True):
            mask, which = _mask(masks_of_case, of.image_id)
            kind = "prediction" if what == "segmentation" else "pseudo_mask"
            added: dict[str, Any] = {kind: resize_labels(mask, *panel.image.shape[:2])}
            shown = replace(panel, **added)
            masks.append(Shown(case.label, case.runs[0].name, which, shown, miou.get(of.image_id, np.nan)))
        images.append(ComparedImage(of, panel, masks))
    return ComparedImages(what, len(common), images)


def _mious(comparison: Comparison, what: str, run: str) -> Mapping[str, float]:
    """A run's mIoU by image, of the masks that are shown: after the CRF where there is one."""
    scores = {score.title: score.image_mious for score in comparison.scores if score.what == what}
    names = [f"segmentation, {WITH_CRF}", f"segmentation, {PLAIN}", "pseudo masks"]
    return next((scores[name][run] for name in names if run in scores.get(name, {})), {})


def _panels(comparison: Comparison, image_ids: Sequence[str]) -> dict[str, Panel]:
    """The photographs and the truth of images of the baseline's index."""
    classes = tuple(comparison.scores[0].rows[0].iou)[1:]
    columns = ["image_id", "uri", "split", "tags", "mask_uri", "height", "width"]
    index = read_table(comparison.cases[0].runs[0].outputs["index"] / "index.parquet", columns)
    rows = index.filter(pc.is_in(index["image_id"], pc.cast(list(image_ids), "string"))).to_pylist()
    return {row["image_id"]: _panel(row, classes) for row in rows}


def _panel(row: dict[str, Any], classes: tuple[str, ...]) -> Panel:
    photograph, truth = read_rgb(row["uri"], max_side=_MAX_SIDE), None
    if row["mask_uri"]:
        truth = resize_labels(truth_of_row(row, len(classes)), *photograph.shape[:2])
    tags = tuple(classes[k] for k in row["tags"])
    return Panel(image_id=row["image_id"], split=row["split"], tags=tags, image=photograph, truth=truth)


def _mask(table: Shards, image_id: str) -> tuple[NDArray[np.uint8], str]:
    """The labels of an image in a table of predictions or pseudo masks, and which of the former they are."""
    rows = table.rows(image_id)
    assert rows is not None, f"no mask of {image_id}, which the table lists"
    row = rows.to_pylist()[0]
    if "labels" in row:
        return decode_labels(row["labels"]), ""
    return decode_labels(row["crf"] or row["plain"]), WITH_CRF if row["crf"] else PLAIN
