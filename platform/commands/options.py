"""The options that commands share."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer

from mcis.datasets.formats.map_files import MAP_FORMATS
from mcis.datasets.sources import SOURCES
from mcis.platform.commands.errors import plain_errors
from mcis.platform.config.keys import STAGE_NAMES
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import SOURCE_COMBINATIONS

if TYPE_CHECKING:
    from mcis.platform.config.resolve import Resolved


def _parse_workspace(folder: str | Path) -> Path:
    """Returns the local path of a workspace, which for a URI is where the bucket's files are handled."""
    text = str(folder)
    if "://" not in text:
        return Path(text)

    from mcis.datasets.storage.folders import local_path

    with plain_errors():
        return local_path(text)


def parse_output(path: str | Path) -> Path:
    """Returns the path that an option --out names. A URI is refused, because only workspaces are uploaded."""
    if "://" not in str(path):
        return Path(path)

    from mcis.datasets.errors import UserError
    from mcis.datasets.storage.uris import without_credentials

    with plain_errors():
        raise UserError(
            f"--out {without_credentials(str(path))}",
            "a path on this machine; only runs are written to a bucket, by --workspace",
            "name a local path, and upload what the command has written",
        )


Name = Annotated[str, typer.Option("--name", "-n", help="Name of the run; the same name resumes it.")]
ExistingRun = Annotated[str, typer.Option("--name", "-n", help="Name of the run.")]
WorkspaceFolder = Annotated[
    Path,
    typer.Option(
        "--workspace",
        "-w",
        envvar="MCIS_WORKSPACE",
        parser=_parse_workspace,
        metavar="DIR",
        help="Folder of runs, shared stages and MLflow's store: a path, or a URI such as s3://bucket/work.",
    ),
]


def parse_stage(name: str) -> str:
    """Returns the name of a stage, or raises typer.BadParameter with the names that exist."""
    if name not in STAGE_NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(STAGE_NAMES)}")
    return name


Until = Annotated[
    str | None,
    typer.Option(
        parser=parse_stage,
        autocompletion=lambda: STAGE_NAMES,
        metavar="STAGE",
        help="Last stage to compute, such as pseudo_masks.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        parser=parse_stage,
        autocompletion=lambda: STAGE_NAMES,
        metavar="STAGE",
        help="Compute this stage and all after it again. To resume after an interruption, leave it out.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of every random draw; the same as seed=N.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Run the networks on GPUs; the same as compute.gpu=true.")]


def alternatives(names: Sequence[str]) -> str:
    """Returns a text such as `coco, cvat or yolo`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


_ObjectsFormatName = Literal["coco", "cvat", "yolo", "labelstudio"]
OBJECTS_FORMATS = get_args(_ObjectsFormatName)
"""The names of `EXPORT_FORMATS`, whose module takes long to load. Objects are written to a new folder only."""
ObjectsFormat = Annotated[
    _ObjectsFormatName | None, typer.Option("--format", help="Write the masks as objects below OUT/FORMAT as well.")
]
SmallestObject = Annotated[
    int,
    typer.Option(
        "--min-area",
        min=1,
        metavar="PIXELS",
        help=f"With --format {alternatives(OBJECTS_FORMATS)}: leave out objects of fewer pixels.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the workers' output and whole tracebacks.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Values that win over recipe and file: words KEY=VALUE after the other arguments, or --set KEY=VALUE."""

    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values to set, such as localize.related=5; see `mcis config show`."),
    ] = None
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same as a word KEY=VALUE.")
    ] = None

    def texts(self, *, seed: int | None = None, gpu: bool = False) -> list[str]:
        """Returns all overrides as texts `key=value`. Later words win over earlier ones, and so do later --set.

        Args:
            seed: Value of --seed.
            gpu: Whether --gpu is given.

        Raises:
            UserError: A key has different values in words, --set, --seed or --gpu, whose order is not known.
        """
        from mcis.datasets.errors import UserError
        from mcis.platform.config.resolve import parse_overrides

        options = [] if seed is None else [f"seed={seed}"]
        if gpu:
            options.append("compute.gpu=true")
        texts: list[str] = []
        values: dict[str, Any] = {}
        for group in (self.assignments or [], self.words or [], options):
            for key, value in parse_overrides(group).items():
                if values.setdefault(key, value) != value:
                    raise UserError(
                        f"two values of {key}, in the words KEY=VALUE, --set, --seed and --gpu",
                        "one value of each key",
                        "leave one of them out",
                    )
            texts += group
        return texts


