"""The commands `mcis predict` and `suggest`: masks of photographs by a run's network; which of its masks to correct."""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, Assignments, Name, WorkspaceFolder, plain_errors


def predict(
    out: Annotated[Path, typer.Option(help="Folder for masks, overlays and tables.")],
    name: Annotated[str | None, typer.Option("--name", "--run", help="Name of the run that trained.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="Or what `mcis export pretrained` wrote.")] = None,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGES...",
            help="Photographs: files, folders, .csv, .jsonl or .parquet tables with a column image, or URIs.",
        ),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="Table with columns image and tags, as for training: its photographs are predicted, too, and their "
            "masks hold no class that is not among their tags.",
        ),
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
) -> None:
    """Predict masks of photographs of any size: palette PNGs, overlays, and the share of each class.

    Files that give no photograph are listed in OUT/rejects.csv, and the command ends with status 1 once all others are
    done. A second call computes all again. --set takes predict.*, data.max_side,
    data.max_pixels and data.tags.allow_absolute.
    """
    with plain_errors(resumes=False):
        from mcis.datasets.errors import UserError
        from mcis.datasets.sources.photographs import list_photographs
        from mcis.datasets.sources.tagged import photograph_tags
        from mcis.platform.config.keys import value_of
        from mcis.platform.networks.hub import open_pretrained
        from mcis.platform.networks.predictor import Predictor
        from mcis.platform.networks.trained_segmenter import open_trained_segmenter
        from mcis.platform.runs.progress import console
        from mcis.platform.runs.workspace import Workspace

        if (name is None) == (model is None):
            raise UserError("--name and --model" if name else "no network", "one of them", "give --name or --model")
        if model is None:
            run = Workspace(workspace, create=False).run(name or "", create=False).path
            trained = open_trained_segmenter(run, assignments or [])
        else:
            trained = open_pretrained(model, assignments or [])
        allow = value_of(trained.config, "data.tags.allow_absolute")
        photographs, notes = list_photographs(
            [*(images or []), *([tags] if tags else [])], excluded=out, allow_absolute=allow
        )
        known = photograph_tags(tags, trained.classes, allow_absolute=allow) if tags else {}
        for line in notes:
            console.print(line)
        console.print(f"photographs are predicted at up to {trained.max_side} pixels (data.max_side)")

        from mcis.platform.reporting.photographs import predict_photographs

        with contextlib.closing(Predictor(trained, processes=max(1, (os.cpu_count() or 1) - 1))) as predictor:
            rejected = predict_photographs(predictor, photographs, out, known)
        typer.echo(f"{len(photographs) - len(rejected)} photographs below {out}: masks, overlays, shares.csv")
        if rejected:
            typer.echo(f"rejected: {len(rejected)}, see {out / 'rejects.csv'}", err=True)
            raise typer.Exit(1)


def suggest(
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder for masks to begin from, overlays and tables.")],
    count: Annotated[int, typer.Option(min=1, help="How many images.")] = 50,
    format: Annotated[
        Literal["coco", "cvat", "yolo", "labelstudio"] | None, typer.Option(help="Write OUT/FORMAT as well.")
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Name the training images whose masks to correct first: where the network disagrees most with its pseudo masks.

    OUT/suggested.html shows them. Correct the PNGs in OUT/masks (labels of OUT/labels.csv, 255 = unsure), remove those
    that you leave, and train again by the run's command with --corrected-masks OUT/masks. What another tool
    corrected, of --format, comes back by `mcis import ... --labels OUT/labels.csv`.
    """
    with plain_errors(resumes=False):
        from mcis.platform.networks.predictor import Predictor
        from mcis.platform.networks.trained_segmenter import open_trained_segmenter
        from mcis.platform.reporting.suggestions import write_suggestions
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)
        trained = open_trained_segmenter(opened.run(name, create=False).path)
        with contextlib.closing(Predictor(trained, processes=max(1, (os.cpu_count() or 1) - 1))) as predictor:
            typer.echo(write_suggestions(opened, name, predictor, count, out, format))
