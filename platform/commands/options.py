"""What the commands of the command line share: their options' types, and errors that end in one plain message."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Setting = Annotated[
    str, typer.Argument(help="Image sources: voc, voc+single, voc+web, lid, tags, or others of them joined by +.")
]
Name = Annotated[str, typer.Option(help="Name of the run; the same name goes on where it stopped.")]
Voc = Annotated[Path | None, typer.Option(help="Folder VOC2012 of a PASCAL VOC 2012 devkit.")]
Single = Annotated[Path | None, typer.Option(help="Folder of ImageNet CLS-LOC, Caltech-256 or `<class>/<image>`.")]
Web = Annotated[Path | None, typer.Option(help="Folder of crawled images, `<class>/<file>`.")]
Lid = Annotated[Path | None, typer.Option(help="Folder of the LID challenge, or of any data set with list files.")]
Tags = Annotated[str | None, typer.Option(help="Your own images and tags: path or URI of a .csv, .jsonl or .parquet.")]
Recipe = Annotated[
    str, typer.Option(help="Preset: paper, released (both need ImageNet weights and a GPU) or small (CPU).")
]
WorkspaceFolder = Annotated[
    Path, typer.Option("--workspace", envvar="MCIS_WORKSPACE", help="Folder of runs, shared stages and MLflow's store.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; see `mcis config show`.")
]
Until = Annotated[str | None, typer.Option(help="Last stage to compute.")]
From = Annotated[str | None, typer.Option("--from", help="Compute this stage and all after it again.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the workers' output and whole tracebacks.")]

DEFAULT_WORKSPACE = Path("mcis-workspace")

_KEYS = {
    "data.single": "data.single.root",
    "data.web": "data.web.root",
    "data.lid": "data.lid.root",
    "data.tags": "data.tags.table",
    "data.class_file": "data.single.classes",
    "data.subset": "data.single.subset",
}


@contextlib.contextmanager
def plain_errors(verbose: bool = False) -> Iterator[None]:
    """Ends the command with one clear message and a non-zero status where its owner can mend the matter."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        _end(interruption)
    except Exception as error:
        from mcis.platform.engine.runtime import user_error_in
        from mcis.platform.runs.arguments import error_with_keys

        problem = user_error_in(error)
        if problem is None or verbose:
            raise
        _end(error_with_keys(problem, {"index": "the command with --from index"}))


def _end(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        typer.echo("\ninterrupted: what is finished is kept; the same command goes on from there", err=True)
        raise typer.Exit(130)
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def data_options(**given: Path | str | None) -> dict[str, Any]:
    """Dotted keys of the options that were given."""
    options = {f"data.{name}": str(value) for name, value in given.items() if value is not None}
    return {_KEYS.get(key, key): value for key, value in options.items()}
