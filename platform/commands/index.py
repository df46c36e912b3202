"""The commands `mcis index <source>|show|browse`: the first stage of a run, and a look at its index."""

import contextlib
import inspect
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.source import Source
from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Assignments,
    Verbose,
    WorkspaceFolder,
    complete_run,
    plain_errors,
)
from mcis.platform.config.keys import meanings
from mcis.platform.config.sections import Config

if TYPE_CHECKING:
    from mcis.platform.runs.workspace import Workspace

index_app = typer.Typer(
    help="Index image sources: verify every image, list what was rejected and why, look at what there is.",
    no_args_is_help=True,
)

ARCHIVES = {
    "VOCdevkit/VOC2012": (
        "https://thor.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
        "6cd6e144f989b92b3379bac3b3de84fd",
    ),
    "benchmark_RELEASE": (
        "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz",
        "82b4d87ceb2ed10f6038a1cba92111cb",
    ),
}
"""Folders of VOC 2012 (2.0 GB) and SBD (1.4 GB) in their archives: address and MD5 sum, as torchvision has them."""

Index = Annotated[
    str, typer.Option("--name", help="Name of the run that the index belongs to.", autocompletion=complete_run)
]


@contextlib.contextmanager
def _location_is_an_argument(source: str) -> Iterator[None]:
    """Errors name the command's argument in place of the option that `mcis run` has for it."""
    try:
        yield
    except UserError as error:
        texts = (error.found, error.expected, error.remedy)
        raise UserError(*(text.replace(f"--{source}", SOURCES[source].where) for text in texts)) from None


def _index(
    source: str, given: dict[str, Any], *, run: str, workspace: Path, assignments: list[str] | None, verbose: bool
) -> None:
    """Builds an index as the first stage of a run and shows it; a run of the same configuration takes it over.

    Args:
        given: values of configuration keys; None = not given.
    """
    with plain_errors(verbose), _location_is_an_argument(source):
        from mcis.platform import pipeline
        from mcis.platform.config.resolve import resolve
        from mcis.platform.engine.runtime import ray_session
        from mcis.platform.runs.workspace import Workspace

        options = {key: str(value) for key, value in given.items() if value is not None}
        resolved = resolve(source, "paper", options, assignments or [])
        opened = Workspace(workspace)
        sources = pipeline.check(resolved.config, opened, run, until="index")
        with ray_session(resolved.config.compute, verbose=verbose):
            pipeline.run(resolved, opened, run, until="index", sources=sources)
        _show_index(opened, run)


def _show_index(workspace: "Workspace", name: str) -> None:
    from mcis.platform.commands.terminal import show_index
    from mcis.platform.outputs.read_index import open_index

    opened = open_index(workspace, name, ["domain", "split", "tags", "content_hash"])
    show_index(opened.index, opened.rejects, opened.classes, opened.notes)


def _add_command(source: str, about: Source) -> None:
    """The command `mcis index <source>`: where the images are, the source's options, and those of all sources."""
    location, about_keys = about.keys(source)[about.location], meanings(Config())
    kind: Any = Path if about.where == "DIR" else str
    taken: dict[str, tuple[Any, Any]] = {
        "location": (Annotated[kind, typer.Argument(metavar=about.where, help=about.help)], inspect.Parameter.empty)
    }
    for option, key in about.options.items():
        taken[option] = (Annotated[Path | None, typer.Option(f"--{option}", help=about_keys[key])], None)
    taken["run"] = (Index, f"index-{source}")
    taken["workspace"] = (WorkspaceFolder, DEFAULT_WORKSPACE)
    taken["assignments"] = (Assignments, None)
    taken["verbose"] = (Verbose, False)

    def command(**given: Any) -> None:
        values = {location: given.pop("location")} | {key: given.pop(name) for name, key in about.options.items()}
        _index(source, values, **given)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in taken.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    index_app.command(source, help=about.help, epilog=f"Example: `mcis index {about.example}`")(command)


for _source, _about in SOURCES.items():
    if _source != "voc":
        _add_command(_source, _about)


