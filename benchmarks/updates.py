"""mIoU of localization maps by the number of updates of the classifier, for few and for many photographs.

The classifier of a recipe trains on a third of the photographs of a VOC devkit, on all of them, and on all with changed
copies of each: crops, horizontal flips, other colors. `epochs` means the updates of the recipe's epochs without a
maximum, which grow with the images; the other columns are numbers of updates, set by `classifier.min_steps` and
`classifier.max_steps`. Copies have no ground truth, so the maps of the photographs themselves are scored. Without
--voc, the photographs are synthetic scenes.

The last line compares the largest number of updates with the recipe's epochs, for the last set of photographs.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from growth import changed
from PIL import Image

from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit
from mcis.platform import api
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session

UPDATES = "800,2000,5000"
EPOCHS = "epochs"
SETS = "third,whole,copies"
TARGET = 0.995


def sets_of_photographs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes the tables of the sets, and yields their names and tables."""
    classes = options.classes or options.voc / "classes.txt"
    listed = list_voc(options.voc, classes=classes, train_list=options.train_list)
    photographs = []
    for row in listed.table.to_pylist():
        if row["split"] == "train" and row["tags"] and row["mask_uri"]:
            tags = ";".join(listed.classes[k] for k in row["tags"])
            photographs.append({"image": Path(row["uri"]), "tags": tags, "mask": Path(row["mask_uri"])})

    for name in options.sets.split(","):
        rows = photographs[::3] if name == "third" else photographs
        if name == "copies":
            copies = [write_copies(photographs, number, folder / "copies") for number in range(options.copies)]
            rows = [*photographs, *itertools.chain.from_iterable(copies)]
        yield name, write_table(rows, folder / f"{name}.csv")


def write_copies(photographs: list[dict[str, Any]], number: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Writes a changed copy of each photograph, unless it exists, and yields the rows of the copies."""
    folder.mkdir(exist_ok=True)
    for position, row in enumerate(photographs):
        path = folder / f"{position:06d}-{number}.jpg"
        if not path.exists():
            with Image.open(row["image"]) as photograph:
                changed(photograph.convert("RGB"), number * len(photographs) + position).save(path, quality=90)
        yield {"image": path, "tags": row["tags"], "mask": ""}


def write_table(rows: list[dict[str, Any]], table: Path) -> Path:
    """Writes a table of training photographs."""
    lines = ["image,tags,split,mask", *(f"{row['image']},{row['tags']},train,{row['mask']}" for row in rows)]
    table.write_text("\n".join([*lines, ""]))
    return table


def count_images(table: Path) -> int:
    """Counts the images of a table."""
    return len(table.read_text().splitlines()) - 1


def count_updates(options: argparse.Namespace, table: Path) -> int:
    """Counts the updates of the recipe's epochs on a table."""
    images = count_images(table)
    settings = [f"data.tags.table={table}", "classifier.max_steps=null", *options.overrides]
    classifier = resolve("tags", options.recipe, overrides=settings).config.classifier.scaled_for(images)
    return classifier.trained_epochs * math.ceil((classifier.epoch_pairs or images) / classifier.batch)


def score_of_maps(options: argparse.Namespace, table: Path, updates: str, seed: int, workspace: Path) -> float:
    """Returns the mIoU of the maps after a number of updates, or after the recipe's epochs, percent."""
    settings = [f"seed={seed}", "data.tags.allow_absolute=true", *options.overrides]
    if updates == EPOCHS:
        settings.append("classifier.max_steps=null")
    else:
        settings += [f"classifier.min_steps={updates}", f"classifier.max_steps={updates}"]
    result = api.run(
        table,
        name=f"{table.stem}-{updates}-s{seed}",
        recipe=options.recipe,
        overrides=settings,
        workspace=workspace,
        until="localize",
    )
    maps = [score for score in result.scores if score.output == "localization_maps"]
    return maps[-1].miou  # those with related images, after the single-round maps


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Measures all sets in a folder and prints the scores."""
    if not options.voc:
        options.voc = folder / "VOC2012"
        options.train_list = "train_aug"
        devkit.draw(options.voc, train=24, val=4, size=96, classes=3)

    columns = [*options.updates.split(","), EPOCHS]
    lines = [f"{'photographs':14}" + "".join(f"{column:>15}" for column in columns) + "  updates of the epochs"]
    for name, table in sets_of_photographs(options, folder):
        means = []
        line = f"{name} {count_images(table)}".ljust(14)
        for column in columns:
            scores = [score_of_maps(options, table, column, seed, folder) for seed in range(options.seeds)]
            means.append(statistics.mean(scores))
            line += f"{harness.mean_text(scores):>15}"
        lines.append(f"{line}  {count_updates(options, table)}")
        print(lines[-1], flush=True)
    print(harness.describe_machine(), *lines, sep="\n")
    subject = f"mIoU of maps after {columns[-2]} updates, relative to all epochs, photographs and copies"
    print(f"ratio {means[-2] / means[-1]:.3f} target {TARGET:g}: {subject}")


def main() -> None:
    """Measures in a given folder, or in a temporary one."""
    parser = harness.option_parser(__doc__, copies=11, seeds=1)
    parser.add_argument("--updates", default=UPDATES, help=f"numbers of updates, ascending [{UPDATES}]")
    parser.add_argument("--sets", default=SETS, help=f"sets of photographs [{SETS}]")
    harness.add_devkit(parser)
    parser.add_argument("--folder", type=Path, help="folder that keeps copies and runs [a temporary one]")
    parser.add_argument("--recipe", default="photos_fast")
    harness.add_overrides(parser)
    options = parser.parse_args()
    with harness.working_folder(options.folder) as folder, ray_session(ComputeConfig()):
        compare(options, folder)


if __name__ == "__main__":
    main()
