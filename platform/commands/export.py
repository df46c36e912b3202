"""The commands `mcis export`, `mcis import` and `mcis import-weights`: files of other programs."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import (
    OBJECTS_FORMATS,
    ExistingRun,
    SmallestObject,
    WorkspaceFolder,
    alternatives,
    parse_output,
)
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace


def export(
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="maps, masks (as a VOC devkit), predictions, network (for torch), onnx or pretrained.",
        ),
    ],
    name: ExistingRun,
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_output, metavar="PATH", help="Folder to write; for network and onnx a file .pt2 or .onnx."
        ),
    ],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    format: Annotated[
        str | None,
        typer.Option(
            help=f"For masks: {alternatives(('voc', 'wsss', *OBJECTS_FORMATS))}. "
            f"For predictions: {alternatives(('png', *OBJECTS_FORMATS))}. "
            "For maps: irn, psa, clip-es or png; without it, pictures."
        ),
    ] = None,
    min_area: SmallestObject = 1,
) -> None:
    """Write a part of a run for other programs.

    Localization maps with color overlays, or as the files of other methods; pseudo masks and their images as a VOC
    devkit; predictions as PNGs; the segmentation network for torch alone, for ONNX or for the Hugging Face hub.
    """
    with plain_errors(resumes=False, new_folder=out if format in OBJECTS_FORMATS else None):
        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting.export import export

        typer.echo(export(opened, name, output, out, format, min_area))


def import_data_set(
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="coco, yolo, cvat, labelstudio, labelme, vocxml, folders or huggingface."
        ),
    ],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The file or folder of the data set.")],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_output, metavar="PATH", help="Folder to write: photos.csv, links to the images, and masks."
        ),
    ],
    images: Annotated[Path | None, typer.Option(help="Folder of the images, if they are elsewhere.")] = None,
    split: Annotated[
        str, typer.Option(help="train, val or test. Other splits that the folder already has are kept.")
    ] = "train",
    classes: Annotated[
        list[str] | None,
        typer.Option(
            help="Classes to import, such as cat,dog; can be repeated. A name with a comma is quoted, or is the only "
            "one of its option. Also a JSON list, or a file with one name per line.",
            show_default="all that occur",
        ),
    ] = None,
    negatives: Annotated[
        list[str] | None,
        typer.Option(
            help="Tags that mean none of the classes, such as ok,nothing; written as --classes.",
            show_default="none and background",
        ),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="labels.csv of an export; the masks get the labels that it lists.")
    ] = None,
) -> None:
    """Convert a data set of another tool to a table of tags, and masks for scores; then `mcis run OUT/photos.csv`."""
    with plain_errors():
        from mcis.datasets.formats.importing import import_data_set
        from mcis.platform.runs.progress import counted

        def show_progress(names: Sequence[str]) -> Iterable[str]:
            return counted(names, "import", len(names))

        lines = import_data_set(
            format,
            source,
            out,
            images=images,
            split=split,
            classes=classes or [],
            negatives=negatives or [],
            labels=labels,
            track=show_progress,
        )
        for line in lines:
            typer.echo(line)


def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Checkpoint of the authors' released code.")],
    out: Annotated[
        Path, typer.Option(parser=parse_output, metavar="PATH", help="File to write the converted weights to.")
    ] = Path("classifier.pt"),
) -> None:
    """Convert a released classifier, for runs with --recipe released weights.classifier=FILE."""
    with plain_errors():
        from mcis.models.released import read_released_weights
        from mcis.platform.config.resolve import resolve
        from mcis.platform.networks.pretrained import classifier_description
        from mcis.platform.networks.weights_files import save

        state = read_released_weights(file)
        description = classifier_description(resolve("voc", "released").config.classifier, ())
        description.pop("classes")  # the file names no classes; they are VOC's in the project's order
        save({"state_dict": state, "about": description}, out)

        classes = len(state["phi.bias"])
        typer.echo(f"{len(state)} tensors, {classes} classes: {out}")
        weights = shlex.quote(f"weights.classifier={out.resolve()}")
        typer.echo(f"use: mcis run voc --voc DIR --name N --recipe released {weights}")
