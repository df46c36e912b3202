"""The commands `mcis doctor` and `mcis ui`: is this machine fit, and where are the curves."""

import os
import sys
from typing import Annotated

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, Configuration, WorkspaceFolder, grouped, plain_errors


@grouped
def doctor(configuration: Configuration, workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not.

    With the setting and the options of a run, it says what the run can expect of its images, and the free disk is
    compared with what the run takes.
    """
    from mcis.platform.commands.doctor import checks
    from mcis.platform.commands.terminal import show_checks, show_outlook

    wanted, root = 0, workspace.expanduser()
    if configuration != Configuration():
        with plain_errors():
            from mcis.platform.networks.disk import disk_use
            from mcis.platform.runs.listing import listing

            config = configuration.resolve().config
            listed = listing(config)
            show_outlook(config, listed, root)
            wanted = sum(use.size for use in disk_use(config, listed.table, len(listed.classes)))
    results = checks(root, wanted)
    show_checks(results)
    if any(check.state == "bad" for check in results):
        raise typer.Exit(1)


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
