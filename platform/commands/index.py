"""The commands `mcis index voc|single|web|lid|tags|show|browse`: the first stage of a run, and a look at its index."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Assignments,
    Verbose,
    WorkspaceFolder,
    complete_run,
    plain_errors,
)

if TYPE_CHECKING:
    from mcis.platform.runs.workspace import Workspace

index_app = typer.Typer(
    help="Index image sources: verify every image, list what was rejected and why, look at what there is.",
    no_args_is_help=True,
)

Index = Annotated[
    str, typer.Option("--name", help="Name of the run that the index belongs to.", autocompletion=complete_run)
]
Classes = Annotated[Path | None, typer.Option("--classes", help="File with one class name per line.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the images.")]

_KEYS = {
    "voc": "data.voc",
    "sbd": "data.sbd",
    "classes": "data.classes",
    "single": "data.single.root",
    "class_file": "data.single.classes",
    "subset": "data.single.subset",
    "web": "data.web.root",
    "lid": "data.lid.root",
    "tags": "data.tags.table",
}


def _options(given: dict[str, Path | str | None]) -> dict[str, Any]:
    """Dotted keys of the options that were given."""
    return {_KEYS[name]: str(value) for name, value in given.items() if value is not None}


@contextlib.contextmanager
def _location_is_an_argument(source: str) -> Iterator[None]:
    """Errors name the command's argument in place of the option that `mcis run` has for it."""
    from mcis.datasets.errors import UserError

    try:
        yield
    except UserError as error:
        argument = "FILE" if source == "tags" else "DIR"
        texts = (error.found, error.expected, error.remedy)
        raise UserError(*(text.replace(f"--{source}", argument) for text in texts)) from None


def _index(
    setting: str, name: str, workspace: Path, assignments: list[str] | None, verbose: bool, **options: Path | str | None
) -> None:
    """Builds an index as the first stage of a run and shows it; a run of the same configuration takes it over."""
    with plain_errors(verbose), _location_is_an_argument(setting):
        from mcis.platform import pipeline
        from mcis.platform.config.resolve import resolve
        from mcis.platform.engine.runtime import ray_session
        from mcis.platform.runs.workspace import Workspace

        resolved = resolve(setting, "paper", _options(options), assignments or [])
        opened = Workspace(workspace)
        sources = pipeline.check(resolved.config, opened, name, until="index")
        with ray_session(resolved.config.compute, verbose=verbose):
            pipeline.run(resolved, opened, name, until="index", sources=sources)
        _show_index(opened, name)


def _show_index(workspace: "Workspace", name: str) -> None:
    from mcis.platform.commands.terminal import show_index
    from mcis.platform.runs.read_index import open_index

    opened = open_index(workspace, name, ["domain", "split", "tags", "content_hash"])
    show_index(opened.index, opened.rejects, opened.classes, opened.notes)


@index_app.command("voc", epilog="Examples: `mcis index voc --download data` · `mcis index voc VOCdevkit/VOC2012`")
def index_voc(
    voc: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder VOC2012 of a PASCAL VOC 2012 devkit.")
    ] = None,
    sbd: Annotated[Path | None, typer.Option(help="Folder benchmark_RELEASE of SBD, the augmentation.")] = None,
    download: Annotated[Path | None, typer.Option(help="Fetch VOC 2012 and SBD into this folder first.")] = None,
    classes: Classes = None,
    name: Index = "index-voc",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """PASCAL VOC 2012 with the SBD augmentation: 10,582 train_aug, 1,449 val.

    Where there are the 1,456 images of test, `--set data.test_list=test` adds them.
    """
    with plain_errors(verbose):
        from mcis.datasets.errors import UserError

        if (download is None) == (voc is None):
            raise UserError(
                "neither a folder nor --download" if voc is None else f"the folder {voc} and --download as well",
                "one of them: the folder VOC2012 of a devkit, or one to fetch it into",
                "write `mcis index voc DIR` or `mcis index voc --download DIR`",
            )
        if download:
            voc, sbd = _fetched(download, sbd)
    _index("voc", name, workspace, assignments, verbose, voc=voc, sbd=sbd, classes=classes)
    if download:
        locations = {"voc": voc, "sbd": sbd, "classes": classes}
        options = _options({key: path.expanduser().resolve() for key, path in locations.items() if path})
        words = ["mcis", "run", "voc", "--name", "NAME", "--voc", options.pop("data.voc")]
        if workspace != DEFAULT_WORKSPACE:
            words += ["--workspace", str(workspace)]
        for value in (*(f"{key}={value}" for key, value in options.items()), *(assignments or [])):
            words += ["--set", value]
        typer.echo(f"use: {shlex.join(words)}")


