"""`mcis doctor --bench` on the CPU with tiny sizes: all parts, wrong networks, parts that fail."""

import contextlib
import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mcis.models.dropout import SampleDropout
from mcis.platform.cli import app
from mcis.platform.commands import bench
from mcis.platform.commands.bench import MAX_DIFFERENCE, Bench
from mcis.platform.config.recipes import lid, photos_fast, released, scratch
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, build_segmenter
from mcis.platform.reporting import machine_speed
from mcis.platform.reporting.machine_speed import count_operations, measure_cost, score_difference

PARTS = {"agreement", "matrices", "decoders"}


def tiny(config: Config) -> Config:
    classifier = config.classifier.model_copy(update={"input_size": 64, "batch": 2})
    segmenter = scratch().segmenter.model_copy(update={"crop": 64, "batch": 2})
    return config.model_copy(update={"classifier": classifier, "segmenter": segmenter})


@pytest.fixture
def tiny_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = (tiny(scratch()), tiny(photos_fast()), lid(), released())
    monkeypatch.setattr(bench, "Bench", functools.partial(Bench, recipes=recipes, seconds=0.0, side=64))


def run_bench(folder: Path, *, exit_code: int) -> dict[str, dict[str, Any]]:
    """Runs the command and returns the lines of the file that it writes, by part."""
    out = folder / "out.json"
    done = CliRunner().invoke(app, ["doctor", "--bench", "--out", str(out), "--workspace", str(folder / "none")])
    assert done.exit_code == exit_code, done.output
    assert str(out) in done.output.replace("\n", "")
    return {line["part"]: line for line in json.loads(out.read_text())}


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_bench")
def test_every_part_is_measured_and_written(tmp_path: Path) -> None:
    lines = run_bench(tmp_path, exit_code=0)
    networks = {"scratch, classifier", "scratch, segmenter"}
    networks |= {f"photos_fast, {network}" for network in ("embedding", "classifier", "segmenter")}
    assert lines.keys() == PARTS | networks | {"lid, released"} | {"python", "torch", "gpu", "cores, memory"}

    for part in PARTS | networks:
        values = lines[part]["values"]
        assert lines[part]["state"] in ("ok", "note"), lines[part]
        assert 0 <= min(values.values()) <= sum(values.values()) < math.inf, lines[part]
    assert max(lines["agreement"]["values"].values()) <= MAX_DIFFERENCE
    assert {"float32 images/s", "bf16 images/s"} <= lines["scratch, segmenter"]["values"].keys()
    assert "left out on a CPU" in lines["lid, released"]["finding"]
    assert lines["decoders"]["finding"].endswith(" limit")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_bench")
def test_a_part_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def autocast(*arguments: Any, enabled: bool, **options: Any) -> contextlib.AbstractContextManager[None]:
        if enabled:
            raise RuntimeError("no kernel image is available")
        return contextlib.nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(bench, "MAX_DIFFERENCE", 0.0)
    lines = run_bench(tmp_path, exit_code=1)
    assert lines["scratch, segmenter"]["finding"].endswith("; bf16: RuntimeError: no kernel image is available")
    assert lines["scratch, segmenter"]["remedy"] == "paste the file into an issue"
    assert lines["scratch, segmenter"]["values"]["float32 images/s"] > 0
    assert lines["agreement"]["state"] == "bad"
    assert lines["matrices"]["state"] == "ok"


@pytest.mark.parametrize("network", ["classifier", "segmenter"])
def test_a_wrong_network_exceeds_the_allowed_difference(network: str) -> None:
    torch.manual_seed(0)
    config = scratch()
    right: nn.Module
    if network == "classifier":
        right = build_classifier(config.classifier, 3)
    else:
        right = build_segmenter(config.segmenter, 3)
    wrong = copy.deepcopy(right)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for weight in wrong.parameters():
            weight.add_(0.01 * weight.abs().max() * torch.randn(weight.shape))

    assert score_difference(right, copy.deepcopy(right).double(), images) <= MAX_DIFFERENCE / 10
    assert score_difference(wrong, right, images) > MAX_DIFFERENCE


def test_the_number_of_samples_is_halved_when_memory_runs_out() -> None:
    def step(samples: int) -> None:
        if samples > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert measure_cost(10, step, 0.0).samples == 2


def test_memory_for_no_sample_is_an_error() -> None:
    def step(samples: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryError):
        measure_cost(1, step, 0.0)


@pytest.mark.parametrize("groups", [1, 8])
def test_operations_of_a_convolution_and_its_gradients_are_counted(groups: int) -> None:
    convolution = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 5, 7, requires_grad=True)
    forward = 2 * 2 * 8 * 5 * 7 * (8 // groups) * 9
    assert count_operations(lambda: convolution(images)) == forward
    assert count_operations(lambda: convolution(images).sum().backward()) == 3 * forward


@pytest.mark.parametrize("network", ["classifier", "segmenter"])
@pytest.mark.parametrize("make_config", [photos_fast, released, lid])
def test_a_step_does_not_wait_for_the_device(make_config: Any, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device `meta`, reading a value raises an error. What `meta` lacks is replaced."""
    monkeypatch.setattr(machine_speed, "DEVICE", torch.device("meta"))
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **options: contextlib.nullcontext())
    monkeypatch.setattr(machine_speed, "build_optimizer", lambda model, _: torch.optim.SGD(model.parameters()))
    monkeypatch.setattr(SampleDropout, "forward", lambda _, x: x)
    work = machine_speed.make_work(make_config(), network, bf16=False)
    work.step(work.samples)
