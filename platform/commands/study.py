"""The commands of `mcis study`: the paper's ablations, each a study of many runs, and a search of values."""

import dataclasses
from typing import Annotated, Any

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Configuration,
    Name,
    Verbose,
    WorkspaceFolder,
    grouped,
    plain_errors,
)
from mcis.platform.config.keys import StageName

study_app = typer.Typer(help="The paper's ablations as sweeps, and a search of values.", no_args_is_help=True)

Parallel = Annotated[int, typer.Option(min=1, help="Trials at a time.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each case, with seeds from the configuration's on.")]
_UNTIL = "Last stage of each trial; pseudo_masks leaves the segmenter out. Some cases end before."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """The options that say how the trials of a study run."""

    workspace: WorkspaceFolder = DEFAULT_WORKSPACE
    until: Annotated[StageName, typer.Option(metavar="STAGE", help=_UNTIL)] = "evaluate"
    parallel: Parallel = 1
    verbose: Verbose = False

    def study(self, kind: str, name: str, configuration: Configuration, seeds: int, default: str = "voc") -> Any:
        """The `tuning.studies.Study` that is asked for; `default` is the setting where none is named."""
        from mcis.platform.runs.workspace import Workspace
        from mcis.tuning.studies import Study

        return Study(
            kind=kind, name=name, resolved=configuration.resolve(default), workspace=Workspace(self.workspace),
            seeds=seeds, until=self.until, parallel=self.parallel, verbose=self.verbose
        )  # fmt: skip


@study_app.command(epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table7 --recipe small`")
@grouped
def references(configuration: Configuration, name: Name, trials: Trials, seeds: Seeds = 1) -> None:
    """The number of related images, 0 to 5, over one trained classifier: `mcis study run references` (table 7)."""
    with plain_errors(trials.verbose):
        _run("references", name, configuration, trials, seeds)


@study_app.command(epilog="Example: `mcis study effect tags --tags photos.csv --name effect --until localize`")
@grouped
def effect(configuration: Configuration, name: Name, trials: Trials, seeds: Seeds = 3) -> None:
    """What training with each co-attention and related images bring, beside their controls (tables 5 and 6)."""
    with plain_errors(trials.verbose):
        _run("effect", name, configuration, trials, seeds)


@study_app.command(
    name="run", epilog="Example: `mcis study run inference tags --tags photos.csv --name table4 --until pseudo_masks`"
)
@grouped
def run_study(
    study: Annotated[
        str,
        typer.Argument(
            help="effect (tables 5, 6), inference (4), references (7), settings (1 to 3), lid, or your own TOML file."
        ),
    ],
    configuration: Configuration,
    name: Name,
    trials: Trials,
    seeds: Seeds = 1,
) -> None:
    """A study as data: cases with values of their own over seeds, what they are compared with, the paper's figures."""
    with plain_errors(trials.verbose):
        _run(study, name, configuration, trials, seeds)


def _run(study: str, name: str, configuration: Configuration, trials: Trials, seeds: int) -> None:
    from mcis.tuning.definition import read_definition
    from mcis.tuning.paper import settings_definition
    from mcis.tuning.studies import defined

    asked = trials.study(study, name, configuration, seeds, default="lid" if study == "lid" else "voc")
    config = asked.resolved.config
    of_settings = study == "settings"
    defined(asked, settings_definition(config.setting, config.recipe) if of_settings else read_definition(study))


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
                parallel=parallel, verbose=verbose
            )
        )  # fmt: skip
