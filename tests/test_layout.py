"""The house stands as ARCHITECTURE.md draws it: layout, direction of imports, packaging, docstrings."""

import ast
import importlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("datasets", "models", "platform", "tuning")  # each imports from itself and from those before it


def files_of(room: str) -> list[str]:
    """Every file of a room that Git or a wheel should hold, relative to the repository."""
    found = [p for p in (ROOT / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT).as_posix() for p in found)


def modules_of(room: str) -> list[str]:
    """Import names of a room's modules, as `mcis.models.losses`."""
    return ["mcis." + f.removesuffix(".py").replace("/", ".") for f in files_of(room) if f.endswith(".py")]


def python_files(folder: str) -> list[Path]:
    """A folder's modules, in the order of `modules_of`."""
    return [ROOT / name for name in files_of(folder) if name.endswith(".py")]


def imports_of(module: str, source: str) -> Iterator[tuple[str, bool]]:
    """Each absolute name a module imports, and whether the import waits inside a function."""

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
    """Imports against the house's direction in one module, in words."""
    room = module.split(".")[1]
    allowed = ROOMS[: ROOMS.index(room) + 1]
    wrong = []
    for name, late in imports_of(module, source):
        package, *inside = name.split(".")
        if package == "mcis":
            studies_asked_for = module == "mcis.platform.cli" and inside[:1] == ["tuning"] and late
            if inside and inside[0] not in allowed and not studies_asked_for:
                wrong.append(f"{module} imports {name}")
        elif package in ROOMS and package not in sys.stdlib_module_names:
            wrong.append(f"{module} imports {name} without mcis.")
        elif room == "models" and package in {"ray", "mlflow"}:
            wrong.append(f"{module} imports {name}: the models are plain torch and numpy")
    return wrong


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_have_modules_and_no_init(room: str) -> None:
    assert modules_of(room), f"{room}/ holds no module"
    assert not (ROOT / room / "__init__.py").exists(), f"{room}/__init__.py shadows modules of that name; delete it"


def test_platform_is_the_standard_librarys_in_the_repository_root() -> None:
    command = [sys.executable, "-c", "import platform; print(platform.__file__)"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(printed.stdout.strip()) == Path(sysconfig.get_path("stdlib"), "platform.py")


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    wrong = [v for f, m in zip(python_files(room), modules_of(room), strict=True) for v in violations(m, f.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mcis.datasets.sources.voc", "import mcis.models.crf"),
        ("mcis.datasets.sources.voc", "from mcis import models"),
        ("mcis.models.crf", "from ..platform import report"),
        ("mcis.models.crf", "def f():\n    import ray.data"),
        ("mcis.models.crf", "from mlflow import log_metric"),
        ("mcis.models.crf", "if TYPE_CHECKING:\n    from mcis.platform.config.sections import Config"),
        ("mcis.platform.cli", "from mcis.tuning import studies"),
        ("mcis.platform.reporting.run_page", "def f():\n    from mcis.tuning import studies"),
        ("mcis.platform.stages.index", "from ...tuning.studies import run"),
        ("mcis.tuning.studies", "from datasets.errors import UserError"),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mcis.datasets.stream", "import ray\nfrom mcis.datasets import index"),
        ("mcis.models.crf", "from . import metrics\nfrom ..datasets.errors import UserError"),
        ("mcis.platform.cli", "import platform\ndef study():\n    from mcis.tuning import studies"),
        ("mcis.tuning.studies", "import mcis.platform.pipeline, mcis.models.crf, mlflow"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_the_wheel_holds_every_file_of_the_rooms_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        assert "mcis = mcis.platform.cli:main" in archive.read(entry_points).decode()
    packaged = sorted(name for name in names if ".dist-info/" not in name)
    assert packaged == sorted(f"mcis/{name}" for room in ROOMS for name in files_of(room))


def test_modules_import_inside_a_ray_worker(ray_local: None) -> None:
    import ray

    def import_all(modules: list[str]) -> dict[str, str]:
        origins = {name: str(importlib.import_module(name).__file__) for name in modules}
        return origins | {"platform": str(importlib.import_module("platform").__file__)}

    modules = [name for room in ROOMS for name in modules_of(room)]
    origins = ray.get(ray.remote(num_cpus=1)(import_all).remote(modules))
    assert Path(origins.pop("platform")) == Path(sysconfig.get_path("stdlib"), "platform.py")
    here = {name: ROOT / (name.removeprefix("mcis.").replace(".", "/") + ".py") for name in modules}
    assert {name: Path(origin).resolve() for name, origin in origins.items()} == here


def test_every_module_says_what_it_is() -> None:
    files = [path for folder in (*ROOMS, "tests", "benchmarks") for path in python_files(folder)]
    silent = [str(path.relative_to(ROOT)) for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "no docstring: " + ", ".join(silent)


def test_no_tracked_file_names_a_path_of_some_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert files, "Git tracks no file here: the test needs a checkout"
    of_this = [re.escape(str(path)) for path in (ROOT, Path.home()) if path != Path(path.anchor)]
    of_any = r"/(?:home|root|Users|work|opt|private)/\w"
    pattern = re.compile(rf"(?<![\w.~$}})/-])(?:{'|'.join([*of_this, of_any])})(?!\w-)".encode())
    found = {str(path.relative_to(ROOT)): hit.group() for path in files for hit in pattern.finditer(path.read_bytes())}
    assert not found
