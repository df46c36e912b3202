"""The command line: `mcis demo`, `run`, `study`, `config show`, `doctor`, `ui`; Ray and torch are imported late."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="From image tags to segmentation masks, on any number of machines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Start with `mcis demo`, then `mcis doctor`, then `mcis run voc --voc VOCdevkit/VOC2012 --name first`.",
)
config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)
study_app = typer.Typer(help="The paper's ablations as sweeps.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(study_app, name="study")

Setting = Annotated[str, typer.Argument(help="Which image sources are used: voc.")]
Name = Annotated[str, typer.Option(help="Name of the run; the same name goes on where it stopped.")]
Voc = Annotated[Path | None, typer.Option(help="Folder VOC2012 of a PASCAL VOC 2012 devkit.")]
Recipe = Annotated[
    str, typer.Option(help="Preset: paper, released (both need ImageNet weights and a GPU) or small (CPU).")
]
WorkspaceFolder = Annotated[
    Path, typer.Option("--workspace", envvar="MCIS_WORKSPACE", help="Folder of runs, shared stages and MLflow's store.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; see `mcis config show`.")
]
Until = Annotated[str | None, typer.Option(help="Last stage to compute.")]
From = Annotated[str | None, typer.Option("--from", help="Compute this stage and all after it again.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the workers' output and whole tracebacks.")]

_DEFAULT_WORKSPACE = Path("mcis-workspace")


@contextlib.contextmanager
def _plain_errors(verbose: bool = False) -> Iterator[None]:
    """Ends the command with one clear message and a non-zero status where its owner can mend the matter."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        _end(interruption)
    except Exception as error:
        from mcis.platform.runtime import user_error_in

        known = user_error_in(error)
        if known is None or verbose:
            raise
        _end(known)


def _end(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        typer.echo("\ninterrupted: what is finished is kept; the same command goes on from there", err=True)
        raise typer.Exit(130)
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def _options(voc: Path | None) -> dict[str, Any]:
    return {} if voc is None else {"data.voc": str(voc.expanduser().resolve())}


@app.command(
    epilog="Examples: `mcis run voc --voc VOCdevkit/VOC2012 --name first --recipe small` · "
    "`mcis run voc --voc DIR --name first --until pseudo_masks` · "
    "`mcis run voc --voc DIR --name r5 --set localize.related=5 --set seed=1`"
)
def run(
    setting: Setting,
    name: Name,
    voc: Voc = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Until = None,
    start: From = None,
    verbose: Verbose = False,
) -> None:
    """Walk from tags to masks: index, classifier, localization maps, pseudo masks, segmenter, predictions, scores.

    A second call with the same name computes only what is missing or changed.
    """
    with _plain_errors(verbose):
        from mcis.platform.settings import resolve

        resolved = resolve(setting, recipe, _options(voc), assignments or [])
        _journey(resolved, workspace, name, until=until, start=start, verbose=verbose)


@app.command(epilog="Example: `mcis demo`, then open the report that it names, or `mcis ui`.")
def demo(
    name: Name = "demo",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """The whole journey on an embedded data set, drawn on the spot: masks that no one drew, in a few minutes."""
    with _plain_errors(verbose):
        from mcis.platform.demo import demo_settings

        _journey(demo_settings(workspace, assignments or []), workspace, name, verbose=verbose)


def _journey(resolved: Any, workspace: Path, name: str, *, verbose: bool, **options: Any) -> None:
    from mcis.platform import pipeline
    from mcis.platform.runtime import ray_session
    from mcis.platform.terminal import show_result
    from mcis.platform.workspace import Workspace

    place = Workspace(workspace)
    pipeline.check(resolved.config, place)
    with ray_session(resolved.config.compute, verbose=verbose):
        result = pipeline.run(resolved, place, name, **options)
    show_result(result)


@config_app.command("show", epilog="Example: `mcis config show voc --recipe released --set localize.related=5`")
def config_show(
    setting: Setting,
    voc: Voc = None,
    recipe: Recipe = "paper",
    assignments: Assignments = None,
) -> None:
    """Every key with its value, where the value comes from, and what it means."""
    with _plain_errors():
        from mcis.platform.settings import resolve
        from mcis.platform.terminal import show_config

        show_config(resolve(setting, recipe, _options(voc), assignments or []))


@study_app.command(
    "references", epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table5 --recipe small`"
)
def study_references(
    name: Name,
    setting: Annotated[str, typer.Argument(help="Which image sources are used.")] = "voc",
    voc: Voc = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Annotated[
        str, typer.Option(help="Last stage of each trial; pseudo_masks leaves the segmenter out.")
    ] = "evaluate",
    parallel: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    verbose: Verbose = False,
) -> None:
    """The number of related images, 0 to 5, over one trained classifier, as Ray Tune trials (table 7 of the paper)."""
    with _plain_errors(verbose):
        from mcis.platform.settings import resolve
        from mcis.tuning.studies import references

        resolved = resolve(setting, recipe, _options(voc), assignments or [])
        references(resolved, workspace, name, until=until, parallel=parallel, verbose=verbose)


@app.command()
def doctor(workspace: WorkspaceFolder = _DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not."""
    from mcis.platform.doctor import checks
    from mcis.platform.terminal import show_checks

    found = checks(workspace.expanduser())
    show_checks(found)
    if any(check.state == "bad" for check in found):
        raise typer.Exit(1)


@app.command()
def ui(
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    port: Annotated[int, typer.Option(help="Port on loopback.")] = 5000,
) -> None:
    """The MLflow UI on the workspace's store, on loopback."""
    with _plain_errors():
        from mcis.platform.tracking import tracking_uri
        from mcis.platform.workspace import Workspace

        place = Workspace(workspace)
        uri = tracking_uri(place)
        typer.echo(f"MLflow UI on http://127.0.0.1:{port} (store {uri}); it takes some seconds to start")
        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
        command += [
            "--default-artifact-root",
            (place.root / "mlflow").as_uri(),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        os.execv(command[0], command)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
