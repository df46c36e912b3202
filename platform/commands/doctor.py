"""The command `mcis doctor`: whether this machine is fit for the job, and what to do where it is not."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal

from mcis.datasets.errors import UserError
from mcis.platform.commands.options import DEFAULT_WORKSPACE, WorkspaceFolder, plain_errors
from mcis.platform.runs.version import git_revision, project_version

_LEAST = 2**29
"""Disk space that the demo takes, bytes."""
_SPEED = ("python", "torch", "gpu", "cores, memory")
"""Parts that speed depends on; the others name folders and servers, which are nobody else's."""


class Check(NamedTuple):
    """One line of the screen: `state` is ok, note or bad; `remedy` says what to do where it is not ok."""

    part: str
    state: str
    finding: str
    remedy: str = ""
    values: Mapping[str, float] = {}  # in figures


def doctor(
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    bench: Annotated[bool, typer.Option("--bench", help="Measure for some minutes how exact and fast it is.")] = False,
    out: Annotated[Path, typer.Option(help="File of what --bench finds, for an issue.")] = Path("doctor-bench.json"),
) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not."""
    from mcis.platform.reporting.terminal import make_table
    from mcis.platform.runs.progress import console

    results, title = checks(workspace.expanduser()), "Is this machine fit for mcis?"
    if bench:
        from mcis.platform.commands.bench import Bench

        results = [*(check for check in results if check.part in _SPEED), *Bench().measure()]
        title = "How exact and how fast is it?"
    table = make_table(title, ("part", "state", "found", "what to do"), (check[:4] for check in results))
    for row, check in zip(table.rows, results, strict=True):
        row.style = {"ok": None, "note": "yellow", "bad": "red"}[check.state]
    console.print(table)
    if bench:
        from mcis.platform.runs.files import disk_errors, write_json

        with plain_errors(resumes=False), disk_errors(out):
            write_json(out, [check._asdict() for check in results])
        console.print(f"file: {out.resolve()}")
    if any(check.state == "bad" for check in results):
        raise typer.Exit(1)


def checks(workspace: Path) -> list[Check]:
    """All parts of `mcis doctor` but --bench."""
    parts: dict[str, Callable[[], tuple[str, ...]]] = {
        "python": lambda: ("ok", f"{platform.python_version()}, mcis {project_version()} {git_revision() or ''}"),
        "torch": _torch,
        "gpu": _gpu,
        "dense CRF": _dense_crf,
        "ray": _ray,
        "mlflow": lambda: _mlflow(workspace),
        "disk": lambda: _disk(workspace),
        "cores, memory": _cores,
    }
    return list(checked(parts, "call `make clean`, then `make install`"))


def checked(parts: Mapping[str, Callable[[], tuple[Any, ...]]], remedy: str) -> Iterator[Check]:
    """The line of each part; one that fails is a line with the remedy, no exception."""
    for part, check in parts.items():
        try:
            found = check()
        except UserError as error:
            found = "bad", error.found, error.remedy
        except Exception as error:  # a broken part is what this screen is for
            found = "bad", f"{type(error).__name__}: {str(error)[:120]}", remedy
        yield Check(part, *found)


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

    if len(folder := "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()) > 40:
        return "bad", f"{folder} is too long a name for Ray's sockets", "set TMPDIR to a short path"
    address = os.environ.get("RAY_ADDRESS")
    where = f"cluster {address}" if address else "a local Ray is started for each run"
    return "ok", f"{ray.__version__}, {where}"


def _mlflow(workspace: Path) -> tuple[str, ...]:
    import mlflow

    from mcis.platform.runs.tracking_store import server_uri

    return "ok", f"{mlflow.__version__}, " + (server_uri() or f"SQLite store in {workspace}")


def _disk(workspace: Path) -> tuple[str, ...]:
    folder = next(p for p in (workspace, *workspace.resolve().parents) if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return "bad", f"{folder} cannot be written", "choose another --workspace DIR"
    free = shutil.disk_usage(folder).free
    found = f"even the demo takes {decimal(_LEAST)} of {decimal(free)} free for the workspace"
    return ("ok", found) if free >= _LEAST else ("bad", found, "free some space, or choose another --workspace DIR")


def _cores() -> tuple[str, ...]:
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{cores} cores, {memory / 2**30:.1f} GiB"
    fit = cores >= 2 and memory >= 6 * 2**30
    return ("ok", found) if fit else ("note", found, "2 cores and 6 GiB are the least")
