"""The commands of `mcis saliency`: detect salient objects in the images of a source."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.source import Source
from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import Overrides, Verbose, grouped, parse_output
from mcis.platform.commands.source_commands import SourceGroup, location_argument

if TYPE_CHECKING:
    from mcis.platform.networks.saliency_detector import Detector

saliency_app = typer.Typer(
    cls=SourceGroup,
    help="Detect salient objects in the images of a source, and write a saliency map for each, as recipes paper and "
    "released need them. `mcis saliency photos.csv --out maps` reads a table.",
    no_args_is_help=True,
)


def _parse_triple(text: str) -> tuple[float, ...]:
    """Returns the three numbers of a text such as 0.5,0.5,0.5, or raises typer.BadParameter."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise typer.BadParameter(f"{text!r} is not three numbers with commas between them")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """The options that say which network detects salient objects."""

    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.onnx",
            help="Another network than U2-Net-p: U2-Net; IS-Net with --mean 0.5,0.5,0.5 --std 1,1,1; BiRefNet with "
            "--sigmoid; or any whose first output is one map per image.",
        ),
    ] = None
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Side of the network's square input, pixels, if the file does not state it: 320 for U2-Net, 1024 for "
            "IS-Net and BiRefNet.",
        ),
    ] = None
    mean: Annotated[
        Any,
        typer.Option(
            parser=_parse_triple,
            metavar="R,G,B",
            help="Means of the channels, of values in [0, 1]: each image is divided by its largest value.",
        ),
    ] = "0.485,0.456,0.406"
    std: Annotated[
        Any, typer.Option(parser=_parse_triple, metavar="R,G,B", help="Standard deviations of the channels.")
    ] = "0.229,0.224,0.225"
    sigmoid: Annotated[bool, typer.Option("--sigmoid", help="Apply the sigmoid to an output that is logits.")] = False

    def maker(self) -> Callable[[], "Detector"]:
        """Returns a function that makes the detector; it can be sent to other processes."""
        from mcis.platform.networks.saliency_detector import Detector

        file = self.model.expanduser().absolute() if self.model else None
        return functools.partial(Detector, file, self.size, mean=self.mean, std=self.std, sigmoid=self.sigmoid)


def _add_source_command(name: str, source: Source) -> None:
    """Adds the command `mcis saliency NAME`, which writes the saliency maps of a source."""
    keys = source.keys(name)
    # A folder of maps, which may be the one that is being filled, is not read.
    no_maps = [f"{keys['saliency']}=None"] if source.location_kind == "DIR" else []

    def detect(
        location: Any,
        overrides: Overrides,
        network: Network,
        out: Annotated[
            Path,
            typer.Option(
                parser=parse_output, metavar="PATH", help="Folder of the maps; on a cluster, one that all nodes reach."
            ),
        ],
        verbose: Verbose = False,
    ) -> None:
        with plain_errors(verbose):
            from mcis.platform.config.resolve import resolve
            from mcis.platform.reporting.source_saliency import write_source_saliency

            values = {keys[source.location]: str(location)}
            config = resolve(name, None, values, [*overrides.texts(), *no_maps]).config
            written = write_source_saliency(name, config, network.maker(), out, verbose=verbose)

            for line in written.description:
                typer.echo(line)
            if written.rejected:
                typer.echo(f"rejected: {written.rejected}, see {out / 'rejects.csv'}", err=True)
                raise typer.Exit(1)

    detect.__annotations__["location"] = location_argument(source)
    example = f"Example: `mcis saliency {source.example} --out saliency`"
    saliency_app.command(name, help=source.help, epilog=example)(grouped(detect))


for _name, _source in SOURCES.items():
    if "saliency" in _source.keys(_name):
        _add_source_command(_name, _source)
