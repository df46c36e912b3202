"""The command `mcis evaluate`: files of another program become a run without trainings, which is scored like others."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import Configuration, Name, Overrides, Verbose, WorkspaceFolder, grouped
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE


@grouped
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Files of another program, named after the images.")],
    name: Name,
    configuration: Configuration,
    overrides: Overrides,
    kind: Annotated[
        Literal["predictions", "masks", "maps"],
        typer.Option(
            "--as",
            help="What the files are: predictions of the split val (predict.split selects another), pseudo masks of "
            "train, or localization maps of train (--maps-format).",
        ),
    ] = "predictions",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    verbose: Verbose = False,
) -> None:
    """Score predictions, pseudo masks or localization maps of another program, as a run of its own.

    Nothing is trained. `mcis compare`, `mcis runs`, MLflow and the report show the run like any other.
    """
    with plain_errors(verbose):
        from mcis.platform import api
        from mcis.platform.commands.terminal import show_outlook, show_result

        imported_kind = api.IMPORTED_KINDS[kind]
        resolved = configuration.resolve(overrides, options=imported_kind.values_of(folder))
        imported_kind.check_folder(resolved)
        imported_kind.check_name(name, workspace)
        result = api.run_resolved(
            resolved, name, workspace=workspace, until=imported_kind.until, verbose=verbose, on_checked=show_outlook
        )
        show_result(result)
