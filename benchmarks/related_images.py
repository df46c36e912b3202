"""Wall time of six numbers of related images in `mcis study run table5`, relative to the largest of them alone.

Recipe `paper` on synthetic scenes, with VGG-16 at 256x256 pixels and saliency maps as background scores. Maps and masks
are made and scored. Both sides are complete commands, in a workspace that already has the index and the classifier. The
classifier's weights are random, which changes no times. Reports have no pictures, because these would embed images
again. The maps for R = 5 must be the same on both sides.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import harness
import pyarrow as pa
import torch

from mcis.datasets.synthetic import devkit
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import save_weights
from mcis.platform.runs.files import read_table
from mcis.platform.runs.workspace import Workspace

TARGET = 2.0
CLASSES = 5
IMAGE_SIDE = 256
SHARD_ROWS = 8


def run_command(workspace: Path, voc: Path, weights: Path, overrides: list[str], *words: str) -> float:
    """Runs a command of mcis and returns its seconds."""
    command = [*words, "--recipe", "paper", "--workspace", str(workspace), "--voc", str(voc)]
    settings = (
        f"data.classes={voc / 'classes.txt'}",
        f"weights.classifier={weights}",
        "weights.classifier_backbone=none",
        "weights.segmenter_backbone=none",
        "report.panels=0",
        "compute.gpu=false",
        f"compute.shard_rows={SHARD_ROWS}",
        *overrides,
    )
    for setting in settings:
        command += ["--set", setting]
    start = time.perf_counter()
    harness.run_mcis(*command)
    return time.perf_counter() - start


def read_maps(workspace: Path, run: str) -> pa.Table:
    """Reads the localization maps of a run."""
    return read_table(Workspace(workspace).outputs(run)["localize"] / "maps")


def main() -> None:
    """Runs both sides in turn and prints the ratio of their medians."""
    parser = harness.option_parser(__doc__, images=96, repeats=1)
    parser.add_argument("--cases", nargs="+", help="cases of table5 with r5 [all]")
    harness.add_overrides(parser)
    options = parser.parse_args()
    print(harness.describe_machine())
    one_seconds = []
    six_seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        voc = folder / "VOC2012"
        weights = folder / "classifier.pt"
        devkit.draw(voc, train=options.images, val=1, size=IMAGE_SIDE, classes=CLASSES)
        torch.manual_seed(0)
        config = resolve("voc", "paper", overrides=options.overrides).config.classifier
        save_weights(build_classifier(config, CLASSES), weights, {})
        prepared = folder / "prepared"
        run_command(
            prepared, voc, weights, options.overrides, "run", "voc", "--name", "prepared", "--until", "train_classifier"
        )

        run = ("run", "voc", "--name", "one", "--until", "pseudo_masks", "--set", "localize.related=5")
        cases = [f"--case={case}" for case in options.cases or ()]
        study = ("study", "run", "table5", "voc", "--name", "six", "--until", "pseudo_masks", *cases)
        for repeat in range(options.repeats):
            one = folder / f"one-{repeat}"
            six = folder / f"six-{repeat}"
            shutil.copytree(prepared, one)
            shutil.copytree(prepared, six)
            one_seconds.append(run_command(one, voc, weights, options.overrides, *run))
            six_seconds.append(run_command(six, voc, weights, options.overrides, *study))
            print(f"R = 5 alone: {one_seconds[-1]:.1f} s, R = 0 to 5: {six_seconds[-1]:.1f} s", flush=True)
            if not read_maps(one, "one").equals(read_maps(six, "six-r5-s0")):
                sys.exit("the maps for R = 5 differ between the two sides")

    ratio = statistics.median(six_seconds) / statistics.median(one_seconds)
    print(f"ratio {ratio:.2f} target at most {TARGET}: time of table5 (R = 0 to 5), relative to R = 5 alone")


if __name__ == "__main__":
    main()
