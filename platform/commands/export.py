"""The commands `mcis export` and `import-weights`: out of a run, and released weights into one."""

from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, Name, WorkspaceFolder, plain_errors


def export(
    what: Annotated[str, typer.Argument(help="maps, masks (pseudo masks as a VOC devkit), predictions or network.")],
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder for pictures; file for network (.pt2).")],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Write a part of a run for other programs.

    Localization maps with color overlays; pseudo masks and their images as a VOC devkit; predictions as PNGs; the
    segmentation network as a program of torch.export.
    """
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting.export import export

        typer.echo(export(opened, name, what, out))


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
