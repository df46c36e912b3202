"""The revision of the project that is running."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path
from typing import NamedTuple


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


def project_version() -> str:
    """The version of the installed project."""
    return importlib.metadata.version("mcis")
