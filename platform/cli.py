"""The command line: `mcis demo`, `run`, `index`, `study`, `config show`, `doctor`, `ui`; Ray and torch come late."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mcis.platform.commands.index import index_app
from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Assignments,
    From,
    Lid,
    Name,
    Recipe,
    Setting,
    Single,
    Tags,
    Until,
    Verbose,
    Voc,
    Web,
    WorkspaceFolder,
    data_options,
    plain_errors,
)

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
app.add_typer(index_app, name="index")


@app.command(
    epilog="Examples: `mcis run voc --voc VOCdevkit/VOC2012 --name first --recipe small` · "
    "`mcis run voc+web --voc DIR --web DIR --name web` · `mcis run tags --tags photos.csv --name mine` · "
    "`mcis run voc --voc DIR --name first --until pseudo_masks` · "
    "`mcis run voc --voc DIR --name r5 --set localize.related=5 --set seed=1`"
)
def run(
    setting: Setting,
    name: Name,
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Until = None,
    start: From = None,
    verbose: Verbose = False,
) -> None:
    """Walk from tags to masks: index, classifier, localization maps, pseudo masks, segmenter, predictions, scores.

    A second call with the same name computes only what is missing or changed.
    """
    with plain_errors(verbose):
        from mcis.platform.config.resolve import resolve

        options = data_options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        resolved = resolve(setting, recipe, options, assignments or [])
        _journey(resolved, workspace, name, until=until, start=start, verbose=verbose)


@app.command(epilog="Example: `mcis demo`, then open the report that it names, or `mcis ui`.")
def demo(
    name: Name = "demo",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """The whole journey on an embedded data set, drawn on the spot: masks that no one drew, in a few minutes."""
    with plain_errors(verbose):
        from mcis.platform.commands.demo import demo_settings

        _journey(demo_settings(workspace, assignments or []), workspace, name, verbose=verbose)


def _journey(resolved: Any, workspace: Path, name: str, *, verbose: bool, **options: Any) -> None:
    from mcis.platform import pipeline
    from mcis.platform.commands.terminal import show_result
    from mcis.platform.engine.runtime import ray_session
    from mcis.platform.runs.workspace import Workspace

    place = Workspace(workspace)
    pipeline.check(resolved.config, place, name, until=options.get("until"), start=options.get("start"))
    with ray_session(resolved.config.compute, verbose=verbose):
        result = pipeline.run(resolved, place, name, **options)
    show_result(result)


@config_app.command("show", epilog="Example: `mcis config show voc --recipe released --set localize.related=5`")
def config_show(
    setting: Setting,
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    assignments: Assignments = None,
) -> None:
    """Every key with its value, where the value comes from, and what it means."""
    with plain_errors():
        from mcis.platform.commands.terminal import show_config
        from mcis.platform.config.resolve import resolve

        options = data_options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        show_config(resolve(setting, recipe, options, assignments or []))


@study_app.command(
    "references", epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table7 --recipe small`"
)
def study_references(
    name: Name,
    setting: Setting = "voc",
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Annotated[
        str, typer.Option(help="Last stage of each trial; pseudo_masks leaves the segmenter out.")
    ] = "evaluate",
    parallel: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    verbose: Verbose = False,
) -> None:
    """The number of related images, 0 to 5, over one trained classifier, as Ray Tune trials (table 7 of the paper)."""
    with plain_errors(verbose):
        from mcis.platform.config.resolve import resolve
        from mcis.tuning.studies import references

        options = data_options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        resolved = resolve(setting, recipe, options, assignments or [])
        references(resolved, workspace, name, until=until, parallel=parallel, verbose=verbose)


@study_app.command(
    "effect", epilog="Example: `mcis study effect --voc VOCdevkit/VOC2012 --name effect --recipe small --seeds 3`"
)
def study_effect(
    name: Name,
    setting: Setting = "voc",
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    trainings: Annotated[
        list[str] | None, typer.Option("--training", help="none, co or co+contrastive; give it again for more. [all]")
    ] = None,
    related: Annotated[
        list[int] | None, typer.Option("--related", min=0, max=8, help="R; give it again for more. [0, 1, 3, 5]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell, with seeds one after the other.")] = 3,
    until: Annotated[
        str, typer.Option(help="Last stage of the cells that the paper's tables have; the others end at pseudo_masks.")
    ] = "evaluate",
    parallel: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    verbose: Verbose = False,
) -> None:
    """Training with neither, one or both co-attentions, times related images, over seeds (tables 5 and 6)."""
    with plain_errors(verbose):
        from mcis.platform.config.resolve import resolve
        from mcis.tuning.studies import EFFECT_RELATED, TRAININGS, effect

        options = data_options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        resolved = resolve(setting, recipe, options, assignments or [])
        effect(
            resolved, workspace, name, trainings=trainings or TRAININGS, related=related or EFFECT_RELATED,
            seeds=seeds, until=until, parallel=parallel, verbose=verbose,
        )  # fmt: skip


@app.command("import-weights", epilog="Example: `mcis import-weights model_cam.pth --out classifier.pt`")
def import_weights(
    file: Annotated[Path, typer.Argument(help="Checkpoint of the authors' released code.")],
    out: Annotated[Path, typer.Option(help="Where the converted weights go.")] = Path("classifier.pt"),
) -> None:
    """Convert a released classifier; use it by --recipe released --set weights.classifier=FILE."""
    with plain_errors():
        from mcis.models.released import read_released
        from mcis.platform.config.resolve import resolve
        from mcis.platform.networks.checkpoints import save
        from mcis.platform.networks.trained import classifier_description

        state = read_released(file)
        about = classifier_description(resolve("voc", "released").config.classifier, ())
        about.pop("classes")  # the file has none; they are VOC's in the order of the project
        save({"state_dict": state, "about": about}, out)
        classes = len(state["phi.bias"])
        typer.echo(f"{len(state)} tensors, {classes} classes: {out}")
        typer.echo(
            f"use: mcis run voc --voc DIR --name NAME --recipe released --set weights.classifier={out.resolve()}"
        )


@app.command(epilog="Example: `mcis export predictions --name mine --out masks`")
def export(
    what: Annotated[str, typer.Argument(help="maps, masks (pseudo masks) or predictions.")],
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """PNG files of a run: localization maps with color overlays, pseudo masks, or predictions, by image id."""
    with plain_errors():
        from mcis.platform.reporting.export import export as write
        from mcis.platform.runs.workspace import Workspace

        typer.echo(f"{write(Workspace(workspace), name, what, out)} pictures below {out}")


@app.command()
def doctor(workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not."""
    from mcis.platform.commands.doctor import checks
    from mcis.platform.commands.terminal import show_checks

    found = checks(workspace.expanduser())
    show_checks(found)
    if any(check.state == "bad" for check in found):
        raise typer.Exit(1)


@app.command()
def ui(
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    port: Annotated[int, typer.Option(help="Port on loopback.")] = 5000,
) -> None:
    """The MLflow UI on the workspace's store, on loopback."""
    with plain_errors():
        from mcis.platform.runs.tracking import tracking_uri
        from mcis.platform.runs.workspace import Workspace

        place = Workspace(workspace)
        uri = tracking_uri(place)
        typer.echo(f"MLflow UI on http://127.0.0.1:{port} (store {uri}); it takes some seconds to start")
        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
        command += [
            "--default-artifact-root",
            place.tracking_artifacts.as_uri(),
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
