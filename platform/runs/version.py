"""Versions that affect results: the project, its Git commit, the code of a stage, and installed packages."""

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
_NO_EFFECT_ON_OUTPUTS = tuple(
    f"mcis.platform.{name}" for name in ("commands", "config", "pipeline", "reporting", "runs")
)
"""Packages and modules whose code does not affect outputs. (Values of the configuration are part of stage keys.)"""
_STEP_COUNTS = "mcis.platform.config.training"
"""The exception: a module of the configuration that computes the number of steps of a training."""
_VERSION_VARIABLE = "MCIS_JOB_VERSION"
"""Environment variable for the version of the code that was copied for a job."""
_COMMIT_VARIABLE = "MCIS_JOB_COMMIT"
"""Environment variable for the commit of the code that was copied for a job, followed by `+` if files were modified."""
_MADE_WITH = ("torch", "pillow", "timm", "pydensecrf2")
_PACKAGES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pyarrow", "pillow", "pydensecrf2")
_LAZY_ENTRY = re.compile(r"mcis(\.\w+)+:\w+")
"""Entry of a registry that is imported on first use."""


class Commit(NamedTuple):
    """State of a checkout.

    Attributes:
        name: The commit, 40 hexadecimal digits.
        modified: Whether tracked files differ from it.
    """

    name: str
    modified: bool


def git_commit() -> Commit | None:
    """Commit of the checkout that the code runs from, or from which its job was submitted; None if there is none."""
    of_job = os.environ.get(_COMMIT_VARIABLE)
    if of_job:
        return Commit(of_job.removesuffix("+"), of_job.endswith("+"))
    return _checked_out_commit()


@functools.cache
def _checked_out_commit() -> Commit | None:
    """Commit of the checkout that the code runs from; None outside a checkout."""

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
    """First twelve digits of the commit, followed by `+` if files were modified; None outside a checkout."""
    commit = git_commit()
    if commit is None:
        return None
    suffix = "+" if commit.modified else ""
    return commit.name[:12] + suffix


def code_of(module: str) -> str:
    """Digest of the code that a module of mcis runs: its syntax tree and those of all modules that it imports.

    Comments and docstrings are ignored, and so are modules that do not affect outputs: configuration (its values are
    part of stage keys), recording, reporting and commands. Registry entries that name a module as text count as
    imports. Packages that add registry entries count for every module. A wheel and the checkout that it was built from
    have the same digest.

    Returns:
        The first sixteen hexadecimal digits of the SHA-256.
    """
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        affects_outputs = name == _STEP_COUNTS or not name.startswith(_NO_EFFECT_ON_OUTPUTS)
        if name not in reached and _file(name) and affects_outputs:
            reached.add(name)
            waiting += _parsed(name)[1]

    lines = [f"{name} {_parsed(name)[0]}" for name in sorted(reached)]
    lines += _package_digests()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def code_digest() -> str:
    """Digest of the code of all stages, see `code_of`."""
    stages = _ROOT / "platform" / "stages"
    names = [f"mcis.platform.stages.{path.stem}" for path in sorted(stages.iterdir()) if not path.name.startswith("_")]
    return hashlib.sha256(" ".join(map(code_of, names)).encode()).hexdigest()[:16]


@functools.cache
def _file(module: str) -> Path | None:
    """Source file of a module of mcis; None for other names and for packages without code."""
    package, *names = module.split(".")
    if package != "mcis" or not names:
        return None
    path = _ROOT.joinpath(*names)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@functools.cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's syntax tree, and the names that it imports (modules or their members)."""
    file = _file(module)
    assert file is not None
    tree = ast.parse(file.read_bytes())
    names = tuple(_imports(tree))
    stripped = _RemoveDocstrings().visit(tree)
    return hashlib.sha256(ast.dump(stripped).encode()).hexdigest(), names


def _imports(tree: ast.AST) -> Iterator[str]:
    """Imported names, including late imports inside functions and registry entries given as text.

    Relative imports are not used in this project.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _LAZY_ENTRY.fullmatch(node.value):
            yield node.value.partition(":")[0]


class _RemoveDocstrings(ast.NodeTransformer):
    """Removes docstrings of modules, classes, functions and attributes: expressions that are only a string."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_docstring = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_docstring else node


@functools.cache
def _package_digests() -> tuple[str, ...]:
    """Lines `<package> <digest of its modules>` for all packages that add entries to the registries of mcis."""
    entry_points = importlib.metadata.entry_points()
    packages: set[str] = set()
    for group in entry_points.groups:
        if group.startswith("mcis."):
            packages.update(point.module.partition(".")[0] for point in entry_points.select(group=group))

    lines = []
    for package in sorted(packages):
        content = b"".join(file.read_bytes() for file in _package_files(package))
        lines.append(f"{package} {hashlib.sha256(content).hexdigest()}")
    return tuple(lines)


def _package_files(package: str) -> list[Path]:
    """Sorted source files of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    locations = list(spec.submodule_search_locations or ())
    if spec.origin and spec.has_location:  # a package without `__init__.py` has none
        locations.append(spec.origin)

    files: set[Path] = set()
    for location in locations:
        path = Path(location)
        files.update(file for file in (path, *path.rglob("*.py")) if file.is_file())
    return sorted(files)


def made_with(module: str, device: str | None) -> dict[str, str | None]:
    """Code, package versions and type of device with which an output is computed. They are part of its stage key.

    Args:
        module: Module of mcis that computes the output.
        device: `cpu` or `cuda`; None if no network is involved.
    """
    packages = {name: importlib.metadata.version(name) for name in _MADE_WITH}
    return {"code": code_of(module), "device": device, **packages}


def project_version() -> str:
    """Version of the project; `unknown` for a copy of its code that is neither installed nor that of a job."""
    of_job = os.environ.get(_VERSION_VARIABLE)
    if of_job:
        return of_job
    try:
        return importlib.metadata.version("mcis")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def job_variables() -> dict[str, str]:
    """Environment variables that tell a copy of this code, which a job runs, its version and its commit."""
    variables = {_VERSION_VARIABLE: project_version()}
    commit = git_commit()
    if commit:
        variables[_COMMIT_VARIABLE] = f"{commit.name}{'+' if commit.modified else ''}"
    return variables


def environment(device: str) -> dict[str, str]:
    """Versions of Python, packages and the project's code, the machine, and the type of device."""
    versions = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    versions["cores"] = str(os.cpu_count())
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    return versions | {"mcis": project_version(), "code": code_digest(), "device": device}