_T = TypeVar("_T")


def _with_locations(cls: type[_T]) -> type[_T]:
    """Adds the option `--NAME` of each image source to a class that is about to become a dataclass."""
    for name, source in SOURCES.items():
        kind: Any = Path if source.location_kind == "DIR" else str
        if source.several:
            kind = list[str]
        cls.__annotations__[name] = Annotated[kind | None, typer.Option(f"--{name}", help=source.help)]
        setattr(cls, name, None)
    return cls


_DEFAULT_RECIPES = ", ".join(
    f"{source.recipe} for {name}" for name, source in SOURCES.items() if source.defines_classes
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@_with_locations
class Configuration:
    """The arguments and options that say what to run, apart from `Overrides`."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A table of images and tags (path or URI of a .csv, .jsonl or .parquet file); or names of image "
            f"sources: {', '.join(SOURCE_COMBINATIONS)}, or others joined by +.",
        ),
    ] = None
    recipe: Annotated[
        str | None, typer.Option(help=f"Recipe: {', '.join(RECIPES)}.", show_default=_DEFAULT_RECIPES)
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Experiment, written by a run or `mcis config show --save`."),
    ] = None
    corrected_masks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Corrected masks of some training images.")
    ] = None
    maps: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Localization maps of another program; no classifier is trained.")
    ] = None
    maps_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help=f"Format of --maps: {', '.join(MAP_FORMATS)}.", show_default="irn"),
    ] = None
    seed: Seed = None
    gpu: Gpu = False

    @property
    def named_source(self) -> str | None:
        """SOURCE. None: there is none, and the first word of the command is an override."""
        from mcis.platform.config.resolve import is_assignment

        return None if self.source is None or is_assignment(self.source) else self.source

    def resolve(
        self, overrides: Overrides, *, default_source: str | None = None, options: Mapping[str, Any] | None = None
    ) -> "Resolved":
        """Returns the configuration. Errors are those of `config.resolve.resolve`.

        Args:
            overrides: Values that win over recipe and file.
            default_source: SOURCE of a command that names neither a source nor a file.
            options: Values of further arguments of the command, by dotted key.

        Raises:
            UserError: An option gives a key of `options` another value.
        """
        from mcis.datasets.errors import UserError
        from mcis.platform.config.resolve import location_values, resolve

        source = self.named_source
        if source != self.source:
            overrides = dataclasses.replace(overrides, words=[str(self.source), *(overrides.words or [])])
        texts = overrides.texts(seed=self.seed, gpu=self.gpu)
        locations = {name: getattr(self, name) or None for name in SOURCES}
        files = {
            "data.corrected_masks": self.corrected_masks,
            "localize.maps": self.maps,
            "localize.maps_format": self.maps_format,
        }
        values = location_values(locations | files)
        for key, value in (options or {}).items():
            if values.setdefault(key, value) != value:
                raise UserError(f"an argument and an option for {key}", "one of them", "leave the option out")
        if source is None and self.config is None:
            source = default_source
        return resolve(source, self.recipe, values, texts, file=self.config)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command have parameters that are dataclasses, such as `Configuration`.

    Each field becomes an argument or option of its own, because typer knows no groups of parameters.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            fields = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            values[name] = group(**fields)
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    """Returns the fields of a dataclass as parameters of a function."""
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in dataclasses.fields(group)
    ]
