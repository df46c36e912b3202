"""The commands of `mcis index`: build the index of images, the first stage of a run, and look at it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.source import Source
from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import Overrides, Verbose, WorkspaceFolder, grouped, parse_output
from mcis.platform.commands.source_commands import SourceGroup, location_argument
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace

index_app = typer.Typer(
    cls=SourceGroup,
    help="Index images: verify each one, list what was rejected and why. `mcis index photos.csv` indexes a table.",
    no_args_is_help=True,
)

IndexName = Annotated[str, typer.Option("--name", "-n", help="Name of the run that the index belongs to.")]


def _show_index(workspace: Workspace, name: str, *, with_notes: bool = True) -> None:
    from mcis.platform.commands.terminal import show_index
    from mcis.platform.outputs.read_index import open_index

    opened = open_index(workspace, name, ["domain", "split", "tags", "is_negative", "content_hash"])
    show_index(opened.index, opened.rejects, opened.classes, opened.notes if with_notes else ())


def _add_source_command(name: str, source: Source) -> None:
    """Adds the command `mcis index NAME`, which builds an index as the first stage of a run, and shows it."""
    key = source.keys(name)[source.location]

    def index_source(
        location: Any,
        overrides: Overrides,
        run: IndexName = f"index-{name}",
        workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
        verbose: Verbose = False,
    ) -> None:
        with plain_errors(verbose):
            from mcis.platform import api
            from mcis.platform.config.resolve import resolve

            resolved = resolve(name, None, {key: str(location)}, overrides.texts())
            result = api.run_resolved(resolved, run, workspace=workspace, until="index", verbose=verbose)

            already_noted = result.context.computed["index"]
            _show_index(result.context.workspace, run, with_notes=not already_noted)

    index_source.__annotations__["location"] = location_argument(source)
    add = index_app.command(name, help=source.help, epilog=f"Example: `mcis index {source.example}`")
    add(grouped(index_source))


for _name, _source in SOURCES.items():
    _add_source_command(_name, _source)


@index_app.command("show", epilog="Example: `mcis index show --name index-voc`")
def index_show(name: IndexName, workspace: WorkspaceFolder = DEFAULT_WORKSPACE) -> None:
    """Show the counts of an index: images per split, domain and class, rejects by reason, copies across splits."""
    with plain_errors():
        _show_index(Workspace(workspace, create=False), name)


@index_app.command("browse", epilog="Example: `mcis index browse --name index-voc`, then open the page that it names.")
def index_browse(
    name: IndexName,
    out: Annotated[
        Path | None,
        typer.Option(parser=parse_output, metavar="PATH", help="Name of the page; by default in the run's folder."),
    ] = None,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Write an HTML page about an index: counts, example images with tags, copies, rejects with reasons."""
    with plain_errors():
        from mcis.platform.runs.files import write_text

        opened = Workspace(workspace, create=False)

        from mcis.platform.outputs.read_index import open_index
        from mcis.platform.reporting.index_page import browse_page
        from mcis.platform.reporting.near_duplicates import near_duplicates

        index = open_index(opened, name)
        page = browse_page(
            index.index,
            index.rejects,
            index.classes,
            notes=index.notes,
            title=f"Index of {name}",
            value_range=index.value_range,
            provenance=index.provenance,
            near_duplicates=near_duplicates(opened, name),
        )
        target = out or opened.run(name).index_page
        write_text(target, page)
        typer.echo(f"page: {target}")
