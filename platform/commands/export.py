"""The commands `mcis export`, `check-voc-server` and `import-weights`: out of a run, and released weights into one."""

from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, Name, WorkspaceFolder, plain_errors

MOST_PROBLEMS = 50
"""Problems of an archive that are shown."""


def export(
    what: Annotated[
        str, typer.Argument(help="maps, masks (a VOC devkit), predictions, network, onnx, pretrained or voc-server.")
    ],
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder; file for network (.pt2), onnx (.onnx) and voc-server (.tar.gz).")],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Write a part of a run for other programs.

    Localization maps with color overlays; pseudo masks and their images as a VOC devkit; predictions as PNGs; the
    segmentation network for torch alone, ONNX or the Hugging Face hub; predictions as VOC's server takes them.
    """
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting.export import export

        typer.echo(export(opened, name, what, out))


def check_voc_server(
    file: Annotated[Path, typer.Argument(help="The .tar.gz.")],
    ids: Annotated[Path | None, typer.Option(help="List of image ids, one a line. [as many masks as VOC has]")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder JPEGImages, whose sizes masks must have.")] = None,
) -> None:
    """Whether VOC's evaluation server takes an archive: names, number, palettes, sizes, labels, nothing beside them."""
    with plain_errors():
        from mcis.datasets.sources.lists import read_lines
        from mcis.platform.reporting.voc_server import submission_problems

        wanted = None
        if ids:
            wanted = [line for _, line in read_lines(ids, "a list of image ids", "name another file by --ids")]
        masks, problems = submission_problems(file, ids=wanted, images=images)
        for problem in problems[:MOST_PROBLEMS]:
            typer.echo(problem, err=True)
        if problems:
            more = len(problems) - MOST_PROBLEMS
            typer.echo(f"problems: {len(problems)}" + (f", {more} of them not shown" if more > 0 else ""), err=True)
            raise typer.Exit(1)
        typer.echo(f"{masks} masks: names, palettes and labels are as the server takes them")


def import_weights(
    file: Annotated[Path, typer.Argument(help="Checkpoint of the authors' released code.")],
    out: Annotated[Path, typer.Option(help="Where the converted weights go.")] = Path("classifier.pt"),
) -> None:
    """Convert a released classifier; use it by --recipe released --set weights.classifier=FILE."""
    with plain_errors():
        from mcis.models.pretrained import read_released
        from mcis.platform.config.resolve import resolve
        from mcis.platform.networks.checkpoints import save
        from mcis.platform.networks.pretrained import classifier_description

        state = read_released(file)
        about = classifier_description(resolve("voc", "released").config.classifier, ())
        about.pop("classes")  # the file has none; they are VOC's in the order of the project
        save({"state_dict": state, "about": about}, out)
        classes = len(state["phi.bias"])
        typer.echo(f"{len(state)} tensors, {classes} classes: {out}")
        typer.echo(
            f"use: mcis run voc --voc DIR --name NAME --recipe released --set weights.classifier={out.resolve()}"
        )
