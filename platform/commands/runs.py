"""The commands `mcis runs`, `tag`, `relocate`, `gc`, `ui`: runs, their tags and places, unused files, MLflow's page."""

import contextlib
import json
import os
import sys
from typing import Annotated

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import ExistingRun, Verbose, WorkspaceFolder
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace


def runs(
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="List only runs with this tag. Repeatable.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="List only runs of this recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the runs and studies of a workspace: last stage reached, scores, tags, and disk space used.

    The trials of a study follow it. Stage outputs that several runs share count for each of them.
    """
    with plain_errors():
        from mcis.platform.runs.inventory import entries
        from mcis.platform.runs.run_tags import parse_tags

        wanted = parse_tags(tags or [])
        opened = Workspace(workspace, create=False)
        listed = [entry for entry in entries(opened) if entry.matches(wanted, recipe)]
        if as_json:
            typer.echo(json.dumps([entry.as_json() for entry in listed], indent=2))
            return

        from mcis.platform.commands.terminal import show_runs

        show_runs(listed, opened)


def tag(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a run or study.")],
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Tags to set; KEY= removes a tag.")
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Set tags of a run, such as a note, for `mcis runs --tag` and MLflow. Without KEY=VALUE, print its tags."""
    with plain_errors(resumes=False):
        from mcis.platform.runs.run_tags import parse_tags, tag_run

        for key, value in tag_run(Workspace(workspace, create=False), name, parse_tags(tags or [])).items():
            typer.echo(f"{key}={value}")


def relocate(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Folder that the run reads: a path or URI.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Folder in which the same files are now.")],
    name: ExistingRun,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    verbose: Verbose = False,
) -> None:
    """Make a run read its files from a new place, after they were moved.

    Ids and sizes of all photographs and the content of a sample are compared with the index. Nothing is computed again.
    """
    with plain_errors():
        from mcis.platform import api

        result = api.relocate(name, old, new, workspace=workspace, verbose=verbose)
        typer.echo(f"run {name} reads its files from {new}; report: {result.context.folder.report}")


def gc(
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="Also remove this run, or this study with its trials. Can be repeated."),
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is shown; without it, nothing is removed.")
    ] = False,
) -> None:
    """Show, and with --delete remove, what no run of a workspace uses.

    These are stage outputs that no run uses, finished or not; temporary files of processes that have ended; and caches
    that no remaining output was computed from. Removal is refused while a run is in progress, and new runs wait until
    it has ended. Data sets, downloaded weights and MLflow's store, including its records of removed runs, are kept.
    """
    with plain_errors():
        from mcis.platform.commands.terminal import show_removal
        from mcis.platform.runs.garbage import plan_removal, remove_garbage
        from mcis.platform.runs.locks import hold_workspace, runs_in_progress

        opened = Workspace(workspace, create=False)
        with hold_workspace(opened, "mcis gc") if delete else contextlib.nullcontext():
            plan = plan_removal(opened, run or [])
            show_removal(plan, opened)
            failures = remove_garbage(opened, plan) if delete else []

        if failures:
            for failure in failures:
                typer.echo(f"not removed: {failure}", err=True)
            raise typer.Exit(1)
        if delete:
            typer.echo("removed" if plan.garbage else "nothing to remove")
            return

        for holder in runs_in_progress(opened):
            typer.echo(f"{holder} is in progress: --delete is refused until it has ended")
        if plan.garbage:
            typer.echo("nothing was removed; to remove it, repeat the command with --delete")
        else:
            typer.echo("nothing to remove")


def ui(
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on the loopback interface.")] = 5000,
) -> None:
    """Start the MLflow UI for the workspace on loopback, or print the page of the server in MLFLOW_TRACKING_URI."""
    with plain_errors():
        from mcis.platform.runs.tracking_store import experiment_page, tracking_uri

        opened = Workspace(workspace, create=False)
        uri = tracking_uri(opened)
        page = experiment_page(opened)
        if uri.startswith(("http://", "https://")):
            typer.echo(f"runs: {uri.rstrip('/')}/{page or ''}")
            return

        typer.echo(f"MLflow's store: {uri}; its UI takes some seconds to start")
        if page:
            typer.echo(f"runs: http://127.0.0.1:{port}/{page}")
        else:
            typer.echo(f"http://127.0.0.1:{port}: the store has no experiment yet; the first run creates it")

        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
        command += ["--default-artifact-root", opened.tracking_artifacts.as_uri()]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        os.execv(command[0], command)
