"""The version of the project that is running: its release, its commit, and the content of the code itself."""

import functools
import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import NamedTuple

_COMPUTES = ("datasets", "models", *(f"platform/{name}" for name in ("config", "engine", "networks", "runs", "stages")))
"""The folders whose sources stages compute with, in a checkout and in an installed package."""


class Commit(NamedTuple):
    """A checkout's commit, and whether files differ from it."""

    name: str
    modified: bool


@functools.cache
def git_commit() -> Commit | None:
    """The commit of the running checkout, 40 hexadecimal digits; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        finished = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return finished.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        return Commit(git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):
        return None


def git_revision() -> str | None:
    """Twelve digits of the commit, with `+` behind it where files differ from it; None outside a checkout."""
    commit = git_commit()
    return commit and commit.name[:12] + ("+" if commit.modified else "")


@functools.cache
def code_digest() -> str:
    """Sixteen digits of the SHA-256 of all sources that can change what a stage computes, by their names.

    It is the same of a wheel and of the checkout that it was built from.
    """
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    files = [file.relative_to(root).as_posix() for folder in _COMPUTES for file in (root / folder).rglob("*.py")]
    for name in sorted(files):
        digest.update(f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def made_with(device: str | None) -> dict[str, str | None]:
    """The software and the class of device that an output is made with: others make other bits, or another output.

    Args:
        device: None where no network has a part in it.
    """
    return {"code": code_digest(), "torch": importlib.metadata.version("torch"), "device": device}


def project_version() -> str:
    """The version of the installed project."""
    return importlib.metadata.version("mcis")
