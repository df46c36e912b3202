"""What all sections of a configuration share: frozen records whose fields are described, and the types of the fields.

A field's docstring gives meaning, unit and source. Sections are checked by pydantic one value at a time; contradictions
between values are what `problems` yields, so that all of them are reported together, for the whole configuration.
"""

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
HueJitter = Annotated[float, Field(ge=0, le=0.5)]  # of a turn of the color circle
ColorJitter = tuple[NonNegative, NonNegative, NonNegative, HueJitter]


def _absolute(path: Path) -> Path:
    if re.match("[a-z][a-z0-9]+:/", str(path)):
        raise ValueError(
            "Input should be a path of this machine and no URI: images in a bucket are named by a table of tags "
            "(--tags, data.tags.table)"
        )
    return path.expanduser().resolve()


def _absolute_or_remote(location: str) -> str:
    if holds_credentials(location):
        raise ValueError(
            "Input should be a URI without password, key, token or signature, as it is written into files; its file "
            "system finds them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return location if is_remote(location) else str(_absolute(Path(location)))


def _absolute_or_word(location: str) -> str:
    return location if location in ("none", "download", "bundled") else _absolute_or_remote(location)


# Relative to where the command is given; absolute from then on, as trials and workers have folders of their own.
LocalPath = Annotated[Path, AfterValidator(_absolute)]
PathOrUri = Annotated[str, AfterValidator(_absolute_or_remote)]
WeightsFile = Annotated[str, AfterValidator(_absolute_or_word)]


class Contradictions(ValueError):
    """Values that do not fit together, one text each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A frozen group of values; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    def problems(self) -> Iterator[str]:
        """Yields what contradicts itself within the section; each text names the keys and says what to set."""
        yield from ()


_S = TypeVar("_S", bound=Section)


def with_records(extensions: Mapping[str, Any]) -> Callable[[type[_S]], type[_S]]:
    """Adds to a section one of each extension that has a `record`, a class of sections, under the extension's name.

    Args:
        extensions: of one kind, as a `Registry` has them.
    """

    def add(section: type[_S]) -> type[_S]:
        records = {name: entry.record for name, entry in extensions.items() if entry.record}
        fields: dict[str, Any] = {
            name: (record, Field(default=record(), description=record.__doc__)) for name, record in records.items()
        }
        if not fields:
            return section
        if taken := sorted(fields.keys() & section.model_fields.keys()):
            raise UserError(
                f"an installed package adds a section {', '.join(taken)}, which is a key already",
                "a name of its own",
                "rename its entry point, or remove the package",
            )
        return create_model(
            section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields
        )

    return add
