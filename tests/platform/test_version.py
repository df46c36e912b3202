"""The version of the code in stage keys: it depends on the source, torch and kind of device, not on the folder."""

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
sys.path[:] = [sys.argv[1], *sys.path, sys.argv[2]]  # without the links of the editable install
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
context = RunContext(workspace=workspace, name="a", output=workspace.root, tracker=None, origins={})
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
    """Runs a stage with an installation; all installations share a workspace.

    Returns:
        The digest of the installation's code, and whether the stage was computed.
    """
    packages = sysconfig.get_path("purelib")
    workspace = str(installed.parent / "workspace")
    command = [sys.executable, "-S", "-c", RUN, str(installed), packages, workspace, device]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digest, computed, file = done.stdout.splitlines()[-1].split(" ", 2)
    assert file.startswith(str(installed))
    return digest, computed == "True"


@pytest.mark.slow
def test_outputs_depend_on_the_code_that_computes_and_on_the_device(installed: Path) -> None:
    digest, computed = run(installed)
    assert digest == code_digest(), "a wheel has the code of its checkout"
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


class EditedTree:
    """A copy of the source whose modules can be edited one at a time."""

    def __init__(self, tree: Path):
        self._tree = tree
        for package in ("datasets", "models", "platform"):
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        self._before = self._codes()

    def stages_changed_by(self, edit: Callable[[str], str], module: str) -> set[str]:
        """The stages whose code changes with an edit of a module. The edit is undone."""
        file = self._tree / module
        text = file.read_text()
        file.write_text(edit(text))
        after = self._codes()
        file.write_text(text)
        return {stage for stage, code in self._before.items() if after[stage] != code}

    def _codes(self) -> dict[str, str]:
        """The version of the code of each stage."""
        spec = importlib.util.spec_from_file_location("version_of_tree", self._tree / "platform/runs/version.py")
        assert spec is not None
        assert spec.loader is not None
        version = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(version)
        return {stage.name: version.code_of(stage.module.__name__) for stage in pipeline.STAGES if stage.is_stored}


def edit_docstring(text: str) -> str:
    return text.replace('"""', '"""Other words. ', 1) + "# a remark\n"


def add_constant(text: str) -> str:
    return f"{text}\nOTHER = 1\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> EditedTree:
    return EditedTree(tmp_path_factory.mktemp("tree") / "mcis")


@pytest.mark.parametrize(
    "module", ["platform/runs/progress.py", "models/classifier.py", "platform/stages/pseudo_masks/making.py"]
)
def test_docstrings_and_comments_change_no_stage(tree: EditedTree, module: str) -> None:
    assert not tree.stages_changed_by(edit_docstring, module)


def test_code_of_pseudo_masks_changes_no_earlier_stage(tree: EditedTree) -> None:
    changed = tree.stages_changed_by(add_constant, "models/pseudo_masks.py")
    assert "pseudo_masks" in changed
    assert not {"index", "train_classifier", "localize"} & changed


def test_code_that_a_registry_names_as_text_changes_its_stage(tree: EditedTree) -> None:
    assert "train_segmenter" in tree.stages_changed_by(add_constant, "models/segmenters.py")


def test_code_of_losses_changes_the_training_and_not_the_index(tree: EditedTree) -> None:
    changed = tree.stages_changed_by(add_constant, "models/losses.py")
    assert "train_classifier" in changed
    assert "index" not in changed


@pytest.mark.parametrize("module", ["platform/reporting/plots.py", "platform/config/recipes.py"])
def test_code_of_reports_and_recipes_changes_no_stage(tree: EditedTree, module: str) -> None:
    assert not tree.stages_changed_by(add_constant, module)
