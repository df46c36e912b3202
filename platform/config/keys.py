"""Dotted keys of a configuration: `classifier.optimizer.momentum` is the field momentum of that section.

`datasets` and `models` know their arguments and no configuration: their errors and notes say "name it by `classes`" or
"`tags=COLUMN`". Whoever calls them for a run knows which key or flag an argument was taken from, and names that.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mcis.datasets.errors import UserError

StageName = Literal[
    "index",
    "train_classifier",
    "localize",
    "train_affinity",
    "pseudo_masks",
    "train_segmenter",
    "predict",
    "evaluate",
    "report",
]
"""The stages in their order, as in `pipeline.STAGES`, which brings torch."""
Values = dict[str, Any]  # by dotted key
_ARGUMENT = re.compile(r"`(\w+)(=[^`]*)?`")


def leaves(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of a section and their values."""
    for key, _, value in _fields(section):
        yield key, value


def meanings(section: BaseModel) -> dict[str, str]:
    """The docstring of each value of a section, by dotted key."""
    return {key: field.description or "" for key, field, _ in _fields(section)}


def _fields(section: BaseModel, *, explicit: bool = False) -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if explicit and name not in section.model_fields_set:
            continue
        if isinstance(value, BaseModel):
            yield from ((f"{name}.{key}", *rest) for key, *rest in _fields(value, explicit=explicit))
        else:
            yield name, field, value


def explicit(section: BaseModel) -> Values:
    """The values that were given when a section was made, by dotted key; not those left at default."""
    return {key: value for key, _, value in _fields(section, explicit=True)}


def nested(flat: Values) -> dict[str, Any]:
    """Values by dotted key as dictionaries within dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def flat(tree: Mapping[str, Any], joint: str = ".") -> Iterator[tuple[str, Any]]:
    """The values of dictionaries within dictionaries, with the names that lead to them."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}{joint}{below}", of) for below, of in flat(value, joint))
        else:
            yield name, value


def value_of(section: BaseModel, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), section)


def name_keys(text: str, keys: Mapping[str, str]) -> str:
    """Replaces the arguments in a text: `classes` by its key, `classes=FILE` by `--set KEY=FILE`.

    Args:
        keys: argument -> dotted key or flag; an argument without one stays as it is.
    """

    def named(match: re.Match[str]) -> str:
        argument, value = match.groups()
        if argument not in keys:
            return match[0]
        return f"--set {keys[argument]}{value}" if value else keys[argument]

    return _ARGUMENT.sub(named, text)


def error_with_keys(error: UserError, keys: Mapping[str, str]) -> UserError:
    """The same error with `name_keys` applied to its texts."""
    return UserError(*(name_keys(text, keys) for text in (error.found, error.expected, error.remedy)))


@contextlib.contextmanager
def errors_name_keys(keys: Mapping[str, str]) -> Iterator[None]:
    """Inside, a UserError names configuration keys or flags in place of the arguments of the function that raised it.

    Raises:
        UserError: as raised inside, with `name_keys` applied to its texts.
    """
    try:
        yield
    except UserError as error:
        raise error_with_keys(error, keys) from None
