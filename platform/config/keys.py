"""Dotted keys of a configuration: `classifier.optimizer.momentum` is the field momentum of that section."""

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mcis.datasets.errors import UserError

STAGE_NAMES = (
    "index",
    "train_classifier",
    "localize",
    "train_affinity",
    "pseudo_masks",
    "train_segmenter",
    "predict",
    "evaluate",
    "report",
    *sorted(point.name for point in importlib.metadata.entry_points(group="mcis.stages")),
)
"""Names of the stages in `pipeline.STAGES`, followed by those of installed packages; known without importing torch."""
Values = dict[str, Any]
"""Values by dotted key."""


def leaves(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of a section and their values."""
    for key, _, value in _fields(section):
        yield key, value


def meanings(section: BaseModel) -> dict[str, str]:
    """Returns the docstring of each value of a section, by dotted key."""
    return {key: field.description or "" for key, field, _ in _fields(section)}


def _fields(section: BaseModel, *, explicit: bool = False) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yields the dotted key, field and value of each leaf; with `explicit`, only of those that were set."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if explicit and name not in section.model_fields_set:
            continue
        if isinstance(value, BaseModel):
            for key, nested_field, leaf in _fields(value, explicit=explicit):
                yield f"{name}.{key}", nested_field, leaf
        else:
            yield name, field, value


def explicit(section: BaseModel) -> Values:
    """Returns the values of a section that were set explicitly, by dotted key."""
    return {key: value for key, _, value in _fields(section, explicit=True)}


def nested(flat: Values) -> dict[str, Any]:
    """Converts values by dotted key to nested dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def flat(tree: Mapping[str, Any], joint: str = ".") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dictionaries, each with the names that lead to it, joined by `joint`."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            for key, leaf in flat(value, joint):
                yield f"{name}{joint}{key}", leaf
        else:
            yield name, value


def value_of(section: BaseModel, key: str) -> Any:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), section)


@contextlib.contextmanager
def keys_in_errors(*keys: str) -> Iterator[None]:
    """Appends configuration keys to the remedy of a UserError raised inside the block.

    Functions of `models` know no configuration. Their errors say "choose another backbone", and the caller adds whose
    backbone it is: "choose another backbone (segmenter.backbone)".

    Args:
        keys: Dotted keys of the values that the block uses.

    Raises:
        UserError: As raised inside, with the keys.
    """
    try:
        yield
    except UserError as error:
        raise UserError(error.found, error.expected, f"{error.remedy} ({', '.join(keys)})") from None
