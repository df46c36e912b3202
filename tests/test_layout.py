"""Tests that the repository matches ARCHITECTURE.md: layout, direction of imports and packaging."""

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("datasets", "models", "platform", "tuning")
"""Top-level folders in the order of imports: each imports from itself and from earlier ones."""
TOP_FILES = ("__init__.py", "py.typed")
"""The files at the top that belong to the package `mcis`."""
LAYERS = (
    "config",
    "runs",
    "outputs",
    "networks",
    "engine",
    "learners",
    "reporting",
    "stages",
    "pipeline",
    "api",
    "commands",
    "cli",
)
"""Packages and modules of platform/ in the order of imports."""


def files_of(package: str) -> list[str]:
    """Returns the files of a package that belong in Git and the wheel, relative to the repository."""
    files = [p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT).as_posix() for p in files)


def modules_of(package: str) -> list[str]:
    """Returns the names of a package's modules, for example `mcis.models.losses`; `__init__.py` gives `.__init__`."""
    return ["mcis." + f.removesuffix(".py").replace("/", ".") for f in files_of(package) if f.endswith(".py")]


def python_files(folder: str) -> list[Path]:
    """Returns the module files of a folder, in the order of `modules_of`."""
    return [ROOT / name for name in files_of(folder) if name.endswith(".py")]


