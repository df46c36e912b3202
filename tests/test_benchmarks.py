"""Every benchmark parses its options and runs at a small size, so that a changed signature or name is noticed."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

ASK_FOR_HELP = """
import contextlib, io, json, runpy, sys

helps = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, script
        helps[script] = printed.getvalue()
print(json.dumps(helps))
"""
"""Runs the scripts in one process, because importing torch and Ray takes seconds."""


def test_every_benchmark_parses_its_options() -> None:
    scripts = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
    names = [str(script) for script in scripts]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{ASK_FOR_HELP}", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    helps = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 20
    assert list(helps) == names
    assert all(text.startswith("usage: ") for text in helps.values())


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
    "allocator": "--steps 1 --rounds 1",
    "bucket_index": "--images 40",
    "cached_features": "--steps 1",
    "classifier_step": f"--batch 1 --steps 1 --rounds 1 {SMALL_INPUT}",
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
    "orchestration": f"{SETS} --set data.train_list={{few_scenes}}",
    "pair_sampling": "--images 1000",
    "prediction": "--images 4 --rounds 1",
    "random_walk": "--steps 4",
    "related_images": f"--images 4 --cases r0 r5 {SMALL_INPUT}",
    "run_overhead": f"--train 8 --val 2 --steps 2 {SETS}",
    "score_agreement": "--images 8",
    "stream_training": "--images 16 --steps 2 --rounds 1",
    "ten_million": "--rows 1000 --only checks first pairs relations",
    "training_throughput": "--seconds 1 --rounds 1",
    "updates": f"--copies 1 --bounds 2 {SETS}",
    "wrong_tags": f"--recipe photos_fast {SETS}",
}
"""Options that make each benchmark small. `{few_scenes}` is a list of 16 scenes of the demo."""
WHOLE_RUNS = (
    "added_rows",
    "growth",
    "mask_rules",
    "negatives",
    "orchestration",
    "related_images",
    "run_overhead",
    "updates",
    "wrong_tags",
)
"""Benchmarks that run the pipeline; they share a Ray."""
NEEDS_MASKS = ("semi_weak",)
"""Scripts that need a table of photographs with masks."""
TESTED_ELSEWHERE = ("quality", "run_all", "saliency")


def test_every_benchmark_has_a_small_size() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert scripts == {*OPTIONS, *NEEDS_MASKS, *TESTED_ELSEWHERE}


@pytest.fixture(scope="module")
def cluster(ray_head: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a Ray that the commands of several benchmarks share, because starting one takes seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with ray_head(log, port, "--num-cpus=2", "--include-dashboard=false") as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_benchmark_runs_at_a_small_size(name: str, tmp_path: Path, cluster: dict[str, str], few_scenes: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *OPTIONS[name].format(few_scenes=few_scenes).split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=cluster if name in WHOLE_RUNS else None, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"ratio \S+ target (at most )?[\d.]+(: .+)?", done.stdout.splitlines()[-1]), done.stdout
