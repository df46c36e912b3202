"""What the commands share: their options, records that group them, completion, and errors as one plain message."""

import contextlib
import dataclasses
import functools
import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from mcis.datasets.sources import SOURCES
from mcis.platform.config.keys import StageName
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import SOURCE_COMBINATIONS

if TYPE_CHECKING:
    from mcis.platform.config.resolve import Resolved

DEFAULT_WORKSPACE = Path("mcis-workspace")


Name = Annotated[str, typer.Option(help="Name of the run; the same name goes on where it stopped.")]


def _workspace(folder: str | Path) -> Path:
    """The path under which a workspace is worked on."""
    folder = str(folder)  # the default is a path
    if "://" not in folder:
        return Path(folder)
    from mcis.datasets.storage.folders import local_path

    with plain_errors():
        return local_path(folder)


WorkspaceFolder = Annotated[
    Path,
    typer.Option(
        "--workspace",
        envvar="MCIS_WORKSPACE",
        parser=_workspace,
        metavar="DIR",
        help="Folder of runs, shared stages and MLflow's store: a path, or a URI such as s3://bucket/work.",
    ),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; see `mcis config show`.")
]
Until = Annotated[StageName | None, typer.Option(metavar="STAGE", help="Last stage to compute, such as pseudo_masks.")]
_AGAIN = "Compute this stage and all after it again, while no other run uses it; if interrupted, repeat without it."
From = Annotated[StageName | None, typer.Option("--from", metavar="STAGE", help=_AGAIN)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the workers' output and whole tracebacks.")]


_T = TypeVar("_T")


def _with_locations(cls: type[_T]) -> type[_T]:
    """Adds an option of each source, `--<name>`, to a class that is to be a dataclass."""
    for name, source in SOURCES.items():
        kind: Any = Path if source.location_kind == "DIR" else str
        cls.__annotations__[name] = Annotated[kind | None, typer.Option(f"--{name}", help=source.help)]
        setattr(cls, name, None)
    return cls


@dataclasses.dataclass(frozen=True, kw_only=True)
@_with_locations
class Configuration:
    """The arguments and options that say what to run; commands take them as one, see `grouped`."""

    sources: Annotated[
        str | None, typer.Argument(help=f"Sources: {', '.join(SOURCE_COMBINATIONS)}, or others joined by +")
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Preset: {', '.join(RECIPES)}.",
            show_default=", ".join(f"{of.recipe} of {name}" for name, of in SOURCES.items() if of.defines_classes),
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Experiment, as a run or `mcis config show --save` wrote it."),
    ] = None
    corrected_masks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Corrected masks of some training images.")
    ] = None
    assignments: Assignments = None

    def resolve(self, default: str | None = None) -> "Resolved":
        """The configuration that they come to; `default` names the sources where neither an argument nor a file does.
        Errors as of `config.resolve.resolve`."""
        from mcis.platform.config.resolve import location_values, resolve

        return resolve(
            self.sources or (None if self.config else default),
            self.recipe,
            location_values(
                {name: getattr(self, name) for name in SOURCES} | {"data.corrected_masks": self.corrected_masks}
            ),
            self.assignments or [],
            file=self.config,
        )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take dataclasses such as `Configuration`: each of their fields is an option of its own."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if not dataclasses.is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = parameter.annotation
        types = get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(of.name, inspect.Parameter.KEYWORD_ONLY, default=of.default, annotation=types[of.name])
            for of in dataclasses.fields(parameter.annotation)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def plain_errors(verbose: bool = False, *, resumes: bool = True) -> Iterator[None]:
    """Ends the command with one clear message and a non-zero status where the user can do something about the error.

    `resumes` says whether the command goes on from there where it was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        after = "what is finished is kept; repeat the command without --from" if resumes else "nothing is complete"
        typer.echo(f"\ninterrupted: {after}", err=True)
        raise typer.Exit(128 + (error.args[0] if error.args else signal.SIGINT)) from None
    except Exception as error:
        from mcis.datasets.errors import UserError

        if isinstance(error, UserError):
            user_error: UserError | None = error
        else:  # Ray and its workers wrap what they raise
            from mcis.platform.engine.errors import user_error_in

            user_error = user_error_in(error)
        if user_error is None or verbose:
            raise
        typer.echo(f"error: {user_error}", err=True)
        raise typer.Exit(1) from None
