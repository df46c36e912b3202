"""The commands of `mcis study`: the paper's ablations, each a study of many runs, and a search of values."""

from typing import Annotated

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Configuration,
    Name,
    Verbose,
    WorkspaceFolder,
    complete_study,
    grouped,
    plain_errors,
)
from mcis.platform.config.keys import StageName

study_app = typer.Typer(help="The paper's ablations as sweeps, and a search of values.", no_args_is_help=True)

Parallel = Annotated[int, typer.Option(min=1, help="Trials at a time.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Runs of each case, with seeds one after the other from the configuration's.")
]


@study_app.command(epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table7 --recipe small`")
@grouped
def references(
    configuration: Configuration,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    seeds: Seeds = 1,
    until: Annotated[
        StageName,
        typer.Option(metavar="STAGE", help="Last stage of each trial; pseudo_masks leaves the segmenter out."),
    ] = "evaluate",
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """The number of related images, 0 to 5, over one trained classifier, as Ray Tune trials (table 7 of the paper)."""
    with plain_errors(verbose):
        from mcis.tuning import studies

        resolved = configuration.resolve(default="voc")
        studies.references(resolved, workspace, name, seeds=seeds, until=until, parallel=parallel, verbose=verbose)


@study_app.command(epilog="Example: `mcis study effect --voc VOCdevkit/VOC2012 --name effect --recipe small --seeds 3`")
@grouped
def effect(
    configuration: Configuration,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    trainings: Annotated[
        list[str] | None, typer.Option("--training", help="none, co or co+contrastive; give it again for more. [all]")
    ] = None,
    related: Annotated[
        list[int] | None,
        typer.Option(
            "--related",
            min=1,
            max=64,
            help="R beside single rounds; give it again for more; controls: the largest. [3]",
        ),
    ] = None,
    seeds: Seeds = 3,
    until: Annotated[
        StageName,
        typer.Option(
            metavar="STAGE",
            help="Last stage of the cases that the paper's tables have; the others end at pseudo_masks.",
        ),
    ] = "evaluate",
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """Training with neither, one or both co-attentions, related images, and controls, over seeds (tables 5 and 6)."""
    with plain_errors(verbose):
        from mcis.tuning import studies

        studies.effect(
            configuration.resolve(default="voc"), workspace, name,
            trainings=trainings or studies.TRAININGS, related=related or studies.EFFECT_RELATED,
            seeds=seeds, until=until, parallel=parallel, verbose=verbose,
        )  # fmt: skip


@study_app.command(
    name="run", epilog="Example: `mcis study run inference tags --tags photos.csv --name table4 --until pseudo_masks`"
)
@grouped
def run_study(
    study: Annotated[
        str,
        typer.Argument(
            help="inference (table 4), settings (tables 1 to 3), lid (section 4.6), or a TOML file of your own.",
            autocompletion=complete_study,
        ),
    ],
    configuration: Configuration,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    seeds: Seeds = 1,
    until: Annotated[
        StageName, typer.Option(metavar="STAGE", help="Last stage of each trial, unless its case says another.")
    ] = "evaluate",
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """A study as data: cases with values of their own over seeds, what they are compared with, the paper's figures."""
    with plain_errors(verbose):
        from mcis.tuning import studies
        from mcis.tuning.definition import read_definition, settings_definition

        resolved = configuration.resolve(default="lid" if study == "lid" else "voc")
        if study == "settings":
            definition = settings_definition(resolved.config.setting, resolved.config.recipe)
        else:
            definition = read_definition(study)
        studies.defined(
            resolved, workspace, name, definition,
            kind=study, seeds=seeds, until=until, parallel=parallel, verbose=verbose,
        )  # fmt: skip


@study_app.command(
    epilog="Example: `mcis study search tags --tags photos.csv --name wide --axis 'localize.related=integer(0,32)' "
    "--axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)' --trials 30`"
)
@grouped
def search(
    configuration: Configuration,
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
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="After which no trial goes on.", show_default="no end")
    ] = None,
    halving: Annotated[
        int,
        typer.Option(
            min=0, help="Of the trials at validation 1, 3, 9, ... of the classifier, one in so many goes on; 0: all do."
        ),
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
                name=name, resolved=configuration.resolve(default="voc"), workspace=Workspace(workspace),
                axes=parse_axes(axes or []), objective=objective, trials=trials, minutes=minutes, halving=halving,
                parallel=parallel, verbose=verbose,
            )
        )  # fmt: skip
