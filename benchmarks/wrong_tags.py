"""Precision and recall of `mcis suggest --tags` on single-label images, a fraction of whose tags are swapped.

The classifier is trained on the images of a VOC devkit, whose tags stay, and on images of class folders, some of which
get the tag of another class. Without --voc, both are synthetic scenes. With --swap 0, the tags are left as they are,
and the share of listed tags is printed alone. With --maps, the localization maps of the devkit's images are scored too:
with all tags right, with the wrong tags, and without the images that the suggestion lists.

With --reference, no tag is swapped, and a network that was trained on masks decides which tags are wrong: those whose
class covers less than a hundredth of what it predicts. Its own errors are measured on the split val of the devkit.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.classes import read_classes
from mcis.datasets.index import Listing
from mcis.datasets.sources.single_label import list_single_label
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.sources.web import list_web
from mcis.datasets.synthetic import devkit
from mcis.datasets.tags import Tags
from mcis.platform import api
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.networks.predictor import Predictor
from mcis.platform.reporting.tag_suggestions import DEFAULT_RANK, LEAVE_OUT, rank_tags, write_tag_suggestions
from mcis.platform.runs.workspace import Workspace

RANKS = (0.05, 0.1, 0.25, 0.5)
"""Ranks from which tags are listed."""
MIN_SHARE = 0.01
"""Share of an image that a class of the reference covers at least."""
TARGET = 0.5
"""Minimum precision of the list at the default rank."""


class SingleLabelImages(NamedTuple):
    """Single-label images.

    Attributes:
        uris: Their files.
        classes: Class index of the right tag of each.
        tags: Class index of the tag that the run gets.
    """

    uris: list[str]
    classes: NDArray[np.int64]
    tags: NDArray[np.int64]


def swapped(classes: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.int64]:
    """Returns the classes, a fraction of which is replaced by another one of the classes that occur."""
    rng = np.random.default_rng(seed)
    present = np.unique(classes)
    tags = classes.copy()
    chosen = rng.choice(len(classes), round(fraction * len(classes)), replace=False)
    for position in chosen.tolist():
        tags[position] = rng.choice(present[present != classes[position]])
    return tags


def draw_scenes(workspace: Path) -> tuple[Path, Path]:
    """Draws a devkit, and class folders with further scenes of one class each. Returns both folders."""
    root = workspace / "VOC2012"
    devkit.draw(root, train=60, val=20, size=96, classes=4)
    further = workspace / "further"
    devkit.draw(further, train=160, val=4, size=96, classes=4, seed=1)
    listed = list_voc(further, classes=further / "classes.txt")

    folder = workspace / "single"
    for row in listed.table.to_pylist():
        if row["split"] == "train" and len(row["tags"]) == 1:
            target = folder / listed.classes[row["tags"][0]] / Path(row["uri"]).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(row["uri"]).read_bytes())
    return root, folder


class Reference:
    """A segmentation network that was trained on masks, and decides which classes an image has.

    Args:
        run: Folder of its run.
        num_classes: Number of classes K.
    """

    def __init__(self, run: Path, num_classes: int):
        self.predictor = Predictor.load(run)
        self.num_classes = num_classes

    def classes(self, uri: str) -> NDArray[np.bool_]:
        """Returns which classes (K,) cover at least `MIN_SHARE` of the pixels that it predicts."""
        labels = self.predictor(uri)
        pixels = np.bincount(labels.reshape(-1), minlength=self.num_classes + 1)
        shares: NDArray[np.float64] = pixels[1:] / labels.size
        return shares >= MIN_SHARE

    def print_errors(self, val: Listing) -> None:
        """Prints how often it errs on the images of the split val, whose tags are known."""
        rows = val.table.filter(pc.field("split") == "val")
        predicted = np.stack([self.classes(uri) for uri in rows["uri"].to_pylist()])
        tagged = Tags.from_index(rows["tags"], self.num_classes).matrix(np.arange(len(rows)))
        print(f"reference on val: {(tagged & ~predicted).sum() / tagged.sum():.3f} of the tags are not predicted")
        print(f"reference on val: {(predicted & ~tagged).sum() / predicted.sum():.3f} of the predictions are no tags")


def list_extra(options: argparse.Namespace, folder: Path, names: tuple[str, ...]) -> Listing:
    """Lists the images of class folders."""
    lister = list_web if options.kind == "web" else list_single_label
    return lister([folder], names, classes=options.extra_classes)


def write_table(extra: SingleLabelImages, tags: NDArray[np.int64], names: tuple[str, ...], path: Path) -> Path:
    """Writes a table of images and tags."""
    rows = [{"image": uri, "tags": [names[k]]} for uri, k in zip(extra.uris, tags.tolist(), strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(options: argparse.Namespace, workspace: Path, root: Path, table: Path, name: str, *settings: str) -> None:
    """Runs the pipeline until the classifier, or the maps."""
    classes = options.classes or root / "classes.txt"
    fixed = [f"seed={options.seed}", f"data.classes={classes}", f"data.train_list={options.train_list}"]
    fixed += [f"data.voc={root}", f"data.{options.kind}.root={table}", "data.tags.allow_absolute=true"]
    api.run(
        f"voc+{options.kind}",
        name=name,
        recipe=options.recipe,
        overrides=[*fixed, *options.overrides, *settings],
        workspace=workspace,
        until="localize" if options.maps else "train_classifier",
    )


def measure(options: argparse.Namespace, workspace: Path) -> None:
    """Trains on the tags, ranks them, and prints precision and recall of the list by rank."""
    if options.voc:
        root = options.voc
        folder = options.extra
    else:
        root, folder = draw_scenes(workspace)
        options.train_list = "train_aug"
    classes_file = options.classes or root / "classes.txt"
    names = read_classes(classes_file)
    table = list_extra(options, folder, names).table
    classes = np.array([tags[0] for tags in table["tags"].to_pylist()])
    fraction = 0 if options.reference else options.swap
    extra = SingleLabelImages(table["uri"].to_pylist(), classes, swapped(classes, fraction, options.seed))

    wrong_table = write_table(extra, extra.tags, names, workspace / f"swapped-{options.seed}.jsonl")
    run(options, workspace, root, wrong_table, "swapped")
    ranked = rank_tags(Workspace(workspace), "swapped")
    position_of_uri = {uri: position for position, uri in enumerate(extra.uris)}
    positions = np.array([position_of_uri[uri] for uri in ranked.rows["uri"].to_pylist()])

    print(harness.describe_machine())
    is_wrong = (extra.tags != extra.classes)[positions]
    if options.reference:
        reference = Reference(options.reference, len(names))
        reference.print_errors(list_voc(root, classes=classes_file))
        is_wrong = wrong_by_reference(reference, extra, positions)
    print(f"{len(positions)} {options.kind} images, {is_wrong.sum()} with a wrong tag")
    precision = print_precisions(np.nanmax(ranked.ranks, axis=1), is_wrong)
    if options.maps:
        compare_maps(options, workspace, root, extra, names)
    if is_wrong.any():
        subject = f"precision of listed tags, a fraction of {is_wrong.mean():.2f} wrong"
        print(f"ratio {precision:.2f} target {TARGET}: {subject}")


def wrong_by_reference(
    reference: Reference, extra: SingleLabelImages, positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Returns whether the reference finds the tag of each image at these positions wrong, (N,)."""
    is_wrong = []
    for position in positions.tolist():
        tag = extra.tags[position]
        is_wrong.append(not reference.classes(extra.uris[position])[tag])
    return np.array(is_wrong)


