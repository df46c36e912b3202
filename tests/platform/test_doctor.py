"""`mcis doctor`: every part of the machine is checked, and each problem has a remedy."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.platform.cli import app
from mcis.platform.commands.checks import Check, Finding, run_checks
from mcis.platform.commands.doctor import check_machine


def test_sizes_and_speed_are_not_checked_together(tmp_path: Path) -> None:
    words = ["doctor", "--for", "photos.csv", "--bench", "--workspace", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 2


def test_a_disk_that_is_too_small_is_reported_without_creating_a_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**10))
    done = CliRunner().invoke(app, ["doctor", "--workspace", str(tmp_path / "none")], env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output
    assert "of 1.0 kB free" in done.output
    assert not (tmp_path / "none").exists()


def test_every_part_of_this_machine_is_checked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcis.platform.cli", "doctor", "--workspace", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout
    for part in ("python", "torch", "gpu", "dense CRF", "ray", "mlflow", "disk", "cores"):
        assert part in done.stdout


def test_a_check_that_fails_is_a_line_with_a_remedy() -> None:
    def broken() -> Finding:
        raise RuntimeError("no kernel image")

    def refused() -> Finding:
        raise UserError("found", "expected", "remedy")

    checks = list(run_checks({"a": broken, "b": refused, "c": lambda: Finding("ok", "works")}, "reinstall"))
    assert checks == [
        Check("a", "bad", "RuntimeError: no kernel image", "reinstall", {}),
        Check("b", "bad", "found", "remedy", {}),
        Check("c", "ok", "works", "", {}),
    ]


def test_an_mlflow_server_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    line = next(check for check in check_machine(tmp_path) if check.part == "mlflow")
    assert (line.state, line.finding) == ("bad", f"MLflow's store {uri} cannot be used: no server answers there")
    assert line.remedy.startswith("start the server")


def test_a_store_of_mlflow_that_does_not_exist_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mine/mlflow.db'}")
    line = next(check for check in check_machine(tmp_path) if check.part == "mlflow")
    assert line.state == "ok"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gpu_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Sets up a machine with or without a GPU; `check()` returns the line of the GPU."""

    def set_up(*, nvidia_smi: bool = False, torch_cuda: str | None = None, available: bool = False) -> None:
        monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if nvidia_smi else None)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def check() -> Check:
        return next(check for check in check_machine(tmp_path) if check.part == "gpu")

    return SimpleNamespace(set_up=set_up, check=check)


def test_a_gpu_that_recipes_leave_unused_is_reported_with_the_option(gpu_line: SimpleNamespace) -> None:
    gpu_line.set_up(nvidia_smi=True, torch_cuda="13.0", available=True)
    line = gpu_line.check()
    assert (line.state, line.finding) == ("note", "1 x a GPU, 70 of 80 GiB free")
    assert "photos" in line.remedy
    assert "--gpu (compute.gpu=true)" in line.remedy


def test_a_gpu_with_a_cpu_build_of_torch_is_reported(gpu_line: SimpleNamespace) -> None:
    gpu_line.set_up(nvidia_smi=True)
    line = gpu_line.check()
    assert line.state == "note"
    assert "is a CPU build" in line.finding
    assert "install a CUDA build of torch" in line.remedy


def test_a_gpu_that_torch_does_not_find_is_reported(gpu_line: SimpleNamespace) -> None:
    gpu_line.set_up(nvidia_smi=True, torch_cuda="13.0")
    line = gpu_line.check()
    assert "finds no GPU" in line.finding
    assert "CUDA_VISIBLE_DEVICES" in line.remedy


def test_no_gpu_names_the_recipes_for_cpus(gpu_line: SimpleNamespace) -> None:
    gpu_line.set_up()
    line = gpu_line.check()
    assert line.finding == "none"
    assert "photos" in line.remedy
    assert "released" not in line.remedy
