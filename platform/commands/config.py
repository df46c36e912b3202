"""The command `mcis config show`: every value of a configuration, on the terminal or as a file."""

from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.options import Configuration, grouped, plain_errors

config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)


@config_app.command(
    epilog="Examples: `mcis config show voc --recipe released --set localize.related=5` · "
    "`mcis config show voc --voc DIR --recipe small --save exp.toml`"
)
@grouped
def show(
    configuration: Configuration,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write them as TOML, for `mcis run --config FILE`.")
    ] = None,
) -> None:
    """Show every key with its value, where the value comes from, and what it means."""
    with plain_errors():
        from rich.markup import escape
        from rich.table import Table

        from mcis.platform.config.experiment import experiment_text
        from mcis.platform.config.keys import leaves, meanings
        from mcis.platform.runs.progress import console

        resolved = configuration.resolve()
        if save:
            from mcis.platform.runs.files import write_text

            write_text(save, experiment_text(resolved.config, resolved.origins))
            typer.echo(f"experiment: {save}")
            return
        table = Table()
        for column in ("key", "value", "from", "meaning"):
            table.add_column(column, overflow="fold")
        about = meanings(resolved.config)
        for key, value in leaves(resolved.config):
            table.add_row(key, escape(str(value)), escape(resolved.origins[key]), escape(about[key]))
        console.print(table)
