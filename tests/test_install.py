"""The wheel, installed into a fresh environment, gives a working command."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

QUICK = [
    "classifier.input_size=96",
    "classifier.min_steps=1",
    "classifier.epochs=1",
    "classifier.val_every=0",
    "localize.related=1",
    "pseudo_masks.rule=crf",
    "pseudo_masks.crf.iterations=1",
    "segmenter.crop=64",
    "segmenter.min_epochs=0",
    "segmenter.min_steps=2",
    "predict.scales=[0.5]",
    "predict.hflip=false",
    "predict.crf.iterations=1",
    "report.panels=2",
    "compute.stop_if_not_learning=false",
    "tracking.model=false",
]
"""Overrides that make the demo short; its masks are useless."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A virtual environment with the wheel; returns the folder of its programs.

    It finds the dependencies in the environment of the tests; `test_layout.py` checks that `pyproject.toml` names them.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr

    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = "import mcis; print(mcis.__file__)"
    imported = subprocess.run([python, "-c", script], cwd=folder, capture_output=True, text=True)
    assert Path(imported.stdout.strip()) == packages / "mcis" / "__init__.py", imported
    return folder / "bin"


def run(environment: Path, folder: Path, *words: str) -> str:
    """Runs `mcis` of the environment in a folder and returns what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(environment / "mcis"), *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow(minutes=3)
def test_a_fresh_environment_has_a_working_command(environment: Path, tmp_path: Path) -> None:
    assert run(environment, tmp_path, "--version").startswith("mcis ")
    assert "Usage: mcis demo" in run(environment, tmp_path, "demo", "--help")
    run(environment, tmp_path, "doctor")


@pytest.mark.slow(minutes=3)
def test_a_fresh_environment_runs_the_demo_and_indexes_a_table(
    environment: Path, tmp_path: Path, few_scenes: Path
) -> None:
    lists = (f"data.train_list={few_scenes / 'train'}", f"data.val_list={few_scenes / 'val'}")
    printed = run(environment, tmp_path, "demo", *QUICK, *lists)
    assert "report:" in printed
    assert (tmp_path / "mcis-workspace" / "runs" / "demo" / "report.html").is_file()

    images = tmp_path / "mcis-workspace" / "data" / "synthetic" / "VOC2012" / "JPEGImages"
    rows = [f"{path},thing" for path in sorted(images.iterdir())[:4]]
    (images.parent / "photos.csv").write_text("\n".join(["image,tags", *rows]) + "\n")
    assert "rejected: 0" in run(environment, tmp_path, "index", str(images.parent / "photos.csv"))
