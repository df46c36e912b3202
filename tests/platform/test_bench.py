"""`mcis doctor --bench` on the CPU with tiny sizes: every part and its figures, a wrong network, a part that fails."""

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
from mcis.platform.commands.bench import BOUND, Bench, difference, operations_of
from mcis.platform.config.recipes import lid, photos_fast, released, scratch
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, build_segmenter

PARTS = {"agreement", "matrices", "decoders"}


def tiny(config: Config, **changes: Any) -> Config:
    classifier = config.classifier.model_copy(update={"input_size": 64, "batch": 2, **changes})
    segmenter = scratch().segmenter.model_copy(update={"crop": 64, "batch": 2})
    return config.model_copy(update={"classifier": classifier, "segmenter": segmenter})


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = (tiny(scratch()), tiny(photos_fast()), lid(), released())
    sized = functools.partial(Bench, recipes=recipes, seconds=0.0, side=64)
    monkeypatch.setattr(bench, "Bench", sized)


def bench_lines(folder: Path, code: int) -> dict[str, dict[str, Any]]:
    """The lines of the command's file by their parts."""
    out = folder / "out.json"
    done = CliRunner().invoke(app, ["doctor", "--bench", "--out", str(out), "--workspace", str(folder / "none")])
    assert done.exit_code == code, done.output
    assert str(out) in done.output.replace("\n", "")
    return {line["part"]: line for line in json.loads(out.read_text())}


@pytest.mark.slow
@pytest.mark.usefixtures("sizes")
def test_every_part_is_measured_and_written(tmp_path: Path) -> None:
    lines = bench_lines(tmp_path, 0)
    networks = {"small, classifier", "small, segmenter"}
    networks |= {f"photos_fast, {network}" for network in ("embedding", "classifier", "segmenter")}
    assert lines.keys() == PARTS | networks | {"lid, released"} | {"python", "torch", "gpu", "cores, memory"}
    for part in PARTS | networks:
        values = lines[part]["values"]
        assert lines[part]["state"] in ("ok", "note"), lines[part]
        assert 0 <= min(values.values()) <= sum(values.values()) < math.inf, lines[part]
    assert max(lines["agreement"]["values"].values()) <= BOUND
    assert {"float32 images/s", "bf16 images/s"} <= lines["small, segmenter"]["values"].keys()
    assert "left out on a CPU" in lines["lid, released"]["finding"]
    assert lines["decoders"]["finding"].endswith(" limit")


@pytest.mark.slow
@pytest.mark.usefixtures("sizes")
def test_a_part_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch, "autocast", lambda *_, enabled: broken() if enabled else contextlib.nullcontext())
    monkeypatch.setattr(bench, "BOUND", 0.0)
    lines = bench_lines(tmp_path, 1)
    assert lines["small, segmenter"]["finding"].endswith("; bf16: RuntimeError: no kernel image is available")
    assert lines["small, segmenter"]["remedy"] == "paste the file into an issue"
    assert lines["small, segmenter"]["values"]["float32 images/s"] > 0
    assert (lines["agreement"]["state"], lines["matrices"]["state"]) == ("bad", "ok")


@pytest.mark.parametrize("build", [build_classifier, build_segmenter])
def test_a_wrong_network_is_beyond_the_bound(build: Any) -> None:
    torch.manual_seed(0)
    network = build(scratch().classifier if build is build_classifier else scratch().segmenter, 3)
    wrong, images = copy.deepcopy(network), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for weight in wrong.parameters():
            weight.add_(0.01 * weight.abs().max() * torch.randn(weight.shape))
    assert difference(network, copy.deepcopy(network).double(), images) <= BOUND / 10
    assert difference(wrong, network, images) > BOUND


def test_samples_are_halved_where_memory_runs_out() -> None:
    def run(samples: int) -> None:
        if samples > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert Bench(seconds=0.0).fitting(10, run)[0] == 2
    with pytest.raises(MemoryError):
        Bench(seconds=0.0).fitting(1, lambda samples: run(3))


@pytest.mark.parametrize("groups", [1, 8])
def test_operations_of_a_convolution_and_its_gradients(groups: int) -> None:
    convolution = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 8, 5, 7, requires_grad=True)
    forward = 2 * 2 * 8 * 5 * 7 * (8 // groups) * 9
    assert operations_of(lambda: convolution(images)) == forward
    assert operations_of(lambda: convolution(images).sum().backward()) == 3 * forward


@pytest.mark.parametrize("network", ["classifier", "segmenter"])
@pytest.mark.parametrize("make", [photos_fast, released, lid])
def test_a_step_reads_nothing_back(make: Any, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", torch.device("meta"))  # where that raises
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # which knows no such device
    monkeypatch.setattr(bench, "build_optimizer", lambda model, _: torch.optim.SGD(model.parameters()))  # nor AdamW
    monkeypatch.setattr(SampleDropout, "forward", lambda _, x: x)  # nor a generator
    _, samples, step = bench.work_of(make(), network, bf16=False)
    step(samples)