def imports_of(module: str, source: str) -> Iterator[tuple[str, bool]]:
    """Yields the absolute names that a module imports, and whether the import is inside a function."""

    def visit(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = module.split(".")[: -child.level] if child.level else []
                start = ".".join([*above, *([child.module] if child.module else [])])
                yield from ((f"{start}.{alias.name}", late) for alias in child.names)
            else:
                yield from visit(child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from visit(ast.parse(source), late=False)


def violations(module: str, source: str) -> list[str]:
    """Returns messages on imports of a module against the direction."""
    package = module.split(".")[1]
    wrong = []
    for name, late in imports_of(module, source):
        top, *inside = name.split(".")
        if top == "mcis":
            if not inside or inside[0] not in PACKAGES:
                wrong.append(f"{module} imports {name}, which is for users")
            elif not _allowed(module.split(".")[1:], inside, late):
                wrong.append(f"{module} imports {name}")
        elif top in PACKAGES and top not in sys.stdlib_module_names:
            wrong.append(f"{module} imports {name} without mcis.")
        elif package in {"datasets", "models"} and top in {"ray", "mlflow"}:
            wrong.append(f"{module} imports {name}: {package}/ works without Ray and MLflow")
    return wrong


def _allowed(importer: list[str], imported: list[str], late: bool) -> bool:
    """Returns whether `importer` may import `imported`, given as parts of their names after `mcis`."""
    if importer[:2] == ["platform", "commands"] and imported[0] == "tuning":
        return late
    if imported[0] != importer[0]:
        return imported[0] in PACKAGES[: PACKAGES.index(importer[0])]
    if importer[0] != "platform" or len(imported) < 2:
        return True
    layer = importer[1]
    other_layer = imported[1]
    if LAYERS.index(other_layer) > LAYERS.index(layer):
        return False
    same_stage = importer[2:3] == imported[2:3]
    return same_stage or not layer == other_layer == "stages"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_have_modules_and_no_init(package: str) -> None:
    assert modules_of(package), f"{package}/ holds no module"
    assert not (ROOT / package / "__init__.py").exists(), f"{package}/__init__.py shadows modules of that name"


def test_platform_contains_only_the_layers() -> None:
    assert {name.split("/")[1].removesuffix(".py") for name in files_of("platform")} == set(LAYERS)


def test_platform_is_the_standard_library_in_the_repository_root() -> None:
    command = [sys.executable, "-c", "import platform; print(platform.__file__)"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(printed.stdout.strip()) == Path(sysconfig.get_path("stdlib"), "platform.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    modules = zip(python_files(package), modules_of(package), strict=True)
    wrong = [violation for file, module in modules for violation in violations(module, file.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mcis.datasets.sources.voc", "import mcis.models.crf"),
        ("mcis.models.crf", "from ..platform import report"),
        ("mcis.datasets.sampling.batch_stream", "def f():\n    from ray import get"),
        ("mcis.models.crf", "def f():\n    import ray.data"),
        ("mcis.tuning.studies", "from datasets.errors import UserError"),
        # What `import mcis` offers is for users.
        ("mcis.tuning.studies", "from mcis import run"),
        # Only commands import tuning, inside functions.
        ("mcis.platform.commands.study", "from mcis.tuning import studies"),
        ("mcis.platform.cli", "def f():\n    from mcis.tuning import studies"),
        # Imports within platform/ point one way.
        ("mcis.platform.config.sections", "from mcis.platform.runs.workspace import Workspace"),
        ("mcis.platform.runs.context", "def f():\n    from mcis.platform.networks import build"),
        ("mcis.platform.pipeline", "from mcis.platform.commands.terminal import show_result"),
        # Stages do not import each other.
        (
            "mcis.platform.stages.evaluation",
            "from mcis.platform.stages.pseudo_masks.needed_files import background_cue",
        ),
        ("mcis.platform.stages.localization.workers", "from ..pseudo_masks.making import MakeMasks"),
    ],
)
def test_imports_against_the_direction_are_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mcis.datasets.sampling.batch_stream", "import numpy\nfrom mcis.datasets import index"),
        ("mcis.platform.engine.decode_tasks", "def f():\n    import ray\nfrom mcis.datasets import index"),
        ("mcis.platform.cli", "import platform\nfrom mcis.platform.commands import study"),
        ("mcis.platform.commands.study", "def f():\n    from mcis.tuning import studies"),
        ("mcis.platform.stages.localization", "from mcis.platform.stages.localization.workers import Embed"),
        ("mcis.platform.pipeline", "from mcis.platform.stages import evaluation, index"),
    ],
)
def test_imports_along_the_direction_pass(module: str, source: str) -> None:
    assert violations(module, source) == []


def mutual_imports(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of modules that import each other, also late or for type annotations.

    Args:
        sources: Import name of a module -> its text.
    """
    imported: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {name for name, _ in imports_of(module, source)}
        parents = {name.rpartition(".")[0] for name in names}  # `from module import name`
        imported[module] = (names | parents) & sources.keys() - {module}
    return [(a, b) for a, others in imported.items() for b in sorted(others) if a < b and a in imported[b]]


def test_no_two_modules_import_each_other() -> None:
    sources: dict[str, str] = {}
    for package in PACKAGES:
        for module, file in zip(modules_of(package), python_files(package), strict=True):
            sources[module.removesuffix(".__init__")] = file.read_text()
    assert mutual_imports(sources) == []


def test_modules_that_import_each_other_are_found() -> None:
    sources = {
        "mcis.a": "def f():\n    from mcis.b import g",
        "mcis.b": "from mcis import a",
        "mcis.c": "import mcis.a",
    }
    assert mutual_imports(sources) == [("mcis.a", "mcis.b")]


def test_pyproject_lists_every_folder_with_modules() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = sorted({Path(name).parent.as_posix() for p in PACKAGES for name in files_of(p) if name.endswith(".py")})
    assert listed["packages"] == ["mcis", *("mcis." + folder.replace("/", ".") for folder in folders)]
    assert listed["package-dir"] == {"mcis": "."}


OPTIONAL = ("pillow_heif",)
"""Modules of extras that are imported at the top of a module, in a `try`."""


def distribution_of(requirement: str) -> str:
    """Returns the normalized name of the distribution that a requirement or a pin names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def installed_with(requirements: Iterable[str]) -> set[str]:
    """Returns the distributions that requirements name, and those that these require themselves."""
    distributions = {distribution_of(requirement) for requirement in requirements}
    for distribution in sorted(distributions):
        for requirement in importlib.metadata.requires(distribution) or []:
            if "extra ==" not in requirement:
                distributions.add(distribution_of(requirement))
    return distributions


def library_imports() -> Iterator[tuple[str, str, bool]]:
    """Yields each import of a library: the module, the library, and whether the import is inside a function."""
    for package in PACKAGES:
        for file, module in zip(python_files(package), modules_of(package), strict=True):
            for name, late in imports_of(module, file.read_text()):
                library = name.split(".")[0]
                if library != "mcis" and library not in sys.stdlib_module_names:
                    yield module, library, late


def test_libraries_that_modules_import_are_dependencies() -> None:
    """Functions may also import those of the extras, except for the tools of developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = installed_with(project["dependencies"])
    optional: set[str] = set()
    for extra, requirements in project["optional-dependencies"].items():
        if extra != "dev":
            optional |= installed_with(requirements)

    distributions = importlib.metadata.packages_distributions()
    missing = []
    for module, library, late in library_imports():
        allowed = required | optional if late or library in OPTIONAL else required
        if allowed.isdisjoint(map(distribution_of, distributions.get(library, []))):
            missing.append(f"{module} imports {library}")
    assert not missing, "\n".join(missing)


def test_dependencies_have_a_lower_bound_and_a_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {distribution_of(line) for line in lines if "==" in line and not line.startswith("#")}
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in requirements:
            if distribution_of(requirement) != "mcis":
                assert ">=" in requirement
                assert distribution_of(requirement) in pins


def test_the_wheel_contains_all_files_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        assert "mcis = mcis.platform.cli:main" in archive.read(entry_points).decode()
    packaged = sorted(name for name in names if ".dist-info/" not in name)
    files = [*TOP_FILES, *(name for package in PACKAGES for name in files_of(package))]
    assert packaged == sorted(f"mcis/{name}" for name in files)


IMPORT = """
import sys
import mcis
assert not {"ray", "torch", "mlflow"} & sys.modules.keys()
print(mcis.__version__)
print(*dir(mcis))
print(mcis.run.__module__, mcis.Predictor.__name__)
"""
OFFERED = ["Predictor", "UserError", "__version__", "compare", "evaluate", "index", "panel", "run", "scores", "study"]


def check_import(python: list[str], folder: Path) -> None:
    """Checks `import mcis` in an interpreter that is started in a folder."""
    done = subprocess.run([*python, "-c", IMPORT], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, names, functions = done.stdout.splitlines()
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert names.split() == OFFERED
    assert functions == "mcis.platform.api Predictor"


def test_import_of_the_checkout_offers_functions_and_loads_little(tmp_path: Path) -> None:
    check_import([sys.executable], tmp_path)


def test_import_of_the_wheel_offers_the_same(wheel: Path, tmp_path: Path) -> None:
    """The wheel precedes the editable install on the path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    command = [
        sys.executable,
        "-c",
        "import sys, mcis, mcis.platform.cli; print(mcis.__file__, mcis.platform.cli.__file__)",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    package = tmp_path / "site" / "mcis"
    assert printed.split() == [str(package / "__init__.py"), str(package / "platform" / "cli.py")]
    check_import(["env", f"PYTHONPATH={tmp_path / 'site'}", sys.executable], tmp_path)


def test_modules_import_inside_a_ray_worker(ray_local: None) -> None:
    import ray

    def import_all(modules: list[str]) -> dict[str, str]:
        origins = {name: str(importlib.import_module(name).__file__) for name in modules}
        return origins | {"platform": str(importlib.import_module("platform").__file__)}

    listed = [pair for p in PACKAGES for pair in zip(modules_of(p), python_files(p), strict=True)]
    files = {name.removesuffix(".__init__"): file for name, file in listed}
    origins = ray.get(ray.remote(num_cpus=1)(import_all).remote(list(files)))

    assert Path(origins.pop("platform")) == Path(sysconfig.get_path("stdlib"), "platform.py")
    assert {name: Path(origin).resolve() for name, origin in origins.items()} == files


def test_images_are_read_with_their_value_range() -> None:
    """A reader without `data.value_range` would show other pixels than the network was trained on."""
    readers = {"read_rgb", "read_picture", "read_squares", "add_squares", "make_squares", "Squares"}
    readers |= {"MaskedImages", "LabeledImage"}
    without_range = []
    for path in python_files("platform"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = {part.id for part in (node.func, *node.args) if isinstance(part, ast.Name)}
            if called & readers and "value_range" not in ast.unparse(node):
                without_range.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    # the measurements of the machine read no image from a file
    assert not [call for call in without_range if not call.startswith("platform/reporting/machine_speed.py")]


def test_tracked_files_contain_no_paths_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]

    assert files, "no files tracked by Git: run the test in a checkout"
    machine_paths = [re.escape(str(path)) for path in (ROOT, Path.home()) if path != Path(path.anchor)]
    common_paths = r"/(?:home|root|Users|work|opt|private)/\w"
    pattern = re.compile(rf"(?<![\w.~$}})/-])(?:{'|'.join([*machine_paths, common_paths])})(?!\w-)".encode())
    paths = {str(path.relative_to(ROOT)): hit.group() for path in files for hit in pattern.finditer(path.read_bytes())}

    assert not paths
