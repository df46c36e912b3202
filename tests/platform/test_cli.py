"""The command line: help, configuration, and bad input that ends in one clear message."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.cli import app
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import resolve

runner = CliRunner()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(folder, train=12, val=4, size=64, classes=2)
    return folder


def test_help_shows_every_command_and_imports_neither_ray_nor_torch() -> None:
    code = "import sys; sys.argv = ['mcis', '--help']\nfrom mcis.platform.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "print([m for m in ('ray', 'torch', 'mlflow', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("demo", "run", "study", "config", "doctor", "ui"))
    assert done.stdout.strip().endswith("[]")


def test_config_show_names_every_key_value_and_source() -> None:
    done = runner.invoke(
        app, ["config", "show", "voc", "--recipe", "small", "--set", "localize.related=5"], env={"COLUMNS": "400"}
    )
    assert done.exit_code == 0
    lines = {line.split("│")[1].strip(): line for line in done.output.splitlines() if line.count("│") > 4}
    assert {key for key, _ in leaves(resolve("voc", "small").config)} <= set(lines)
    assert "--set" in lines["localize.related"]
    assert "recipe small" in lines["classifier.backbone"]
    assert "default" in lines["evaluate.thresholds"]


BAD = {
    "unknown setting": (["run", "vox", "--name", "x"], "did you mean voc"),
    "unknown recipe": (["run", "voc", "--name", "x", "--recipe", "smal"], "did you mean small"),
    "unknown key": (["run", "voc", "--name", "x", "--set", "clasifier.epochs=3"], "classifier.epochs"),
    "wrong type": (["run", "voc", "--name", "x", "--set", "classifier.epochs=many"], "classifier.epochs"),
    "no value": (["run", "voc", "--name", "x", "--set", "seed"], "--set key=value"),
    "no data": (["run", "voc", "--name", "x", "--recipe", "small"], "--voc"),
    "missing folder": (["run", "voc", "--name", "x", "--recipe", "small", "--voc", "nowhere"], "no folder"),
    "name with a slash": (["run", "voc", "--name", "../x", "--recipe", "small", "--voc", "ROOT"], "run name"),
    "unknown stage": (
        ["run", "voc", "--name", "x", "--recipe", "small", "--voc", "ROOT", "--until", "masks"],
        "--until masks",
    ),
    "weights that are no file": (
        ["run", "voc", "--name", "x", "--recipe", "paper", "--voc", "ROOT", "--set", "weights.backbone=w.pth"],
        "w.pth is no file",
    ),
    "more workers than CPUs": (
        ["run", "voc", "--name", "x", "--recipe", "small", "--voc", "ROOT", "--set", "compute.workers=40"],
        "compute.workers",
    ),
    "workspace that is a file": (
        ["run", "voc", "--name", "x", "--recipe", "small", "--voc", "ROOT", "--workspace", "FILE"],
        "workspace",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_message_without_a_traceback(case: str, root: Path, tmp_path: Path) -> None:
    arguments, expected = BAD[case]
    (tmp_path / "file").write_text("")
    classes = ["--set", f"data.classes={root / 'classes.txt'}"] if "ROOT" in arguments else []
    places = {"ROOT": str(root), "FILE": str(tmp_path / "file")}
    arguments = [places.get(a, a) for a in arguments] + classes
    if "--workspace" not in arguments:
        arguments += ["--workspace", str(tmp_path / "workspace")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert expected in done.output
    assert "expected:" in done.output
    assert "remedy:" in done.output
    assert "Traceback" not in done.output


def test_a_recipe_without_weights_offline_says_which_file_to_put_where(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy that refuses connections is what being offline looks like to the downloader.
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    arguments = ["run", "voc", "--name", "x", "--recipe", "paper", "--voc", str(root), "--workspace", str(tmp_path)]
    done = runner.invoke(app, [*arguments, "--set", f"data.classes={root / 'classes.txt'}"])
    assert done.exit_code == 1
    assert str(tmp_path / "weights" / "vgg16-397923af.pth") in done.output
    assert "weights.backbone=PATH" in done.output


def test_doctor_looks_at_torchvision_before_anything_else_has() -> None:
    """In a process of its own: what it looks at has to be made importable first."""
    look = "from mcis.platform.commands.doctor import _torchvision; print(_torchvision().state)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert done.stdout.strip() in ("ok", "note"), done.stderr


def test_doctor_looks_at_every_part_and_is_content_here(tmp_path: Path) -> None:
    done = runner.invoke(app, ["doctor", "--workspace", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for part in ("python", "torch", "gpu", "torchvision", "dense CRF", "ray", "mlflow", "disk", "cores"):
        assert part in done.output
