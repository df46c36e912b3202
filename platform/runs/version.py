"""Versions that results depend on: of the project, its commit, the code that a stage runs, and what is below it."""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_COMPUTE_NOTHING = tuple(f"mcis.platform.{name}" for name in ("commands", "config", "pipeline", "reporting", "runs"))
"""Packages and modules that no output depends on: values of the configuration are in keys."""
_SCHEDULES = "mcis.platform.config.training"  # computes how many updates a training has
_MADE_WITH = ("torch", "pillow", "timm", "pydensecrf2")
_PACKAGES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pyarrow", "pillow", "pydensecrf2")
_ENTRY = re.compile(r"mcis(\.\w+)+:\w+")
"""An entry of a table that is imported when it is first asked for."""


class Commit(NamedTuple):
    """A checkout's commit, and whether files differ from it."""

    name: str
    modified: bool


@functools.cache
def git_commit() -> Commit | None:
    """The commit of the running checkout, 40 hexadecimal digits; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(_ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != _ROOT:
            return None
        return Commit(git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):
        return None


def git_revision() -> str | None:
    """Twelve digits of the commit, with `+` behind it where files differ from it; None outside a checkout."""
    commit = git_commit()
    return commit and commit.name[:12] + ("+" if commit.modified else "")


def code_of(module: str) -> str:
    """Sixteen digits of the SHA-256 of what a module of mcis runs: its syntax tree, without comments and docstrings,
    and those of the modules that it imports, directly or through others, as far as they compute.

    Configuration is left out, as keys have its values; so is what only records, shows or starts a computation. Entries
    of tables that name a module as text are imports too, and what installed packages add to tables counts for all. It
    is the same of a wheel and of the checkout that it was built from.
    """
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        computes = name == _SCHEDULES or not name.startswith(_COMPUTE_NOTHING)
        if name not in reached and _file(name) and computes:
            reached.add(name)
            waiting += _parsed(name)[1]
    lines = [f"{name} {_parsed(name)[0]}" for name in sorted(reached)] + list(_of_packages())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def code_digest() -> str:
    """As `code_of` of all stages."""
    stages = _ROOT / "platform" / "stages"
    names = [f"mcis.platform.stages.{path.stem}" for path in sorted(stages.iterdir()) if not path.name.startswith("_")]
    return hashlib.sha256(" ".join(map(code_of, names)).encode()).hexdigest()[:16]


def _file(module: str) -> Path | None:
    """The file of a module of mcis; None for other names, and for packages without code."""
    package, *names = module.split(".")
    path = _ROOT.joinpath(*names)
    files = (path.with_suffix(".py"), path / "__init__.py") if package == "mcis" and names else ()
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """The digest of a module's syntax tree, and the names that it imports, modules or what they hold."""
    file = _file(module)
    assert file is not None
    tree = ast.parse(file.read_bytes())
    names = tuple(_imports(tree))
    return hashlib.sha256(ast.dump(_Bare().visit(tree)).encode()).hexdigest(), names


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names that may be modules of mcis, also of imports that wait inside a function, and of tables' texts; no import
    of the project is relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _ENTRY.fullmatch(node.value):
            yield node.value.partition(":")[0]


class _Bare(ast.NodeTransformer):
    """Leaves out docstrings, those of attributes among them, which are texts that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node


@functools.cache
def _of_packages() -> tuple[str, ...]:
    """The packages whose modules stand in the tables of mcis, each with a digest of all its modules."""
    found = importlib.metadata.entry_points()
    points = [point for group in found.groups if group.startswith("mcis.") for point in found.select(group=group)]
    lines = []
    for name in sorted({point.module.partition(".")[0] for point in points}):
        spec = importlib.util.find_spec(name)
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
        files = {file for place in places for file in (Path(place), *Path(place).rglob("*.py")) if file.is_file()}
        content = b"".join(file.read_bytes() for file in sorted(files))
        lines.append(f"{name} {hashlib.sha256(content).hexdigest()}")
    return tuple(lines)


def made_with(module: str, device: str | None) -> dict[str, str | None]:
    """The software and the class of device that an output is made with: others make other bits, or another output.

    Args:
        module: of mcis, that makes it.
        device: None where no network has a part in it.
    """
    packages = {name: importlib.metadata.version(name) for name in _MADE_WITH}
    return {"code": code_of(module), "device": device, **packages}


def project_version() -> str:
    """The version of the installed project."""
    return importlib.metadata.version("mcis")


def environment(device: str) -> dict[str, str]:
    """Versions of Python, the machine, the packages and the project's own code, and the class of device."""
    versions = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    versions["cores"] = str(os.cpu_count())
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    return versions | {"mcis": project_version(), "code": code_digest(), "device": device}
