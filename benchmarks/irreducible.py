"""A whole run of recipe `photos_fast` over the sum of what it cannot do without.

That is one pass of each image and its mirror image through the frozen backbone, the steps of both trainings, and of
each pseudo mask and each prediction one pass and one dense CRF; in one process, with all cores, the CRFs' seconds
divided by the cores. All the rest is the program's: Ray, localization, hashes, files, scores, report. Both sides begin
with an empty workspace and drawn photographs, as many as those of docs/results.md: what is spent once weighs more in a
run of fewer.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import torch
from orchestration import Plain

from mcis.datasets.synthetic import devkit
from mcis.platform.config.resolve import resolve

TARGET = 1.5
SIZE = 384
"""Pixels of the images' long side."""
CRFS = ("pseudo_masks", "predict")


def main() -> None:
    """Runs both sides and prints their ratio."""
    arguments = machine.arguments(__doc__, train=1688, val=245, steps=200).parse_args()
    print(machine.describe())
    torch.set_num_threads(machine.cores())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        voc, plain = folder / "VOC2012", folder / "plain"
        plain.mkdir()
        devkit.draw(voc, train=arguments.train, val=arguments.val, size=SIZE)
        values = {
            "data.voc": str(voc),
            "data.classes": str(voc / "classes.txt"),
            "segmenter.min_steps": arguments.steps,
            "segmenter.min_epochs": 0.0,
            "classifier.val_every": 0,
        }
        parts = Plain.index(resolve("voc", "photos_fast", values).config, plain)
        seconds = {}
        for stage in ("train_classifier", "localize", "pseudo_masks", "train_segmenter", "predict"):
            began = time.perf_counter()
            getattr(parts, stage)()
            seconds[stage] = (time.perf_counter() - began) / (machine.cores() if stage in CRFS else 1)
        del seconds["localize"]  # the masks need its maps
        command = [sys.executable, "-m", "mcis.platform.cli", "run", "voc", "--recipe", "photos_fast"]
        command += ["--name", "whole", "--workspace", str(folder / "workspace")]
        for key, value in values.items():
            command += ["--set", f"{key}={value}"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        wall = time.perf_counter() - began
        spent = machine.stage_seconds(folder / "workspace" / "runs" / "whole")
    print(f"{'stage':18}{'run s':>10}{'parts s':>10}")
    for stage in spent:
        print(f"{stage:18}{spent[stage]:10.1f}{seconds.get(stage, 0):10.1f}")
    print(f"{'all':18}{wall:10.1f}{sum(seconds.values()):10.1f}")
    print(f"ratio {wall / sum(seconds.values()):.2f} target at most {TARGET}")


if __name__ == "__main__":
    main()
