"""The commands `mcis index voc|single|web|lid|tags|show|browse`: the first stage of a run, and a look at its index."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Assignments,
    Lid,
    Single,
    Tags,
    Verbose,
    Voc,
    Web,
    WorkspaceFolder,
    data_options,
    plain_errors,
)

index_app = typer.Typer(
    help="Index image sources: verify every image, list what was rejected and why, look at what there is.",
    no_args_is_help=True,
)

Index = Annotated[str, typer.Option("--name", help="Name of the run that the index belongs to.")]
Classes = Annotated[Path | None, typer.Option("--classes", help="File with one class name a line.")]


def _index(
    setting: str, name: str, workspace: Path, assignments: list[str] | None, verbose: bool, **options: Any
) -> None:
    """Builds an index as the first stage of a run and shows it; a run of the same configuration finds it there."""
    with plain_errors(verbose):
        from mcis.platform import pipeline
        from mcis.platform.config.resolve import resolve
        from mcis.platform.engine.runtime import ray_session
        from mcis.platform.runs.workspace import Workspace

        resolved = resolve(setting, "paper", data_options(**options), assignments or [])
        place = Workspace(workspace)
        pipeline.check(resolved.config, place, name, until="index")
        with ray_session(resolved.config.compute, verbose=verbose):
            pipeline.run(resolved, place, name, until="index")
        _show_index(place, name)


def _show_index(place: Any, name: str) -> None:
    from mcis.platform.commands.terminal import show_index
    from mcis.platform.runs.read_index import open_index

    found = open_index(place, name)
    show_index(found.index, found.rejects, found.classes, found.notes)


@index_app.command(
    "voc", epilog="Example: `mcis index voc --download data` · `mcis index voc --voc data/VOCdevkit/VOC2012`"
)
def index_voc(
    voc: Voc = None,
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
        if download:
            from mcis.datasets.sources.download import fetch_voc
            from mcis.platform.runs.progress import transfer_bars

            with transfer_bars() as on_progress:
                voc, sbd = fetch_voc(download, on_progress=on_progress)
    _index("voc", name, workspace, assignments, verbose, voc=voc, sbd=sbd, classes=classes)
    if download:
        places = {"voc": voc, "sbd": sbd, "classes": classes}
        options = data_options(**{name: path.expanduser().resolve() for name, path in places.items() if path})
        words = ["mcis", "run", "voc", "--name", "NAME", "--voc", options.pop("data.voc")]
        if workspace != DEFAULT_WORKSPACE:
            words += ["--workspace", str(workspace)]
        for value in (*(f"{key}={value}" for key, value in options.items()), *(assignments or [])):
            words += ["--set", value]
        typer.echo(f"use: {shlex.join(words)}")


@index_app.command("single", epilog="Example: `mcis index single --single ILSVRC/Data/CLS-LOC/train`")
def index_single(
    single: Single = None,
    class_file: Annotated[
        Path | None, typer.Option("--classes", help="File of `<wnid or folder>` -> class name.")
    ] = None,
    subset: Annotated[
        Path | None, typer.Option("--list", help="File with one relative path a line: use these.")
    ] = None,
    name: Index = "index-single",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Single-label images: ImageNet CLS-LOC (by synset) or Caltech-256, mapped to VOC's classes."""
    _index("single", name, workspace, assignments, verbose, single=single, class_file=class_file, subset=subset)


@index_app.command("web", epilog="Example: `mcis index web --web bing`")
def index_web(
    web: Web = None,
    classes: Classes = None,
    name: Index = "index-web",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Crawled images, `<class>/<file>`; the folder is the tag."""
    _index("web", name, workspace, assignments, verbose, web=web, classes=classes)


@index_app.command("lid", epilog="Example: `mcis index lid --lid LID --set data.lid.masks=val_masks`")
def index_lid(
    lid: Lid = None,
    name: Index = "index-lid",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """List files with class indices: the LID challenge (200 classes)."""
    _index("lid", name, workspace, assignments, verbose, lid=lid)


@index_app.command("tags", epilog="Example: `mcis index tags --tags photos.csv`")
def index_tags(
    tags: Tags = None,
    classes: Classes = None,
    name: Index = "index-tags",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Your own images and tags, from a CSV, JSONL or Parquet table; paths or URIs such as s3://."""
    _index("tags", name, workspace, assignments, verbose, tags=tags, classes=classes)


@index_app.command("show")
def index_show(
    name: Index,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    check_masks: Annotated[bool, typer.Option(help="Compare the tags with the ground-truth masks too.")] = False,
) -> None:
    """Counts of an index: per split, domain and class, rejects by reason, content that is in more than one split."""
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        place = Workspace(workspace)
        _show_index(place, name)
        if check_masks:
            from mcis.platform.commands.terminal import show_disagreements
            from mcis.platform.runs.read_index import open_index

            found = open_index(place, name)
            show_disagreements(found.index, found.classes)


@index_app.command("browse", epilog="Example: `mcis index browse --name index-voc`, then open the page that it names.")
def index_browse(
    name: Index,
    out: Annotated[Path | None, typer.Option(help="Name of the page; by default in the run's folder.")] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """One HTML page of an index: counts, co-occurrence, pair mix, thumbnails with tags, rejects with reasons."""
    with plain_errors():
        from mcis.platform.reporting.index_page import browse_page
        from mcis.platform.runs.read_index import open_index, pair_kind_shares
        from mcis.platform.runs.workspace import Workspace, written_aside

        place = Workspace(workspace)
        found = open_index(place, name)
        page = browse_page(
            found.index,
            found.rejects,
            found.classes,
            notes=found.notes,
            kinds=pair_kind_shares(found),
            title=f"Index of {name}",
        )
        target = out or place.run(name).index_page
        with written_aside(target) as aside:
            aside.write_text(page, encoding="utf-8")
        typer.echo(f"page: {target}")
