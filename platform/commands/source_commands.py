"""What commands with one image source have in common: `mcis index SOURCE LOCATION`, `mcis saliency SOURCE LOCATION`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mcis.datasets.sources.source import Source
from mcis.datasets.sources.user_table import is_table


class SourceGroup(TyperGroup):
    """A group with a command for each source. A table or other file instead of a command is an argument of `tags`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_command = bool(args) and args[0] in self.list_commands(ctx)
        if args and not is_command and (is_table(args[0]) or Path(args[0]).exists()):
            args = ["tags", *args]
        return super().resolve_command(ctx, args)


def location_argument(source: Source) -> Any:
    """Returns the type of the argument that says where the images of a source are."""
    kind: Any = Path if source.location_kind == "DIR" and not source.several else str
    return Annotated[kind, typer.Argument(metavar=source.location_kind, help=source.help)]
