"""IoU of a class that is the only tag, with all other images as negatives, relative to a run with all classes.

Both runs have the same images and the same ground truth of the class: the table of the second run has the tag `none`
for images without it, and its masks have no other label. Without --tags, the images are the synthetic scenes of
`mcis demo`.
"""

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np

from mcis.datasets.classes import IGNORE
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.sources.tagged import list_tagged
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit
from mcis.platform import api
from mcis.platform.commands.run import DEMO_SETTINGS
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session

DRAWN_SETTINGS = tuple(f"{key}={value}" for key, value in DEMO_SETTINGS.items())
"""Settings for the small scenes, those of `mcis demo`."""
COLUMNS = ("image", "tags", "split", "mask", "id")
TARGET = 0.9
"""Minimum ratio of the IoU of the predictions."""


class Photo(NamedTuple):
    """An image of the table.

    Attributes:
        uri: Its file.
        tags: Its class names.
        split: Train or val.
        mask: File of its ground-truth mask. None: there is none.
        id: Its id.
    """

    uri: str
    tags: list[str]
    split: str
    mask: str | None
    id: str


def read_photos(table: Path | None, workspace: Path, num_train: int | None) -> tuple[list[Photo], list[str]]:
    """Reads the images of a table, or draws scenes; returns them with the names of their classes.

    Args:
        num_train: Number of training images to use, evenly spaced; None for all.
    """
    if table:
        listing = list_tagged(table, allow_absolute=True)
    else:
        root = workspace / "VOC2012"
        devkit.draw(root)
        listing = list_voc(root, classes=root / "classes.txt")

    photos = []
    for row in listing.table.to_pylist():
        tags = [listing.classes[tag] for tag in row["tags"]]
        photos.append(Photo(row["uri"], tags, row["split"], row["mask_uri"], row["image_id"]))

    train = [photo for photo in photos if photo.split == "train"]
    others = [photo for photo in photos if photo.split == "val"]
    positions = np.linspace(0, len(train) - 1, num_train or len(train)).astype(int)
    return [*(train[position] for position in positions), *others], list(listing.classes)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table of the source `tags`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def write_tables(photos: list[Photo], classes: list[str], name: str, workspace: Path) -> dict[str, Path]:
    """Writes the tables `all` and `one`, the second with masks in which only the class `name` has a label."""
    folder = workspace / f"masks-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    label = classes.index(name) + 1
    all_rows = []
    one_rows = []
    for number, photo in enumerate(photos):
        row = {"image": photo.uri, "split": photo.split, "id": photo.id}
        all_rows.append(row | {"tags": ";".join(photo.tags), "mask": photo.mask or ""})

        one_mask = ""
        if photo.mask:
            labels = decode_labels(Path(photo.mask).read_bytes())
            one_labels = np.where(labels == IGNORE, IGNORE, labels == label).astype(np.uint8)
            one_mask = str(folder / f"{number}.png")
            Path(one_mask).write_bytes(encode_labels(one_labels))
        one_rows.append(row | {"tags": name if name in photo.tags else "none", "mask": one_mask})

    tables = {"all": workspace / "all.csv", "one": workspace / f"one-{name}.csv"}
    write_table(tables["all"], all_rows)
    write_table(tables["one"], one_rows)
    return tables


def run_ious(options: argparse.Namespace, workspace: Path, table: Path, run: str, seed: int, name: str) -> list[float]:
    """Runs the pipeline on a table; returns the IoU of a class in percent, of pseudo masks and of predictions."""
    drawn_settings = () if options.tags else DRAWN_SETTINGS
    settings = [f"seed={seed}", "data.tags.allow_absolute=true", *drawn_settings, *options.overrides]
    result = api.run(table, name=run, recipe=options.recipe, overrides=settings, workspace=workspace)

    ious = {}
    for score in result.scores:
        if score.output in ("pseudo_masks", "segmentation"):
            ious[score.output] = score.iou[name] or 0.0  # the last score of predictions is with the CRF, if it is on
    return [ious["pseudo_masks"], ious["segmentation"]]


def measure(options: argparse.Namespace, workspace: Path) -> None:
    """Runs both tables with all seeds and prints the IoU of the class, and the ratios of the means."""
    photos, classes = read_photos(options.tags, workspace, options.train_images)
    name = options.only or classes[0]
    tables = write_tables(photos, classes, name, workspace)
    num_train = sum(photo.split == "train" for photo in photos)
    num_positive = sum(photo.split == "train" and name in photo.tags for photo in photos)
    print(f"{num_train} training images, {num_positive} with {name}; {len(classes)} classes in the run with all")

    ious: dict[str, list[list[float]]] = {table: [] for table in tables}
    for seed in range(options.seeds):
        for table, path in tables.items():
            run = f"{table}-{name}-{seed}" if table == "one" else f"{table}-{seed}"
            ious[table].append(run_ious(options, workspace, path, run, seed, name))
            masks, predictions = ious[table][-1]
            print(f"seed {seed}, {table}: pseudo masks {masks:.2f}, predictions {predictions:.2f}", flush=True)

    print(harness.describe_machine())
    for position, output in enumerate(("pseudo masks", "predictions")):
        means = {}
        for table in tables:
            values = [seed_ious[position] for seed_ious in ious[table]]
            means[table] = statistics.mean(values)
            rounded = [round(value, 2) for value in values]
            print(f"{output:13}{table:4}{harness.mean_text(values)}  {rounded}")
        ratio = means["one"] / means["all"] if means["all"] else float("nan")
        print(f"ratio {ratio:.2f} target {TARGET}: IoU of {output} of a class with negatives, relative to all classes")


def main() -> None:
    """Measures in a given workspace, or in a temporary one."""
    parser = harness.option_parser(__doc__, seeds=1)
    parser.add_argument("--tags", type=Path, help="table of tags with masks and a split val [synthetic scenes]")
    parser.add_argument("--only", metavar="CLASS", help="the class that is the only tag [the first]")
    parser.add_argument("--train-images", type=int, help="number of training images, evenly spaced [all]")
    parser.add_argument("--workspace", type=Path, help="folder that keeps the runs [a temporary one]")
    parser.add_argument("--recipe", default="photos")
    harness.add_overrides(parser)
    options = parser.parse_args()
    with harness.working_folder(options.workspace) as workspace, ray_session(ComputeConfig()):
        measure(options, workspace)


if __name__ == "__main__":
    main()
