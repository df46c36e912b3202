"""Lists the tags of training images that are probably wrong: those that the classifier ranks lowest."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.threads import map_in_threads
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tags import Tags
from mcis.models.tag_ranks import class_ranks
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.learners.classifier_learner import val_scores
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.reporting.files import csv_table, write_bytes
from mcis.platform.reporting.html import render
from mcis.platform.reporting.plots import THEME
from mcis.platform.runs.progress import counted
from mcis.platform.runs.workspace import Workspace

DEFAULT_RANK = 0.25
"""Rank from which a tag is listed, see `class_ranks`."""
_BATCH = 32
_SIDE = 160
"""Longer side of a picture on the page, pixels."""
LEAVE_OUT = "leave_out.txt"


class DoubtfulTag(NamedTuple):
    """A tag that is probably wrong.

    Attributes:
        row: The image's row of the index.
        tag: Class index.
        rank: See `class_ranks`.
        likely: Class with the highest score relative to images without its tag.
    """

    row: dict[str, Any]
    tag: int
    rank: float
    likely: int


class RankedTags(NamedTuple):
    """The tags of training images with their ranks.

    Attributes:
        rows: Rows of the index, N tagged images.
        ranks: Rank of each tag, (N, K), NaN without it.
        likely: For each image, the class with the highest score relative to images without its tag, (N,).
        classes: The K class names.
    """

    rows: pa.Table
    ranks: NDArray[np.float64]
    likely: NDArray[np.int64]
    classes: tuple[str, ...]

    def doubtful(self, min_rank: float) -> list[DoubtfulTag]:
        """The tags whose rank is at least `min_rank`, the highest rank first."""
        images, tags = np.nonzero(self.ranks >= min_rank)
        order = np.argsort(-self.ranks[images, tags], kind="stable")
        rows = self.rows.take(images[order]).to_pylist()
        doubtful = []
        for row, image, tag in zip(rows, images[order].tolist(), tags[order].tolist(), strict=True):
            doubtful.append(DoubtfulTag(row, tag, float(self.ranks[image, tag]), int(self.likely[image])))
        return doubtful


def rank_tags(workspace: Workspace, name: str) -> RankedTags:
    """Ranks the tags of the training images of a run by its classifier.

    In runs with single-label or web images, only the tags of these are returned. They are ranked among all training
    images.

    Raises:
        UserError: The run has no trained classifier.
    """
    weights = workspace.outputs(name).get("train_classifier")
    if weights is None:
        raise UserError(
            f"run {name!r} has no trained classifier",
            "a run that has passed the stage train_classifier",
            "name another run, or repeat its command with --until train_classifier",
        )
    config = resolve(file=workspace.run(name, create=False).config).config
    index = open_index(workspace, name)
    rows = rows_in_split(index.index, "train", tagged=True, negatives=True)
    tags = Tags.from_index(rows["tags"], len(index.classes)).matrix(np.arange(len(rows)))
    ranks = class_ranks(_class_scores(config, len(index.classes), weights, rows), tags)

    likely = np.where(np.isnan(ranks), 1, ranks).argmin(axis=1)
    tag_ranks = np.where(tags, ranks, np.nan)
    is_listed = tags.any(axis=1)
    is_extra = pc.not_equal(rows["domain"], "target").to_numpy()
    if is_extra.any():
        is_listed &= is_extra
    return RankedTags(rows.filter(pa.array(is_listed)), tag_ranks[is_listed], likely[is_listed], index.classes)


def _class_scores(config: Config, num_classes: int, weights: Path, rows: pa.Table) -> NDArray[np.float32]:
    """Returns the scores that a trained classifier gives images, (N, K).

    Args:
        config: Configuration of the classifier's run.
        num_classes: Number of classes K.
        weights: Output of the stage `train_classifier`.
        rows: Rows of the index, N images.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_trained(build_classifier(config.classifier, num_classes), weights, device)
    images = Squares(
        Texts(rows["uri"]),
        config.classifier.input_size,
        hashes=Texts(rows["content_hash"]),
        value_range=config.data.value_range,
    )

    scores = np.zeros((len(rows), num_classes), np.float32)
    batches = [np.arange(first, min(first + _BATCH, len(rows))) for first in range(0, len(rows), _BATCH)]
    pictures = map_in_threads(images, batches, threads=min(8, os.cpu_count() or 1), ahead=1)
    with torch.inference_mode():
        for batch, pixels in counted(zip(batches, pictures, strict=True), "rank tags", len(batches)):
            scores[batch] = val_scores(model, torch.from_numpy(pixels).to(device)).cpu().numpy()
    return scores


def write_tag_suggestions(workspace: Workspace, name: str, out: Path, *, min_rank: float, count: int) -> str:
    """Writes the tags that are probably wrong.

        doubtful_tags.csv   tags with a rank of at least `min_rank`, the highest first
        doubtful_tags.html  page with the first `count` of them
        leave_out.txt       ids of the images of all these tags, for `data.leave_out`; none if no tag is doubtful

    Returns:
        A description of what was written.
    """
    ranked = rank_tags(workspace, name)
    doubtful = ranked.doubtful(min_rank)

    cells = []
    for tag in doubtful:
        row = tag.row
        classes = (ranked.classes[tag.tag], ranked.classes[tag.likely])
        cells.append((row["image_id"], classes[0], f"{100 * tag.rank:.1f}", classes[1], row["domain"], row["uri"]))
    write_bytes(
        out / "doubtful_tags.csv", csv_table(["image", "tag", "rank %", "most likely class", "domain", "file"], cells)
    )
    images = list(dict.fromkeys(tag.row["image_id"] for tag in doubtful))
    if images:
        write_bytes(out / LEAVE_OUT, "".join(f"{image}\n" for image in images).encode())
    else:  # an empty list is refused
        (out / LEAVE_OUT).unlink(missing_ok=True)

    value_range = open_index(workspace, name, ["split"]).value_range
    shown = [(tag, _picture(tag.row, value_range)) for tag in doubtful[:count]]
    view = {
        "name": name,
        "classes": ranked.classes,
        "shown": shown,
        "doubtful": len(doubtful),
        "ranked": int(np.isfinite(ranked.ranks).sum()),
        "min_rank": min_rank,
        "theme": THEME,
    }
    write_bytes(out / "doubtful_tags.html", render("tags_page.html.j2", view).encode())
    text = f"{len(doubtful)} of {view['ranked']} tags are doubtful, see {out / 'doubtful_tags.html'} and .csv"
    if images:
        text += f"; to train without these {len(images)} images: data.leave_out={out / LEAVE_OUT}"
    return text


def _picture(row: dict[str, Any], value_range: ValueRange | None) -> Image.Image:
    rgb = read_rgb(row["uri"], max_side=_SIDE, content_hash=row["content_hash"], value_range=value_range)
    return Image.fromarray(rgb)
