"""The commands `mcis study references` and `effect`: the paper's ablations, each a study of many runs."""

from typing import Annotated

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Configuration,
    Name,
    Verbose,
    WorkspaceFolder,
    complete_stage,
    grouped,
    plain_errors,
)

study_app = typer.Typer(help="The paper's ablations as sweeps.", no_args_is_help=True)

Parallel = Annotated[int, typer.Option(min=1, help="Trials at a time.")]


@study_app.command(epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table7 --recipe small`")
@grouped
def references(
    configuration: Configuration,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    until: Annotated[
        str,
        typer.Option(
            help="Last stage of each trial; pseudo_masks leaves the segmenter out.", autocompletion=complete_stage
        ),
    ] = "evaluate",
    parallel: Parallel = 1,
    verbose: Verbose = False,
) -> None:
    """The number of related images, 0 to 5, over one trained classifier, as Ray Tune trials (table 7 of the paper)."""
    with plain_errors(verbose):
        from mcis.tuning import studies

        resolved = configuration.resolve(default="voc")
        studies.references(resolved, workspace, name, until=until, parallel=parallel, verbose=verbose)


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
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each case, with seeds one after the other from the configuration's.")
    ] = 3,
    until: Annotated[
        str,
        typer.Option(
            help="Last stage of the cases that the paper's tables have; the others end at pseudo_masks.",
            autocompletion=complete_stage,
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
