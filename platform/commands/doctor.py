"""Whether this machine is fit for the job: one line per part, with what to do where it is not."""

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError

_LEAST = 2**29
"""Disk space that the demo takes, bytes."""


class Check(NamedTuple):
    """One line of the screen: `state` is ok, note or bad; `remedy` says what to do where it is not ok."""

    part: str
    state: str
    finding: str
    remedy: str = ""


def _python() -> Check:
    fit = sys.version_info >= (3, 11)
    return Check(
        "python", "ok" if fit else "bad", platform.python_version(), "" if fit else "install Python 3.11 or newer"
    )


def _torch() -> Check:
    import torch

    value = float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())
    return Check("torch", "ok" if value == 512 else "bad", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(
            "gpu",
            "note",
            "none",
            "recipe small runs on the CPU; paper and released want a CUDA GPU and a CUDA build of torch",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info()
    return Check("gpu", "ok", f"{len(names)} x {names[0]}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")


def _torchvision() -> Check:
    from mcis.models.torchvision_ops import compiled_operators_load  # before torchvision, which it makes importable

    version = importlib.metadata.version("torchvision")
    if compiled_operators_load():
        return Check("torchvision", "ok", f"{version}, compiled operators load")
    return Check(
        "torchvision",
        "note",
        f"{version}, compiled operators do not load beside this torch",
        "nothing here needs them; install the torchvision build that matches torch to have them",
    )


def _dense_crf() -> Check:
    import numpy as np

    from mcis.models.crf import CrfParameters, dense_crf

    out = dense_crf(np.zeros((8, 8, 3), np.uint8), np.full((2, 8, 8), 0.5, np.float32), CrfParameters())
    return Check("dense CRF", "ok" if abs(float(out.sum()) - 64) < 1e-2 else "bad", "pydensecrf computes")


def _ray() -> Check:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    return Check(
        "ray",
        "ok",
        f"{ray.__version__}, " + (f"cluster {address}" if address else "a local Ray is started for each run"),
    )


def _mlflow(workspace: Path) -> Check:
    import mlflow

    from mcis.platform.runs.tracking_store import server_uri

    try:
        uri = server_uri()
    except UserError as error:
        return Check("mlflow", "bad", error.found, error.remedy)
    return Check("mlflow", "ok", f"{mlflow.__version__}, " + (uri or f"SQLite store in {workspace}"))


def _disk(workspace: Path, wanted: int) -> Check:
    from mcis.platform.runs.files import free_bytes, in_words

    folder = next(p for p in (workspace, *workspace.resolve().parents) if p.exists())
    if not os.access(folder, os.W_OK):
        return Check("disk", "bad", f"{folder} cannot be written", "choose another --workspace DIR")
    free, least = free_bytes(workspace), wanted or _LEAST
    what = "the run" if wanted else "even the demo"
    found = f"{what} takes {in_words(least)} of {in_words(free)} free for the workspace"
    if free < least:
        return Check("disk", "bad", found, "free some space, or choose another --workspace DIR")
    return Check("disk", "ok", found)


def _temporary() -> Check:
    folder = tempfile.gettempdir()
    if len(folder) > 40:
        return Check(
            "temporary files", "bad", f"{folder} is too long a name for Ray's sockets", "set TMPDIR to a short path"
        )
    return Check("temporary files", "ok", folder)


def _cores() -> Check:
    from mcis.platform.runs.files import in_words

    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{cores} cores, {in_words(memory)}"
    if cores < 2 or memory < 6 * 2**30:
        return Check("cores, memory", "note", found, "2 cores and 6 GiB are the least")
    return Check("cores, memory", "ok", found)


def checks(workspace: Path, wanted: int = 0) -> list[Check]:
    """All parts; one that fails is a line of the result, not an exception.

    Args:
        wanted: bytes that the run takes which the machine is looked at for; 0 = any run.
    """
    parts: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("torch", _torch),
        ("gpu", _gpu),
        ("torchvision", _torchvision),
        ("dense CRF", _dense_crf),
        ("ray", _ray),
        ("mlflow", lambda: _mlflow(workspace)),
        ("disk", lambda: _disk(workspace, wanted)),
        ("temporary files", _temporary),
        ("cores, memory", _cores),
    ]
    out = []
    for part, check in parts:
        try:
            out.append(check())
        except Exception as error:  # a broken part is what this screen is for
            out.append(
                Check(
                    part, "bad", f"{type(error).__name__}: {str(error)[:120]}", "run `make test`'s install step again"
                )
            )
    return out
