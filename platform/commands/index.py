"""The commands `mcis index <source>|show|browse`: the first stage of a run, and a look at its index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.source import Source
from mcis.platform.commands.options import DEFAULT_WORKSPACE, Assignments, Verbose, WorkspaceFolder, plain_errors

if TYPE_CHECKING:
    from mcis.platform.runs.workspace import Workspace

index_app = typer.Typer(
    help="Index image sources: verify every image, list what was rejected and why, look at what there is.",
    no_args_is_help=True,
)

Index = Annotated[str, typer.Option("--name", help="Name of the run that the index belongs to.")]


def _show_index(workspace: "Workspace", name: str, *, noted: bool = False) -> None:
    from mcis.platform.commands.terminal import show_index
    from mcis.platform.outputs.read_index import open_index

    opened = open_index(workspace, name, ["domain", "split", "tags", "content_hash"])
    show_index(opened.index, opened.rejects, opened.classes, () if noted else opened.notes)


def _add_command(source: str, about: Source) -> None:
    """The command `mcis index <source>`, which builds an index as the first stage of a run, and shows it.

    A run of the same configuration takes its index over.
    """
    key = about.keys(source)[about.location]

    def command(
        location: Any,
        run: Index = f"index-{source}",
        workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
        assignments: Assignments = None,
        verbose: Verbose = False,
    ) -> None:
        with plain_errors(verbose):
            from mcis.platform import api
            from mcis.platform.config.resolve import resolve

            resolved = resolve(source, None, {key: str(location)}, assignments or [])
            result = api.run(resolved, run, workspace=workspace, until="index", verbose=verbose)
            _show_index(result.context.workspace, run, noted=result.context.computed["index"])

    kind: Any = Path if about.location_kind == "DIR" else str
    command.__annotations__["location"] = Annotated[kind, typer.Argument(metavar=about.location_kind, help=about.help)]
    index_app.command(source, help=about.help, epilog=f"Example: `mcis index {about.example}`")(command)


for _source, _about in SOURCES.items():
    _add_command(_source, _about)


@index_app.command("show", epilog="Example: `mcis index show --name index-voc`")
def index_show(name: Index, workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Counts of an index: per split, domain and class, rejects by reason, content that is in more than one split."""
    with plain_errors():
        from mcis.platform.runs.workspace import Workspace

        _show_index(Workspace(workspace, create=False), name)


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
