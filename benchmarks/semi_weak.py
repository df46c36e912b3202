"""What correcting masks brings: mIoU of val by how many training masks are true ones, by `mcis suggest` or at random.

Of a table of tags with true masks, which stand for the corrected ones. A seed's run without any names the images, then
runs take the first so many of them, and as many drawn at random. All share the maps. It prints one row a count; of
each difference of two ways a 95 % interval over the seeds (Student's t).
"""

import csv
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import machine
import numpy as np
from scipy import stats

from mcis.platform.api import scores
from mcis.platform.outputs.read_index import open_index, rows_in_split
from mcis.platform.reporting.files import file_names
from mcis.platform.runs.workspace import Workspace

WAYS = ("suggest", "random")


def mcis(*words: str) -> None:
    """Runs a command, whose progress goes to the terminal."""
    subprocess.run([sys.executable, "-m", "mcis.platform.cli", *words], check=True)


def miou(workspace: Path, name: str) -> float:
    """mIoU of the network on val, without a CRF."""
    (score,) = (s for s in scores(workspace / "runs" / name) if s.what == "segmentation" and not s.crf)
    return score.miou


def true_masks(workspace: Path, name: str) -> dict[str, str]:
    """The true mask of each tagged training image of a run, by image id."""
    rows = rows_in_split(open_index(Workspace(workspace), name).index, "train", tagged=True)
    return dict(zip(rows["image_id"].to_pylist(), rows["mask_uri"].to_pylist(), strict=True))


def main() -> None:
    """Runs all and prints the table."""
    parser = machine.arguments(__doc__, seeds=3)
    parser.add_argument("--tags", required=True, help="table of tags with masks and a split val")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--recipe", default="photos_fast")
    parser.add_argument("--set", action="append", default=[], dest="values", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    workspace: Path = arguments.workspace
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(arguments.seeds):

        def run(name: str, *more: str, seed: int = seed) -> float:
            words = ["run", "tags", "--tags", arguments.tags, "--recipe", arguments.recipe, "--name", name, *more]
            for value in (f"seed={seed}", *arguments.values):
                words += ["--set", value]
            mcis(*words, "--workspace", str(workspace))
            return miou(workspace, name)

        base = f"seed{seed}-0"
        for way in WAYS:
            found.setdefault((way, 0), []).append(run(base))
        masks = true_masks(workspace, base)
        named = workspace / f"suggested-{seed}"
        if not named.exists():
            count = str(max(arguments.counts))
            mcis("suggest", "--name", base, "--count", count, "--out", str(named), "--workspace", str(workspace))
        with (named / "suggested.csv").open(newline="") as file:
            orders = {"suggest": [row["image"] for row in csv.DictReader(file)]}
        if len(orders["suggest"]) < max(arguments.counts):
            sys.exit(f"{named} names {len(orders['suggest'])} images, for fewer masks: remove it")
        orders["random"] = np.random.default_rng(seed).permutation(sorted(masks)).tolist()
        for count in arguments.counts:
            for way in WAYS:
                folder = workspace / f"corrected-{seed}-{way}-{count}"
                for image_id, name in file_names(orders[way][:count], folder).items():
                    target = folder / f"{name}.png"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(masks[image_id], target)
                score = run(f"seed{seed}-{way}-{count}", "--corrected-masks", str(folder))
                found.setdefault((way, count), []).append(score)
                print(f"seed {seed}, {count} masks by {way}: {score:.2f}", flush=True)
    print(machine.describe())
    for count in (0, *arguments.counts):
        pair = [found[way, count] for way in WAYS]
        row = "".join(
            f"  {way} {statistics.mean(v):6.2f} {[round(x, 2) for x in v]}" for way, v in zip(WAYS, pair, strict=True)
        )
        apart = [a - b for a, b in zip(*pair, strict=True)]
        if count and len(apart) > 1:
            half = float(stats.t.ppf(0.975, len(apart) - 1)) * statistics.stdev(apart) / len(apart) ** 0.5
            row += f"  difference {statistics.mean(apart):+.2f} +-{half:.2f}"
        print(f"{count:4} masks{row}")


if __name__ == "__main__":
    main()