def print_precisions(ranks: NDArray[np.float64], is_wrong: NDArray[np.bool_]) -> float:
    """Prints precision and recall of the list by rank; returns the precision at the default rank.

    Args:
        ranks: Rank of the tag of each image, (N,).
        is_wrong: Whether the tag is wrong, (N,).
    """
    print("rank >=   listed  precision  recall")
    precisions = {}
    for min_rank in sorted({*RANKS, DEFAULT_RANK}):
        is_listed = ranks >= min_rank
        num_found = (is_listed & is_wrong).sum()
        precisions[min_rank] = float(num_found / max(1, is_listed.sum()))
        recall = num_found / max(1, is_wrong.sum())
        print(f"{min_rank:7.2f}  {is_listed.sum():7}  {precisions[min_rank]:9.3f}  {recall:6.3f}")
    return precisions[DEFAULT_RANK]


def compare_maps(
    options: argparse.Namespace, workspace: Path, root: Path, extra: SingleLabelImages, names: tuple[str, ...]
) -> None:
    """Prints the mean IoU of the maps with right tags, with swapped tags, and without the listed images."""
    write_tag_suggestions(Workspace(workspace), "swapped", workspace / "suggested", min_rank=DEFAULT_RANK, count=1)
    wrong_table = workspace / f"swapped-{options.seed}.jsonl"
    left_out = f"data.leave_out={workspace / 'suggested' / LEAVE_OUT}"
    run(options, workspace, root, wrong_table, "left-out", left_out)
    right_table = write_table(extra, extra.classes, names, workspace / f"right-{options.seed}.jsonl")
    run(options, workspace, root, right_table, "right")
    for name in ("right", "swapped", "left-out"):
        for score in api.scores(workspace / "runs" / name):
            if score.output == "localization_maps":
                print(f"{name:10}{score.name:16}{score.miou:6.2f} mIoU of maps")


def main() -> None:
    """Measures in a given workspace, or in a temporary one."""
    parser = harness.option_parser(__doc__, seed=0)
    harness.add_devkit(parser)
    parser.add_argument("--extra", type=Path, help="folder of class folders")
    parser.add_argument("--extra-classes", type=Path, help="file of lines <folder> <class name> [names of the folders]")
    parser.add_argument("--kind", choices=("single", "web"), default="single")
    parser.add_argument("--swap", type=float, default=0.25, help="fraction of wrong tags [0.25]")
    parser.add_argument("--reference", type=Path, help="folder of a run with a network that was trained on masks")
    parser.add_argument("--maps", action="store_true", help="score localization maps too")
    parser.add_argument("--workspace", type=Path, help="folder that keeps the runs [a temporary one]")
    parser.add_argument("--recipe", default="photos")
    harness.add_overrides(parser)
    options = parser.parse_args()
    with harness.working_folder(options.workspace) as workspace, ray_session(ComputeConfig()):
        measure(options, workspace)


if __name__ == "__main__":
    main()
