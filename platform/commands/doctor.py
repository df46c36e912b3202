"""The command `mcis doctor`: checks whether mcis works on this machine, and says what to do if it does not."""

import functools
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from mcis.platform.commands.checks import Check, Finding, run_checks
from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import Overrides, WorkspaceFolder, grouped, parse_output
from mcis.platform.runs.version import git_revision, project_version
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace

if TYPE_CHECKING:
    from mcis.platform.reporting.sizing import Sizing

_DEMO_BYTES = 2**29
"""Disk space that the demo needs."""
_MIN_CORES = 2
_MIN_MEMORY = 6 * 2**30
_MAX_TEMP_NAME = 40
"""Longest name of the temporary folder: the paths of Ray's sockets are limited to about 100 characters."""
_PARTS_OF_SPEED = ("python", "torch", "gpu", "cores, memory")
"""Parts that are written to the file of --bench. The others name folders and servers, which are private."""
_STYLES = {"ok": None, "note": "yellow", "bad": "red"}


@grouped
def doctor(
    overrides: Overrides,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    source: Annotated[
        str | None,
        typer.Option("--for", metavar="SOURCE", help="Also compare what a run on this table needs with what is free."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe of the run that --for describes.")] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure accuracy and speed instead, which takes some minutes.")
    ] = False,
    out: Annotated[
        Path, typer.Option(parser=parse_output, metavar="PATH", help="File for the results of --bench.")
    ] = Path("doctor-bench.json"),
) -> None:
    """Check torch, GPU, dense CRF, Ray, MLflow, disk and cores, and say what to do about each problem."""
    from mcis.platform.reporting.terminal import make_table
    from mcis.platform.runs.progress import console

    if source is not None and bench:
        raise typer.BadParameter("--for and --bench are checks of their own: call them one after the other")
    title = "Does mcis work on this machine?"
    sizing = None
    if source is not None:
        with plain_errors(resumes=False):
            sizing = _size(source, recipe, overrides, workspace)
    elif recipe or overrides.words or overrides.assignments:
        raise typer.BadParameter("--recipe and KEY=VALUE describe a run on a table; name it with --for")

    results = check_machine(workspace.expanduser())
    if sizing:
        results += run_checks({"run": functools.partial(_check_run, sizing)}, "report it")
    if bench:
        from mcis.platform.commands.bench import Bench

        title = "How accurate and how fast is this machine?"
        results = [check for check in results if check.part in _PARTS_OF_SPEED]
        results += Bench().measure()

    table = make_table(title, ("part", "state", "found", "what to do"), (check[:4] for check in results))
    for row, check in zip(table.rows, results, strict=True):
        row.style = _STYLES[check.state]
    console.print(table)
    if sizing:
        from mcis.platform.reporting.sizing import print_parts

        print_parts(sizing)
        console.print("Each stage prints its rate and the time left from its first shard on.")

    if bench:
        from mcis.platform.runs.files import disk_errors, write_json

        with plain_errors(resumes=False), disk_errors(out):
            write_json(out, [check._asdict() for check in results])
        console.print(f"file: {out.resolve()}")
    if any(check.state == "bad" for check in results):
        raise typer.Exit(1)


def check_machine(workspace: Path) -> list[Check]:
    """Returns all checks except those of --bench."""
    parts: dict[str, Callable[[], Finding]] = {
        "python": _check_python,
        "torch": _check_torch,
        "gpu": _check_gpu,
        "dense CRF": _check_dense_crf,
        "ray": _check_ray,
        "mlflow": lambda: _check_mlflow(workspace),
        "disk": lambda: _check_disk(workspace),
        "cores, memory": _check_cores,
    }
    return list(run_checks(parts, "run `make clean`, then `make install`"))


def _size(source: str, recipe: str | None, overrides: Overrides, workspace: Path) -> "Sizing":
    """Computes what a run needs whose stages are all still to be computed."""
    from mcis.platform import pipeline
    from mcis.platform.config.resolve import resolve
    from mcis.platform.reporting.sizing import size_run
    from mcis.platform.runs.listing import Sources

    config = resolve(source, recipe, overrides=overrides.texts()).config
    stages = [stage.name for stage in pipeline.STAGES if stage.takes_part(config)]
    opened = Workspace(workspace, create=False, may_be_missing=True)
    return size_run(config, opened, Sources(config).listing(), stages)