def _fetched(folder: Path, sbd: Path | None) -> tuple[Path, Path]:
    """The folders of VOC and SBD, fetched into `folder` where they are not there yet; `sbd` where that is given."""
    from mcis.datasets.sources.download import fetch_voc
    from mcis.platform.runs.arguments import errors_name_keys
    from mcis.platform.runs.progress import transfer_bars

    with transfer_bars() as on_progress, errors_name_keys({"folder": "--download", "root": "--download"}):
        fetched = fetch_voc(folder, on_progress=on_progress)
    return fetched[0], sbd or fetched[1]


@index_app.command("single", epilog="Example: `mcis index single ILSVRC/Data/CLS-LOC/train`")
def index_single(
    single: Folder,
    class_file: Annotated[
        Path | None, typer.Option("--classes", help="File of `<wnid or folder>` -> class name.")
    ] = None,
    subset: Annotated[
        Path | None, typer.Option("--list", help="File with one relative path per line: use these.")
    ] = None,
    name: Index = "index-single",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Single-label images: ImageNet CLS-LOC (by synset), Caltech-256, or plain folders `<class>/<image>`."""
    _index("single", name, workspace, assignments, verbose, single=single, class_file=class_file, subset=subset)


@index_app.command("web", epilog="Example: `mcis index web bing`")
def index_web(
    web: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of crawled images, `<class>/<file>`.")],
    classes: Classes = None,
    name: Index = "index-web",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Crawled images, `<class>/<file>`; the folder is the tag."""
    _index("web", name, workspace, assignments, verbose, web=web, classes=classes)


@index_app.command("lid", epilog="Example: `mcis index lid LID --set data.lid.masks=val_masks`")
def index_lid(
    lid: Folder,
    name: Index = "index-lid",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """List files with class indices: the LID challenge (200 classes)."""
    _index("lid", name, workspace, assignments, verbose, lid=lid)


@index_app.command("tags", epilog="Example: `mcis index tags photos.csv`")
def index_tags(
    tags: Annotated[str, typer.Argument(metavar="FILE", help="Path or URI of a .csv, .jsonl or .parquet table.")],
    classes: Classes = None,
    name: Index = "index-tags",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Your own images and tags, from a CSV, JSONL or Parquet table; paths or URIs such as s3://."""
    _index("tags", name, workspace, assignments, verbose, tags=tags, classes=classes)


@index_app.command("show", epilog="Example: `mcis index show --name index-voc --check-masks`")
def index_show(
    name: Index,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    check_masks: Annotated[bool, typer.Option(help="Compare the tags with the ground-truth masks too.")] = False,
) -> None:
    """Counts of an index: per split, domain and class, rejects by reason, content that is in more than one split."""
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)
        _show_index(opened, name)
        if check_masks:
            from mcis.platform.commands.terminal import show_disagreements
            from mcis.platform.runs.arguments import errors_name_keys
            from mcis.platform.runs.read_index import open_index

            index = open_index(opened, name)
            with errors_name_keys({"classes": "data.classes"}):
                show_disagreements(index.index, index.classes)


@index_app.command("browse", epilog="Example: `mcis index browse --name index-voc`, then open the page that it names.")
def index_browse(
    name: Index,
    out: Annotated[Path | None, typer.Option(help="Name of the page; by default in the run's folder.")] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """One HTML page of an index: counts, co-occurrence, pair mix, thumbnails with tags, rejects with reasons."""
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace, write_text

        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting.index_page import browse_page
        from mcis.platform.runs.read_index import open_index, pair_kind_shares

        index = open_index(opened, name)
        page = browse_page(
            index.index,
            index.rejects,
            index.classes,
            notes=index.notes,
            kinds=pair_kind_shares(index),
            title=f"Index of {name}",
        )
        target = out or opened.run(name).index_page
        write_text(target, page)
        typer.echo(f"page: {target}")
