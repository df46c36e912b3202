"""Six numbers of related images, as `mcis study run references` runs them, over the largest of them alone.

Recipe `paper`, VGG-16 at 256x256 and saliency maps as the background's cue, on drawn scenes: maps and masks are made
and scored. Both sides are commands, with all that takes to start them, in a workspace that has the index and the
classifier, whose weights are random, which changes no time; reports are without pictures, for which images are embedded
once more. The maps of R = 5 have to be the same on both sides.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import torch

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import save_weights
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace

TARGET = 2.0
CLASSES, SIZE, SHARD = 5, 256, 8


def command(workspace: Path, voc: Path, weights: Path, *words: str) -> float:
    """Seconds of a command of mcis, which has to succeed."""
    values = (
        f"weights.classifier={weights}",
        "weights.classifier_backbone=none",
        "weights.segmenter_backbone=none",
        "report.panels=0",
        "compute.gpu=false",
        f"compute.shard_rows={SHARD}",
    )
    base = [sys.executable, "-m", "mcis.platform.cli", *words, "--recipe", "paper", "--workspace", str(workspace)]
    base += ["--voc", str(voc), "--set", f"data.classes={voc / 'classes.txt'}"]
    began = time.perf_counter()
    done = subprocess.run(
        [*base, *(word for value in values for word in ("--set", value))], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - began


def main() -> None:
    """Runs both sides in turn and prints the ratio of their medians."""
    arguments = machine.arguments(__doc__, images=96, repeats=1).parse_args()
    print(machine.describe())
    one, all_six = [], []
    with tempfile.TemporaryDirectory() as name:
        root, weights = Path(name), Path(name) / "classifier.pt"
        synthetic.draw(root / "VOC2012", train=arguments.images, val=1, size=SIZE, classes=CLASSES)
        torch.manual_seed(0)
        save_weights(build_classifier(resolve("voc", "paper").config.classifier, CLASSES), weights, {})
        prepared = root / "prepared"
        until = "run", "voc", "--name", "prepared", "--until", "train_classifier"
        command(prepared, root / "VOC2012", weights, *until)
        for repeat in range(arguments.repeats):
            sides = [root / f"{side}-{repeat}" for side in ("one", "six")]
            for workspace in sides:
                shutil.copytree(prepared, workspace)
            run = "run", "voc", "--name", "one", "--until", "pseudo_masks", "--set", "localize.related=5"
            study = "study", "run", "references", "voc", "--name", "six", "--until", "pseudo_masks"
            one.append(command(sides[0], root / "VOC2012", weights, *run))
            all_six.append(command(sides[1], root / "VOC2012", weights, *study))
            print(f"R = 5 alone: {one[-1]:.1f} s, R = 0 to 5: {all_six[-1]:.1f} s", flush=True)
            runs = zip(sides, ("one", "six-r5-s0"), strict=True)
            maps = [read_table(Workspace(workspace).outputs(run)["localize"] / "maps") for workspace, run in runs]
            if not maps[0].equals(maps[1]):
                sys.exit("the maps of R = 5 differ between the two sides")
    ratio = statistics.median(all_six) / statistics.median(one)
    print(f"ratio {ratio:.2f} target at most {TARGET}: six numbers of related images, over R = 5 alone")


if __name__ == "__main__":
    main()