@index_app.command("voc", epilog="Examples: `mcis index voc --download data` · `mcis index voc VOCdevkit/VOC2012`")
def index_voc(
    voc: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder VOC2012 of a PASCAL VOC 2012 devkit.")
    ] = None,
    sbd: Annotated[Path | None, typer.Option(help="Folder benchmark_RELEASE of SBD, the augmentation.")] = None,
    download: Annotated[Path | None, typer.Option(help="Fetch VOC 2012 and SBD into this folder first.")] = None,
    classes: Annotated[Path | None, typer.Option(help="File with one class name per line.")] = None,
    run: Index = "index-voc",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """PASCAL VOC 2012 with the SBD augmentation: 10,582 train_aug, 1,449 val.

    Where there are the 1,456 images of test, `--set data.test_list=test` adds them.
    """
    with plain_errors(verbose):
        if (download is None) == (voc is None):
            raise UserError(
                "neither a folder nor --download" if voc is None else f"the folder {voc} and --download as well",
                "one of them: the folder VOC2012 of a devkit, or one to fetch it into",
                "write `mcis index voc DIR` or `mcis index voc --download DIR`",
            )
        if download:
            voc, sbd = _fetched(download, "VOCdevkit/VOC2012"), sbd or _fetched(download, "benchmark_RELEASE")
    given = {"data.voc": voc, "data.sbd": sbd, "data.classes": classes}
    _index("voc", given, run=run, workspace=workspace, assignments=assignments, verbose=verbose)
    if download:
        options = {key: str(path.expanduser().resolve()) for key, path in given.items() if path}
        words = ["mcis", "run", "voc", "--name", "NAME", "--voc", options.pop("data.voc")]
        if workspace != DEFAULT_WORKSPACE:
            words += ["--workspace", str(workspace)]
        for value in (*(f"{key}={value}" for key, value in options.items()), *(assignments or [])):
            words += ["--set", value]
        typer.echo(f"use: {shlex.join(words)}")


def _fetched(folder: Path, name: str) -> Path:
    """A folder of `ARCHIVES` below another one, where it is fetched and unpacked if it is not there yet."""
    import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)

    from torchvision.datasets.utils import download_and_extract_archive  # isort: skip

    target, (url, md5) = folder.expanduser().absolute() / name, ARCHIVES[name]
    if target.is_dir():
        return target
    aside = target.with_name(f".{target.name}.unpacked")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        download_and_extract_archive(url, folder.expanduser(), aside, md5=md5, remove_finished=True)
        (aside / name).rename(target)
    except (OSError, RuntimeError, EOFError, tarfile.TarError) as error:
        raise UserError(
            f"{url} cannot be fetched and unpacked: {error}",
            f"an archive of the MD5 sum {md5}, and space for its folder {name}",
            f"repeat the command, or put the archive into {folder} by other means",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


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
            from mcis.platform.outputs.read_index import open_index
            from mcis.platform.runs.arguments import errors_name_keys

            index = open_index(opened, name)
            with errors_name_keys({"classes": "data.classes"}):
                show_disagreements(index.index, index.classes)


@index_app.command("browse", epilog="Example: `mcis index browse --name index-voc`, then open the page that it names.")
def index_browse(
    name: Index,
    out: Annotated[Path | None, typer.Option(help="Name of the page; by default in the run's folder.")] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """One HTML page of an index: counts, co-occurrence, sizes, thumbnails with tags, rejects with reasons."""
    with plain_errors():
        from mcis.platform.runs.files import write_text
        from mcis.platform.runs.workspace import Workspace

        opened = Workspace(workspace, create=False)

        from mcis.platform.outputs.read_index import open_index
        from mcis.platform.reporting.index_page import browse_page

        index = open_index(opened, name)
        page = browse_page(index.index, index.rejects, index.classes, notes=index.notes, title=f"Index of {name}")
        target = out or opened.run(name).index_page
        write_text(target, page)
        typer.echo(f"page: {target}")
