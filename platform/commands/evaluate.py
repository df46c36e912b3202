"""The command `mcis evaluate`: files of another program become a run without trainings, which is scored like others."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

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


class _Output(NamedTuple):
    """What the files of another program replace.

    Attributes:
        values: configuration values by dotted key, without the folder.
        folder: key of the folder.
        until: last stage of the run; None for all.
    """

    values: dict[str, Any]
    folder: str
    until: str | None


_NO_CLASSIFIER = {"segmenter.init": "pretrained"}
"""Values of runs that end before a segmentation network, which could start from a classifier."""
_OUTPUTS = {
    "predictions": _Output({}, "predict.masks", None),
    "masks": _Output(_NO_CLASSIFIER | {"pseudo_masks.rule": "imported"}, "pseudo_masks.masks", "pseudo_masks"),
    "maps": _Output(_NO_CLASSIFIER, "localize.maps", "localize"),
}


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
        output = _OUTPUTS[kind]
        values = {**output.values, output.folder: str(folder), "compute.gpu": False}
        values["compute.stop_if_not_learning"] = False  # poor masks are scored like others
        resolved = configuration.resolve(overrides, options=values)

        from mcis.platform import api
        from mcis.platform.commands.terminal import show_outlook, show_result

        result = api.run_resolved(
            resolved, name, workspace=workspace, until=output.until, verbose=verbose, on_checked=show_outlook
        )
        show_result(result)
