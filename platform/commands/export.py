"""The commands `mcis export`, `import` and `import-weights`: files of other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, Name, WorkspaceFolder, plain_errors


def export(
    what: Annotated[str, typer.Argument(help="maps, masks (a VOC devkit), predictions, network, onnx or pretrained.")],
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder; file for network (.pt2) and onnx (.onnx).")],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    format: Annotated[
        str | None,
        typer.Option(help="Of masks: voc, coco, cvat, yolo, labelstudio; predictions: png or the last four."),
    ] = None,
) -> None:
    """Write a part of a run for other programs.

    Localization maps with color overlays; pseudo masks and their images as a VOC devkit; predictions as PNGs; the
    segmentation network for torch alone, ONNX or the Hugging Face hub.
    """
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting.export import export

        typer.echo(export(opened, name, what, out, format))


def import_data_set(
    format: Annotated[str, typer.Argument(help="coco, yolo, cvat, labelstudio, folders, huggingface.")],
    source: Annotated[Path, typer.Argument(help="The file or folder of the data set.")],
    out: Annotated[Path, typer.Option(help="Folder for photos.csv, links to the images, and masks.")],
    images: Annotated[Path | None, typer.Option(help="Folder of the images, where they lie elsewhere.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test; others that are in the table stay.")] = "train",
    classes: Annotated[str | None, typer.Option(help="Those that are wanted, as cat,dog. [all that occur]")] = None,
    labels: Annotated[Path | None, typer.Option(help="labels.csv of an export: masks get its labels.")] = None,
) -> None:
    """Make a table of tags, and masks for scores, of a data set of another tool; then `mcis run tags --tags FILE`."""
    with plain_errors():
        from mcis.datasets.formats import import_data_set
        from mcis.platform.runs.progress import counted

        wanted = [name.strip() for name in classes.split(",")] if classes else ()
        of: Any = {"images": images, "labels": labels, "track": lambda names: counted(names, "import", len(names))}
        for line in import_data_set(format, source, out, split=split, classes=wanted, **of):
            typer.echo(line)


def import_weights(
    file: Annotated[Path, typer.Argument(help="Checkpoint of the authors' released code.")],
    out: Annotated[Path, typer.Option(help="Where the converted weights go.")] = Path("classifier.pt"),
) -> None:
    """Convert a released classifier; use it by --recipe released --set weights.classifier=FILE."""
    with plain_errors():
        from mcis.models.released import read_released_weights
        from mcis.platform.config.resolve import resolve
        from mcis.platform.networks.pretrained import classifier_description
        from mcis.platform.networks.weights_files import save

        state = read_released_weights(file)
        about = classifier_description(resolve("voc", "released").config.classifier, ())
        about.pop("classes")  # the file has none; they are VOC's in the order of the project
        save({"state_dict": state, "about": about}, out)
        classes = len(state["phi.bias"])
        typer.echo(f"{len(state)} tensors, {classes} classes: {out}")
        typer.echo(f"use: mcis run voc --voc DIR --name N --recipe released --set weights.classifier={out.resolve()}")
