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
        from mcis.platform.commands.terminal import console, table_of
        from mcis.platform.config.experiment import experiment_text
        from mcis.platform.config.keys import leaves, meanings

        resolved = configuration.resolve()
        if save:
            from mcis.platform.runs.files import write_text

            write_text(save, experiment_text(resolved.config, resolved.origins))
            typer.echo(f"experiment: {save}")
            return
        about = meanings(resolved.config)
        rows = [(key, value, resolved.origins[key], about[key]) for key, value in leaves(resolved.config)]
        console.print(table_of("Configuration", ("key", "value", "from", "meaning"), rows))
