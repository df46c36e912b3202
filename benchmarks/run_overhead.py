"""Wall time of a `photos_fast` run, relative to the computations that it cannot avoid.

These are one pass of each image and its horizontal flip through the frozen backbone, the steps of both trainings, and
one pass and one dense CRF for each pseudo mask and each prediction. They run in one process on all cores, and the
seconds of the CRFs are divided by the number of cores. The rest of the run is overhead: Ray, localization, hashes,
files, scores and the report. Both sides start with an empty workspace and as many synthetic images as in
docs/results.md, because fixed costs weigh more in smaller runs.
"""

import tempfile
import time
from pathlib import Path

import harness
import torch
from orchestration import PlainLoop

from mcis.datasets.synthetic import devkit
from mcis.platform.config.resolve import resolve

TARGET = 1.5
IMAGE_SIDE = 384
"""Long side of the images in pixels."""
CRF_STAGES = ("pseudo_masks", "predict")


def unavoidable_seconds(loop: PlainLoop) -> dict[str, float]:
    """Measures the unavoidable computations of each stage."""
    seconds = {}
    for stage in ("train_classifier", "localize", "pseudo_masks", "train_segmenter", "predict"):
        start = time.perf_counter()
        getattr(loop, stage)()
        seconds[stage] = time.perf_counter() - start
        if stage in CRF_STAGES:
            seconds[stage] /= harness.available_cores()
    del seconds["localize"]  # runs only because the masks need its maps
    return seconds


def main() -> None:
    """Measures both sides and prints their ratio."""
    parser = harness.option_parser(__doc__, train=1688, val=245, steps=200)
    harness.add_overrides(parser)
    options = parser.parse_args()
    print(harness.describe_machine())
    torch.set_num_threads(harness.available_cores())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        voc = folder / "VOC2012"
        devkit.draw(voc, train=options.train, val=options.val, size=IMAGE_SIDE)
        values = {
            "data.voc": str(voc),
            "data.classes": str(voc / "classes.txt"),
            "segmenter.min_steps": options.steps,
            "segmenter.min_epochs": 0.0,
            "classifier.val_every": 0,
        }
        (folder / "plain").mkdir()
        loop = PlainLoop.index(resolve("voc", "photos_fast", values, options.overrides).config, folder / "plain")
        plain = unavoidable_seconds(loop)

        words = ["run", "voc", "--recipe", "photos_fast", "--name", "whole", "--workspace", str(folder / "workspace")]
        for setting in (*(f"{key}={value}" for key, value in values.items()), *options.overrides):
            words += ["--set", setting]
        start = time.perf_counter()
        harness.run_mcis(*words)
        wall = time.perf_counter() - start
        stages = harness.stage_seconds(folder / "workspace" / "runs" / "whole")

    total = sum(plain.values())
    print(f"{'stage':18}{'run s':>10}{'unavoidable s':>15}")
    for stage, seconds in stages.items():
        print(f"{stage:18}{seconds:10.1f}{plain.get(stage, 0):15.1f}")
    print(f"{'all':18}{wall:10.1f}{total:15.1f}")
    print(f"ratio {wall / total:.2f} target at most {TARGET}")


if __name__ == "__main__":
    main()
