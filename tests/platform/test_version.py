"""The version of the code in keys: another source, torch or class of device is another output, another place is not."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mcis.platform import pipeline
from mcis.platform.runs.version import code_digest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
sys.path[:] = [sys.argv[1], *sys.path, sys.argv[2]]  # without the links by which an editable install is found
from pathlib import Path
from types import SimpleNamespace
from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.stage import Stage, run_stage
from mcis.platform.runs.version import code_digest
from mcis.platform.runs.files import fingerprint
from mcis.platform.runs.workspace import Workspace

name = "mcis.platform.stages.train_classifier"
module = SimpleNamespace(__name__=name, inputs=lambda config, context: None, run=lambda config, context: StageResult())
workspace = Workspace(Path(sys.argv[3]))
workspace.run("a")
context = RunContext(workspace=workspace, name="a", part=workspace.root, tracker=None, origins={})
config = Config.model_validate({"compute": {"gpu": sys.argv[4] == "gpu"}})
after = run_stage(Stage(name="work", module=module), config, context)
print(code_digest(), after.computed["work"], fingerprint.__code__.co_filename)
"""


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the wheel's content."""
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "installed")
    return tmp_path / "installed"


def run(installed: Path, device: str = "cpu") -> tuple[str, bool]:
    """The digest of this installation's code, and whether it computed a stage in a workspace that all share."""
    packages, workspace = sysconfig.get_path("purelib"), str(installed.parent / "workspace")
    command = [sys.executable, "-S", "-c", RUN, str(installed), packages, workspace, device]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digest, computed, file = done.stdout.splitlines()[-1].split(" ", 2)
    assert file.startswith(str(installed))
    return digest, computed == "True"


@pytest.mark.slow
def test_outputs_are_of_the_code_that_computes_and_of_the_device(installed: Path) -> None:
    digest, computed = run(installed)
    assert digest == code_digest(), "a wheel's code is that of its checkout"
    assert computed
    assert run(installed) == (digest, False)
    elsewhere = shutil.copytree(installed, installed.with_name("elsewhere"))
    assert run(elsewhere) == (digest, False)
    with (elsewhere / "mcis/platform/reporting/run_page.py").open("a") as file:
        file.write("# a page computes nothing\n")
    assert run(elsewhere) == (digest, False)
    assert run(installed, "gpu") == (digest, True)
    with (elsewhere / "mcis/models/losses.py").open("a") as file:
        file.write("OTHER = 1\n")
    other, computed = run(elsewhere)
    assert other != digest
    assert computed
    assert run(installed) == (digest, False)


def test_an_edit_changes_the_keys_of_the_stages_that_run_it(tmp_path: Path) -> None:
    """On the real tree: each module is edited, and put back."""
    tree = tmp_path / "mcis"
    for package in ("datasets", "models", "platform"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    stages = {stage.name: stage.module.__name__ for stage in pipeline.STAGES if stage.kept}

    def codes() -> dict[str, str]:
        spec = importlib.util.spec_from_file_location("version_of_tree", tree / "platform/runs/version.py")
        assert spec is not None
        assert spec.loader is not None
        version = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(version)
        return {name: version.code_of(module) for name, module in stages.items()}

    before = codes()

    def changed(module: str, edit: Callable[[str], str]) -> set[str]:
        file = tree / module
        text = file.read_text()
        file.write_text(edit(text))
        after = codes()
        file.write_text(text)
        return {stage for stage in before if after[stage] != before[stage]}

    def docs(text: str) -> str:
        return text.replace('"""', '"""Other words. ', 1) + "# a remark\n"

    def more(text: str) -> str:
        return f"{text}\nOTHER = 1\n"

    for module in ("platform/runs/progress.py", "models/classifier.py", "platform/stages/pseudo_masks.py"):
        assert not changed(module, docs), module
    of_masks = changed("models/pseudo_masks.py", more)
    assert not {"index", "train_classifier", "localize"} & of_masks
    assert "pseudo_masks" in of_masks
    assert "train_segmenter" in changed("models/segmenters.py", more), "an entry that its table names as text"
    of_losses = changed("models/losses.py", more)
    assert "train_classifier" in of_losses
    assert "index" not in of_losses
    assert not changed("platform/reporting/plots.py", more)
    assert not changed("platform/config/recipes.py", more)
