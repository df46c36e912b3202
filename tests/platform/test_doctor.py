"""`mcis doctor`: every part of the machine is checked, and each problem has a remedy."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mcis.platform.cli import app


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
