"""Effect of corrected masks: mIoU on val by the number of corrected training masks, suggested or random ones.

Needs a table of tags with true masks, which serve as corrected masks. For each seed, a run without corrected masks
chooses the images for `mcis suggest`. Further runs use the first N of these images, and N random images. All runs share
the maps. Prints a row for each N, with a 95 % interval of the difference between both ways over seeds (Student's t).
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np
from scipy import stats

from mcis.platform.api import scores
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.reporting.files import file_names
from mcis.platform.runs.workspace import Workspace

WAYS = ("suggest", "random")


def run_command(*words: str) -> None:
    """Runs a command of mcis and shows its progress."""
    subprocess.run([sys.executable, "-m", "mcis.platform.cli", *words], check=True)


def segmentation_miou(workspace: Path, name: str) -> float:
    """Returns the mIoU of a run's segmentation network on val, without CRF."""
    (score,) = (s for s in scores(workspace / "runs" / name) if s.output == "segmentation" and not s.crf)
    return score.miou


def true_masks(workspace: Path, name: str) -> dict[str, str]:
    """Returns the true mask of each tagged training image of a run, by image id."""
    rows = rows_in_split(open_index(Workspace(workspace), name).index, "train", tagged=True)
    return dict(zip(rows["image_id"].to_pylist(), rows["mask_uri"].to_pylist(), strict=True))


class Experiment:
    """Runs with and without corrected masks in one workspace.

    Args:
        options: Options of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.workspace: Path = options.workspace

    def run(self, name: str, seed: int, *more: str) -> float:
        """Runs the pipeline under a name and returns the mIoU."""
        options = self.options
        words = ["run", "tags", "--tags", options.tags, "--recipe", options.recipe, "--name", name, *more]
        for override in (f"seed={seed}", *options.overrides):
            words += ["--set", override]
        run_command(*words, "--workspace", str(self.workspace))
        return segmentation_miou(self.workspace, name)

    def suggested_images(self, name: str, seed: int) -> list[str]:
        """Returns the images that `mcis suggest` names for a run, in its order."""
        folder = self.workspace / f"suggested-{seed}"
        count = max(self.options.counts)
        if not folder.exists():
            options = ("--name", name, "--count", str(count), "--out", str(folder))
            run_command("suggest", *options, "--workspace", str(self.workspace))
        with (folder / "suggested.csv").open(newline="") as file:
            images = [row["image"] for row in csv.DictReader(file)]
        if len(images) < count:
            sys.exit(f"{folder} names {len(images)} images, fewer than {count}: remove this folder and try again")
        return images

    def copy_masks(self, image_ids: list[str], masks: dict[str, str], folder: Path) -> None:
        """Copies the true masks of images to a folder of corrected masks."""
        for image_id, name in file_names(image_ids, folder).items():
            target = folder / f"{name}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(masks[image_id], target)

    def run_seed(self, seed: int) -> dict[tuple[str, int], float]:
        """Returns the mIoU of one seed for each way and number of corrected masks, 0 included."""
        base = f"seed{seed}-0"
        base_miou = self.run(base, seed)
        mious = {(way, 0): base_miou for way in WAYS}
        masks = true_masks(self.workspace, base)
        orders = {
            "suggest": self.suggested_images(base, seed),
            "random": np.random.default_rng(seed).permutation(sorted(masks)).tolist(),
        }
        for count in self.options.counts:
            for way in WAYS:
                folder = self.workspace / f"corrected-{seed}-{way}-{count}"
                self.copy_masks(orders[way][:count], masks, folder)
                miou = self.run(f"seed{seed}-{way}-{count}", seed, "--corrected-masks", str(folder))
                mious[way, count] = miou
                print(f"seed {seed}, {count} masks by {way}: {miou:.2f}", flush=True)
        return mious


def describe(count: int, suggest: list[float], random: list[float]) -> str:
    """Returns the row of a number of corrected masks.

    Args:
        suggest: mIoU of each seed with the masks of `mcis suggest`.
        random: mIoU of each seed with random masks.
    """
    row = f"{count:4} masks"
    for way, mious in zip(WAYS, (suggest, random), strict=True):
        row += f"  {way} {statistics.mean(mious):6.2f} {[round(miou, 2) for miou in mious]}"
    differences = [a - b for a, b in zip(suggest, random, strict=True)]
    seeds = len(differences)
    if count and seeds > 1:
        half_width = float(stats.t.ppf(0.975, seeds - 1)) * statistics.stdev(differences) / seeds**0.5
        row += f"  difference {statistics.mean(differences):+.2f} +-{half_width:.2f}"
    return row


def main() -> None:
    """Runs all and prints the table."""
    parser = harness.option_parser(__doc__, seeds=3)
    parser.add_argument("--tags", required=True, help="table of tags with masks and a split val")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 50, 100], help="numbers of corrected masks")
    parser.add_argument("--recipe", default="photos_fast")
    harness.add_overrides(parser)
    options = parser.parse_args()
    experiment = Experiment(options)
    mious = [experiment.run_seed(seed) for seed in range(options.seeds)]

    print(harness.describe_machine())
    for count in (0, *options.counts):
        suggest = [seed_mious["suggest", count] for seed_mious in mious]
        random = [seed_mious["random", count] for seed_mious in mious]
        print(describe(count, suggest, random))


if __name__ == "__main__":
    main()
