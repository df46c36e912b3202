"""The wheel, installed with its own dependencies into a fresh environment, gives a working command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    """A virtual environment with the wheel; returns the folder of its programs. Pip's own configuration applies."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(folder / "bin" / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
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
    printed = run(environment, tmp_path, "demo", *QUICK, f"data.train_list={few_scenes}")
    assert "report:" in printed
    assert (tmp_path / "mcis-workspace" / "runs" / "demo" / "report.html").is_file()

    images = tmp_path / "mcis-workspace" / "data" / "synthetic" / "VOC2012" / "JPEGImages"
    rows = [f"{path},thing" for path in sorted(images.iterdir())[:4]]
    (images.parent / "photos.csv").write_text("\n".join(["image,tags", *rows]) + "\n")
    assert "rejected: 0" in run(environment, tmp_path, "index", str(images.parent / "photos.csv"))
