"""The commands `mcis doctor` and `mcis ui`: is this machine fit, and where are the curves."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Configuration,
    WorkspaceFolder,
    grouped,
    plain_errors,
)

if TYPE_CHECKING:
    from mcis.platform.networks.needs import Needs


@grouped
def doctor(configuration: Configuration, workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not.

    With the setting and the options of a run, disk and memory are compared with what that run takes, and it is said
    what the run can expect of its images and about how long it takes.
    """
    from mcis.platform.commands.doctor import checks
    from mcis.platform.commands.terminal import show_checks

    needs = None
    if configuration != Configuration():
        with plain_errors():
            needs = _of_run(configuration, workspace)
    results = checks(workspace.expanduser(), needs)
    show_checks(results)
    if any(check.state == "bad" for check in results):
        raise typer.Exit(1)


def _of_run(configuration: Configuration, workspace: Path) -> "Needs":
    """Shows what a run takes and can expect; returns what it takes of disk and memory."""
    from mcis.datasets.storage.copies import is_there
    from mcis.platform.commands.terminal import show_expectations, show_needs
    from mcis.platform.networks.needs import needs_of_listing
    from mcis.platform.runs.listing import listing
    from mcis.platform.runs.workspace import Workspace

    config = configuration.resolve().config
    opened = Workspace(workspace, create=False) if is_there(workspace.expanduser() / "runs") else None
    listed = listing(config)
    needs = needs_of_listing(config, listed, opened)
    show_needs(needs)
    show_expectations(config, listed, needs)
    return needs


def ui(
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 5000,
) -> None:
    """The MLflow UI on the workspace's store, on loopback; or the page of the server that MLFLOW_TRACKING_URI names."""
    with plain_errors():
        from mcis.platform.runs.tracking_store import experiment_page, tracking_uri
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)
        uri, page = tracking_uri(opened), experiment_page(opened)
        if uri.startswith(("http://", "https://")):
            typer.echo(f"runs: {uri.rstrip('/')}/{page or ''}")
            return
        typer.echo(f"MLflow's store: {uri}; its UI takes some seconds to start")
        if page:
            typer.echo(f"runs: http://127.0.0.1:{port}/{page}")
        else:
            typer.echo(f"http://127.0.0.1:{port}: the store has no experiment yet; the first run makes it")
        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
        command += ["--default-artifact-root", opened.tracking_artifacts.as_uri()]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        os.execv(command[0], command)
