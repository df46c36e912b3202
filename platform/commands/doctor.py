"""The command `mcis doctor`: whether this machine is fit for the job, and what to do where it is not."""

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import typer

from mcis.datasets.errors import UserError
from mcis.platform.commands.options import DEFAULT_WORKSPACE, WorkspaceFolder

_LEAST = 2**29
"""Disk space that the demo takes, bytes."""


class Check(NamedTuple):
    """One line of the screen: `state` is ok, note or bad; `remedy` says what to do where it is not ok."""

    part: str
    state: str
    finding: str
    remedy: str = ""


def doctor(workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not."""
    from mcis.platform.commands.terminal import console, table_of

    results = checks(workspace.expanduser())
    table = table_of("Is this machine fit for mcis?", ("part", "state", "found", "what to do"), results)
    for row, check in zip(table.rows, results, strict=True):
        row.style = {"ok": None, "note": "yellow", "bad": "red"}[check.state]
    console.print(table)
    if any(check.state == "bad" for check in results):
        raise typer.Exit(1)


def checks(workspace: Path) -> list[Check]:
    """All parts; one that fails is a line, no exception."""
    parts: dict[str, Callable[[], tuple[str, ...]]] = {
        "python": lambda: ("ok", platform.python_version()),
        "torch": _torch,
        "gpu": _gpu,
        "dense CRF": _dense_crf,
        "ray": _ray,
        "mlflow": lambda: _mlflow(workspace),
        "disk": lambda: _disk(workspace),
        "cores, memory": _cores,
    }
    out = []
    for part, check in parts.items():
        try:
            found = check()
        except UserError as error:
            found = "bad", error.found, error.remedy
        except Exception as error:  # a broken part is what this screen is for
            found = "bad", f"{type(error).__name__}: {str(error)[:120]}", "run `make test`'s install step again"
        out.append(Check(part, *found))
    return out


def _torch() -> tuple[str, ...]:
    import torch

    return "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        remedy = "photos and small run on the CPU; paper, released and lid want a CUDA GPU and a CUDA build of torch"
        return "note", "none", remedy
    free, total = torch.cuda.mem_get_info()
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return "ok", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"


def _dense_crf() -> tuple[str, ...]:
    import numpy as np

    from mcis.models.crf import CrfParameters, dense_crf

    out = dense_crf(np.zeros((8, 8, 3), np.uint8), np.full((2, 8, 8), 0.5, np.float32), CrfParameters())
    return "ok" if abs(float(out.sum()) - 64) < 1e-2 else "bad", "pydensecrf computes"


def _ray() -> tuple[str, ...]:
    import ray

    if len(folder := tempfile.gettempdir()) > 40:
        return "bad", f"{folder} is too long a name for Ray's sockets", "set TMPDIR to a short path"
    address = os.environ.get("RAY_ADDRESS")
    where = f"cluster {address}" if address else "a local Ray is started for each run"
    return "ok", f"{ray.__version__}, {where}"


def _mlflow(workspace: Path) -> tuple[str, ...]:
    import mlflow

    from mcis.platform.runs.tracking_store import server_uri

    return "ok", f"{mlflow.__version__}, " + (server_uri() or f"SQLite store in {workspace}")


def _disk(workspace: Path) -> tuple[str, ...]:
    from mcis.platform.runs.files import byte_text, free_bytes

    folder = next(p for p in (workspace, *workspace.resolve().parents) if p.exists())
    if not os.access(folder, os.W_OK):
        return "bad", f"{folder} cannot be written", "choose another --workspace DIR"
    free = free_bytes(workspace)
    found = f"even the demo takes {byte_text(_LEAST)} of {byte_text(free)} free for the workspace"
    return ("ok", found) if free >= _LEAST else ("bad", found, "free some space, or choose another --workspace DIR")


def _cores() -> tuple[str, ...]:
    from mcis.platform.runs.files import byte_text

    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{cores} cores, {byte_text(memory)}"
    fit = cores >= 2 and memory >= 6 * 2**30
    return ("ok", found) if fit else ("note", found, "2 cores and 6 GiB are the least")
