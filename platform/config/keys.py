"""Dotted keys of a configuration: `classifier.optimizer.momentum` is the field momentum of that section."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
