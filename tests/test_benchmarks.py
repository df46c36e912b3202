"""Every benchmark parses its options and runs at a small size, so that a changed signature or name is noticed."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
RUNNER = Path(__file__).resolve().parent / "script_runner.py"


class ScriptRunner:
    """Runs benchmarks one after the other in a process of `script_runner.py`.

    Args:
        folder: Working folder, which is empty.
        environment: Environment variables. With RAY_ADDRESS, the scripts share a connection to that cluster.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.log = folder / "runner.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(RUNNER), str(FOLDER)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, name: str, *words: str) -> str:
        """Runs a benchmark with options and returns what it printed."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([str(FOLDER / f"{name}.py"), *words]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        succeeded, printed = json.loads(answer)
        assert succeeded, printed
        return str(printed)

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[ScriptRunner]:
    """Runs scripts without a Ray."""
    runner = ScriptRunner(tmp_path, os.environ)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def ray_runner(ray_head: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptRunner]:
    """Runs the scripts of all tests in one process, on a Ray of their own."""
    folder = tmp_path_factory.mktemp("shared")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with ray_head(log, port, "--num-cpus=4", "--include-dashboard=false") as environment:
        runner = ScriptRunner(folder, environment)
        yield runner
        runner.close()


def test_every_benchmark_parses_its_options(runner: ScriptRunner) -> None:
    names = script_names()
    assert len(names) > 20
    for name in names:
        assert runner.run(name, "--help").startswith("usage: ")


def script_names() -> list[str]:
    """Names of all benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


QUICK = (
    "classifier.input_size=96",
    "classifier.min_steps=1",
    "classifier.epochs=1",
    "localize.related=1",
    "affinity_net.crop=64",
    "affinity_net.min_epochs=0",
    "affinity_net.min_steps=1",
    "pseudo_masks.crf.iterations=1",
    "segmenter.crop=64",
    "segmenter.min_epochs=0",
    "segmenter.min_steps=2",
    "predict.scales=[0.5]",
    "predict.hflip=false",
    "predict.crf.iterations=1",
    "report.panels=2",
    "compute.stop_if_not_learning=false",
)
"""Overrides that make a run short; its masks are useless."""
SMALL_INPUT = "--set classifier.input_size=96"
SETS = " ".join(f"--set {override}" for override in QUICK)
OPTIONS = {
    "added_rows": "--images 12",
    "allocator": "--steps 1 --rounds 1 --networks small",
    "bucket_index": "--images 40",
    "cached_features": f"--steps 1 --rounds 1 {SMALL_INPUT}",
    "classifier_step": f"--batch 1 --steps 1 --rounds 1 --recipes paper {SMALL_INPUT}",
    "crf": "--images 4 --rounds 1",
    "data_loading": "--images 240 --rounds 1",
    "decode_tasks": "--rows 200 --cpus 2 --steps 10 --rounds 1 --idle_seconds 1",
    "distributed_step": "--rounds 1",
    "evaluation": "--images 8 --rounds 1",
    "growth": f"--sizes 8 --plot growth.png {SETS}",
    "gpu_mapping": "--images 64 --rounds 1",
    "index": "--images 20 --rounds 1",
    "localization": f"--images 8 --rounds 1 {SMALL_INPUT}",
    "mask_rules": f"--images 16 --superpixels 40 {SETS}",
    "nearest_images": "--images 2000 --classes 4 --sample 32 --max_candidates 128 --cell_images 16",
    "negatives": f"--recipe photos_fast --train-images 24 {SETS}",
    "orchestration": f"{SETS} --set data.train_list={{few_scenes}}/train --set data.val_list={{few_scenes}}/val",
    "pair_sampling": "--images 1000",
    "prediction": "--images 4 --rounds 1",
    "random_walk": "--steps 4",
    "related_images": f"--images 4 --cases r0 r5 {SMALL_INPUT} --set classifier.backbone=small",
    "run_overhead": f"--train 8 --val 2 --steps 2 {SETS}",
    "score_agreement": "--images 8",
    "stream_training": "--images 16 --steps 2 --rounds 1",
    "ten_million": "--rows 1000 --only checks first pairs relations",
    "training_throughput": "--seconds 1 --rounds 1",
    "updates": f"--copies 1 --updates 2 {SETS}",
    "wrong_tags": f"--recipe photos_fast {SETS}",
}
"""Options that make each benchmark small. `{few_scenes}` is a folder of lists of scenes of the demo."""
OWN_RAY = ("bucket_index", "decode_tasks", "gpu_mapping")
"""Benchmarks that need several nodes, or environment variables in Ray's processes. The others share a Ray."""
NEEDS_MASKS = ("semi_weak",)
"""Scripts that need a table of photographs with masks."""
TESTED_ELSEWHERE = ("quality", "run_all", "saliency")


def test_every_benchmark_has_a_small_size() -> None:
    assert set(script_names()) == {*OPTIONS, *NEEDS_MASKS, *TESTED_ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_benchmark_runs_at_a_small_size(name: str, few_scenes: Path, request: pytest.FixtureRequest) -> None:
    runner = request.getfixturevalue("runner" if name in OWN_RAY else "ray_runner")
    printed = runner.run(name, *OPTIONS[name].format(few_scenes=few_scenes).split())
    last_line = printed.splitlines()[-1]
    assert re.fullmatch(r"ratio \S+ target (at most )?[\d.]+(: .+)?", last_line), printed
