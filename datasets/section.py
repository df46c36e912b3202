"""Base class of all configuration sections, and the types of their fields.

The docstring of a field gives its meaning, unit and source. pydantic checks values one at a time. `problems` yields
contradictions between values, so that all problems of a configuration are reported together.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from mcis.datasets.errors import UserError
from mcis.datasets.storage.uris import holds_credentials, is_remote

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
HueJitter = Annotated[float, Field(ge=0, le=0.5)]  # fraction of a turn of the color wheel
ColorJitter = tuple[NonNegative, NonNegative, NonNegative, HueJitter]


def absolute_path(path: Path) -> Path:
    """Returns the absolute path of a local file or folder.

    Raises:
        ValueError: It is a URI.
    """
    if re.match("[a-z][a-z0-9]+:/", str(path)):
        raise ValueError(
            "Input should be a local path, not a URI. To use images in a bucket, list them in a table of tags "
            "(--tags, data.tags.table)"
        )
    return path.expanduser().resolve()


def absolute_location(location: str) -> str:
    """Returns the absolute path of a local file, or a URI unchanged.

    Raises:
        ValueError: The URI holds credentials.
    """
    if holds_credentials(location):
        raise ValueError(
            "Input should be a URI without password, key, token or signature, since it is written to files. Set "
            "environment variables instead, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return location if is_remote(location) else str(absolute_path(Path(location)))


def _absolute_or_word(location: str) -> str:
    if location in ("none", "download", "bundled"):
        return location
    return absolute_location(location)


# Relative paths refer to the current folder. They are made absolute, because trials and workers run in other folders.
LocalPath = Annotated[Path, AfterValidator(absolute_path)]
PathOrUri = Annotated[str, AfterValidator(absolute_location)]
WeightsFile = Annotated[str, AfterValidator(_absolute_or_word)]


class Contradictions(ValueError):
    """Contradictions between values, one text each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A frozen group of configuration values. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    def problems(self) -> Iterator[str]:
        """Yields contradictions within the section. Each text names the keys and what to set."""
        yield from ()


_S = TypeVar("_S", bound=Section)


def with_records(extensions: Mapping[str, Any], *, exclude_defaults: bool = False) -> Callable[[type[_S]], type[_S]]:
    """Returns a decorator that adds a field to a section for each extension with a `record`, under its name.

    Args:
        extensions: Extensions of one kind, for example a `Registry`. A `record` is a subclass of `Section`.
        exclude_defaults: Whether records that have only default values are left out of keys of outputs, so that a new
            extension changes no key.
    """

    def add(section: type[_S]) -> type[_S]:
        fields: dict[str, Any] = {}
        for name, extension in extensions.items():
            record = extension.record
            if record:
                default = record()
                exclude_if = functools.partial(operator.eq, default) if exclude_defaults else None
                fields[name] = (record, Field(default=default, description=record.__doc__, exclude_if=exclude_if))
        if not fields:
            return section

        taken = sorted(fields.keys() & section.model_fields.keys())
        if taken:
            raise UserError(
                f"an installed package adds a section {', '.join(taken)}, but this key exists already",
                "a unique name",
                "rename its entry point, or remove the package",
            )
        return create_model(
            section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields
        )

    return add