def _check_run(sizing: "Sizing") -> Finding:
    """Compares what a run needs with what is free."""
    from mcis.platform.reporting.sizing import check_disks, memory_note, needs_text

    check_disks(sizing)
    found = f"{sizing.images:,} images: {needs_text(sizing)}"
    note = memory_note(sizing)
    return Finding("note", found, note) if note else Finding("ok", found)


def _check_python() -> Finding:
    return Finding("ok", f"{platform.python_version()}, mcis {project_version()} {git_revision() or ''}")


def _check_torch() -> Finding:
    import torch

    return Finding("ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _check_gpu() -> Finding:
    """Checks whether there is a GPU, whether torch can use it, and which option makes mcis use it."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found = f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        recipes = ", ".join(_cpu_recipes())
        return Finding("note", found, f"recipes {recipes} use it only with --gpu (compute.gpu=true)")

    if shutil.which("nvidia-smi") is None:
        return Finding(
            "note", "none", f"recipes {', '.join(_cpu_recipes())} run on the CPU; the others need a CUDA GPU"
        )

    if torch.version.cuda is None:
        return Finding(
            "note",
            f"nvidia-smi is installed, but torch {torch.__version__} is a CPU build",
            "install a CUDA build of torch (docs/howto/gpu.md), then use --gpu",
        )
    return Finding(
        "note",
        f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU",
        "check that `nvidia-smi` lists one, that the driver supports torch's CUDA version, and CUDA_VISIBLE_DEVICES",
    )


def _cpu_recipes() -> list[str]:
    """Returns the recipes that run on the CPU unless --gpu is set."""
    from mcis.platform.config.recipes import RECIPES

    return [name for name, make_config in RECIPES.items() if not make_config().compute.gpu]


def _check_dense_crf() -> Finding:
    import numpy as np

    from mcis.models.crf import CrfParameters, dense_crf

    image = np.zeros((8, 8, 3), np.uint8)
    probabilities = np.full((2, 8, 8), 0.5, np.float32)
    refined = dense_crf(image, probabilities, CrfParameters())
    if abs(float(refined.sum()) - 64) >= 1e-2:
        return Finding("bad", "pydensecrf returns wrong probabilities", "run `make clean`, then `make install`")
    return Finding("ok", "pydensecrf works")


def _check_ray() -> Finding:
    import ray

    from mcis.platform.engine.cluster_probe import check_cluster

    folder = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    if len(folder) > _MAX_TEMP_NAME:
        return Finding("bad", f"the name {folder} is too long for Ray's sockets", "set TMPDIR to a short path")

    address = os.environ.get("RAY_ADDRESS")
    check_cluster()
    mode = f"cluster {address}" if address else "a local Ray is started for each run"
    return Finding("ok", f"{ray.__version__}, {mode}")


def _check_mlflow(workspace: Path) -> Finding:
    """Checks whether the store that MLFLOW_TRACKING_URI names can be used; nothing is created in it."""
    import mlflow

    from mcis.platform.runs.files import existing_parent
    from mcis.platform.runs.tracking_errors import store_errors
    from mcis.platform.runs.tracking_store import client_of, server_uri

    uri = server_uri()
    if uri is None:
        return Finding("ok", f"{mlflow.__version__}, SQLite store in {workspace}")

    if uri.startswith("sqlite:///") and not os.path.exists(uri.removeprefix("sqlite:///")):  # a query would create it
        folder = existing_parent(Path(uri.removeprefix("sqlite:///")).parent)
        if not os.access(folder, os.W_OK):
            return Finding("bad", f"{folder} cannot be written, for {uri}", "set MLFLOW_TRACKING_URI to another store")
    else:
        with store_errors(uri):
            client_of(uri).search_experiments(max_results=1)
    return Finding("ok", f"{mlflow.__version__}, {uri}")


def _check_disk(workspace: Path) -> Finding:
    from mcis.platform.runs.files import existing_parent

    folder = existing_parent(workspace)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return Finding("bad", f"{folder} cannot be written", "choose another --workspace DIR")

    free = shutil.disk_usage(folder).free
    found = f"the demo needs {decimal(_DEMO_BYTES)} of {decimal(free)} free for the workspace"
    if free < _DEMO_BYTES:
        return Finding("bad", found, "free some space, or choose another --workspace DIR")
    return Finding("ok", found)


def _check_cores() -> Finding:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{cores} cores, {memory / 2**30:.1f} GiB"
    if cores < _MIN_CORES or memory < _MIN_MEMORY:
        return Finding("note", found, f"use at least {_MIN_CORES} cores and {_MIN_MEMORY // 2**30} GiB")
    return Finding("ok", found)
