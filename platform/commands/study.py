"""The commands of `mcis study`: the paper's ablations, each a study of many runs, and a search of values."""

from typing import Annotated

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Configuration,
    Name,
    Overrides,
    Verbose,
    WorkspaceFolder,
    grouped,
    plain_errors,
)
from mcis.platform.config.keys import StageName

study_app = typer.Typer(help="The paper's ablations as sweeps, and a search of values.", no_args_is_help=True)

Parallel = Annotated[int, typer.Option(min=1, help="Trials at a time.")]


@study_app.command(
    name="run",
    epilog="Examples: `mcis study run references voc --voc VOCdevkit/VOC2012 --name table5 --recipe scratch` · "
    "`mcis study run effect photos.csv --name effect --until localize --seeds 3`",
)
@grouped
def run_study(
    study: Annotated[
        str,
        typer.Argument(
            help="effect (tables 2, 4), inference (2), references (5), settings (1a to 1c), domains, hops, segmenter, "
            "lid, or your own TOML file."
        ),
    ],
    configuration: Configuration,
    overrides: Overrides,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    until: Annotated[
        StageName,
        typer.Option(metavar="STAGE", help="Last stage of each trial; pseudo_masks: no segmenter. Some end before."),
    ] = "evaluate",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each case, with seeds from the configuration's on.")] = 1,
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """A study as data: cases with values of their own over seeds, what they are compared with, the paper's figures."""
    with plain_errors(verbose):
        from mcis.platform.runs.workspace import Workspace
        from mcis.tuning.definition import read_definition
        from mcis.tuning.paper import sources_definition
        from mcis.tuning.studies import Study, defined

        resolved = configuration.resolve(overrides)
        if study == "settings":
            definition = sources_definition(resolved.config.sources, resolved.config.segmenter.backbone)
        else:
            definition = read_definition(study)
        asked = Study(
            kind=study, name=name, resolved=resolved, workspace=Workspace(workspace), seeds=seeds, until=until,
            parallel=parallel, verbose=verbose
        )  # fmt: skip
        defined(asked, definition)


@study_app.command(
    epilog="Example: `mcis study search photos.csv --name wide --axis 'localize.related=integer(0,32)' "
    "--axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)' --trials 30`"
)
@grouped
def search(
    configuration: Configuration,
    overrides: Overrides,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="KEY=FORM(...)",
            help="A key and its range: uniform(low,high), loguniform, integer, logint or choice(a,b,...). Repeatable.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="What is maximized: val_map, maps, masks, or segmentation of another split than reported."),
    ] = "maps",
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, those of earlier calls included.")] = 30,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Then all trials end.", show_default="no end")] = None,
    halving: Annotated[
        int,
        typer.Option(min=0, help="At validations 1, 3, 9, ... of a classifier, one trial in so many goes on; 0 = all"),
    ] = 3,
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """Search the values that maximize a score: Optuna draws them, successive halving stops trials that lag behind."""
    with plain_errors(verbose):
        from mcis.datasets.errors import UserError
        from mcis.platform.runs.workspace import Workspace
        from mcis.tuning.search import run_search
        from mcis.tuning.search_space import Search, parse_axes

        if halving == 1:
            raise UserError("--halving 1", "2 or more, or 0 to let all trials go on", "leave it at 3")
        run_search(
            Search(
                name=name, resolved=configuration.resolve(overrides), workspace=Workspace(workspace),
                axes=parse_axes(axes or []), objective=objective, trials=trials, minutes=minutes, halving=halving,
                parallel=parallel, verbose=verbose
            )
        )  # fmt: skip
