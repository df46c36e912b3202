"""The commands `mcis predict` and `mcis suggest`: predict masks of photographs, and choose masks to correct."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import (
    ExistingRun,
    ObjectsFormat,
    Overrides,
    SmallestObject,
    WorkspaceFolder,
    parse_output,
)
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace

if TYPE_CHECKING:
    from mcis.platform.networks.trained_segmenter import TrainedSegmenter


def predict(
    out: Annotated[
        Path, typer.Option(parser=parse_output, metavar="PATH", help="Folder for masks, overlays and tables.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", "--run", "-n", help="Name of the run whose network predicts.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Instead of --name: a folder that `mcis export pretrained` wrote, or its id on the Hugging Face hub.",
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE|KEY=VALUE",
            help="Photographs: files, folders, .csv, .jsonl or .parquet tables with a column image, or URIs. "
            "KEY=VALUE sets a value, such as predict.crf.iterations=0.",
        ),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="Table with columns image and tags, as for training. Its photographs are predicted too, and their "
            "masks contain only classes that are among their tags.",
        ),
    ] = None,
    format: ObjectsFormat = None,
    min_area: SmallestObject = 1,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same as a word KEY=VALUE.")
    ] = None,
) -> None:
    """Predict masks of photographs: palette PNGs at their size, overlays, and the share of each class.

    Files that cannot be read, or are no photographs, are listed in OUT/rejects.csv; the command then ends with status 1
    after all others are done. A second call computes everything again. The keys that can be set are predict.*,
    data.max_side, data.max_pixels, data.value_range and data.tags.allow_absolute.
    """
    with plain_errors(resumes=False, new_folder=out / format if format else None):
        from mcis.datasets.sources.photographs import list_photographs
        from mcis.platform.config.keys import value_of
        from mcis.platform.networks.predictor import Predictor
        from mcis.platform.runs.progress import console

        files = [word for word in images or [] if not _is_override(word)]
        words = [word for word in images or [] if _is_override(word)]
        overrides = Overrides(words=words, assignments=assignments).texts()
        trained = _open_network(name, model, workspace, overrides)

        allow_absolute = value_of(trained.config, "data.tags.allow_absolute")
        tables = [tags] if tags else []
        photographs, notes = list_photographs([*files, *tables], excluded=out, allow_absolute=allow_absolute)
        known_tags = _known_tags(tags, trained, allow_absolute=allow_absolute) if tags else {}
        for line in notes:
            console.print(line)
        console.print(f"photographs are predicted at up to {trained.max_side} pixels (data.max_side)")

        from mcis.platform.reporting.export import check_objects
        from mcis.platform.reporting.photographs import predict_photographs, write_predicted_objects

        check_objects(format, out / format if format else out, min_area)
        with contextlib.closing(Predictor(trained, processes=_crf_processes())) as predictor:
            rejected = predict_photographs(predictor, photographs, out, known_tags)

        unread = {uri for uri, _ in rejected}
        predicted = [photograph for photograph in photographs if photograph.uri not in unread]
        typer.echo(f"{len(predicted)} photographs in {out}: masks, overlays, shares.csv")
        if format:
            typer.echo(write_predicted_objects(format, predictor, predicted, out, min_area))
        if rejected:
            typer.echo(f"rejected: {len(rejected)}, see {out / 'rejects.csv'}", err=True)
            raise typer.Exit(1)


def _known_tags(table: str, trained: "TrainedSegmenter", *, allow_absolute: bool) -> dict[str, list[int]]:
    """Returns the class indices of the photographs whose tags a table gives, by path or URI."""
    from mcis.datasets.sources.tagged import photograph_tags
    from mcis.platform.config.keys import value_of

    negative_tags = value_of(trained.config, "data.tags.negative_tags")
    return photograph_tags(table, trained.classes, negative_tags=negative_tags, allow_absolute=allow_absolute)


def _is_override(word: str) -> bool:
    """Returns whether a word is KEY=VALUE, and not an existing file with such a name."""
    from mcis.platform.config.resolve import is_assignment

    return is_assignment(word) and not os.path.exists(word)


def _open_network(name: str | None, model: str | None, workspace: Path, overrides: Sequence[str]) -> "TrainedSegmenter":
    """Opens the network of a run or of `mcis export pretrained`. UserError unless exactly one of them is named."""
    from mcis.datasets.errors import UserError
    from mcis.platform.networks.hub import open_pretrained
    from mcis.platform.networks.trained_segmenter import open_trained_segmenter

    if name is not None and model is not None:
        raise UserError("--name and --model", "one of them", "leave one of them out")
    if model is not None:
        return open_pretrained(model, overrides)
    if name is None:
        raise UserError("no network", "the name of a run, or a network", "give --name or --model")
    return open_trained_segmenter(Workspace(workspace, create=False).run(name, create=False).path, overrides)


def _crf_processes() -> int:
    """Returns the number of processes for the CRF: all cores but one, which feeds the network."""
    return max(1, (os.cpu_count() or 1) - 1)


def suggest(
    name: ExistingRun,
    out: Annotated[
        Path,
        typer.Option(parser=parse_output, metavar="PATH", help="Folder for masks to correct, overlays and tables."),
    ],
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 50,
    format: ObjectsFormat = None,
    min_area: SmallestObject = 1,
    tags: Annotated[
        bool, typer.Option("--tags", help="Instead of masks: list images whose tag is probably wrong.")
    ] = False,
    rank: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --tags: list a tag if the classifier scores at least this fraction of the images without it "
            "higher.",
            show_default="0.25",
        ),
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Choose the training images whose masks to correct first: network and pseudo masks disagree most on them.

    OUT/suggested.html shows them. Correct the PNGs in OUT/masks (labels of OUT/labels.csv, 255 = unsure), delete those
    that you do not correct, and repeat the run's command with --corrected-masks OUT/masks. Masks that you corrected
    with another tool, by --format, are imported by `mcis import ... --labels OUT/labels.csv`. Images that cannot be
    read at present are listed in OUT/rejects.csv; the command then ends with status 1.

    With --tags, OUT/doubtful_tags.html and .csv list the tags that the classifier ranks lowest, and OUT/leave_out.txt
    all their images, for data.leave_out. In runs with single-label or web images, only the tags of these are listed.
    """
    if tags and (format is not None or min_area != 1):
        raise typer.BadParameter("--format and --min-area are for masks: leave them out with --tags")
    if rank is not None and not tags:
        raise typer.BadParameter("--rank is for tags: add --tags")
    with plain_errors(resumes=False, new_folder=None if tags else out / "masks"):
        opened = Workspace(workspace, create=False)
        if tags:
            from mcis.platform.reporting.tag_suggestions import DEFAULT_RANK, write_tag_suggestions

            min_rank = DEFAULT_RANK if rank is None else rank
            typer.echo(write_tag_suggestions(opened, name, out, min_rank=min_rank, count=count))
            return

        from mcis.platform.networks.predictor import Predictor
        from mcis.platform.networks.trained_segmenter import open_trained_segmenter
        from mcis.platform.reporting.suggestions import write_suggestions

        trained = open_trained_segmenter(opened.run(name, create=False).path)
        with contextlib.closing(Predictor(trained, processes=_crf_processes())) as predictor:
            written = write_suggestions(opened, name, predictor, count=count, out=out, format=format, min_area=min_area)
        typer.echo(written.description)
        if written.rejected:
            typer.echo(f"rejected: {written.rejected}, see {out / 'rejects.csv'}", err=True)
            raise typer.Exit(1)
