"""Dotted keys of a configuration: `classifier.optimizer.momentum` is the field momentum of that section.

A section may be one of several, told apart by a tag: `localize.method` is the one whose name is `localize.method.name`.
Which keys lie below it depends on the tag.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Values = dict[str, Any]  # by dotted key


class Union(NamedTuple):
    """A section that is one of several: the name of the field that tells which, and the sections by its values."""

    tag: str
    variants: dict[str, type[BaseModel]]


def union_of(field: FieldInfo) -> Union | None:
    """The sections that a field may hold; None for a field that holds a value or always the same section."""
    if not isinstance(field.discriminator, str):
        return None
    variants = {variant.model_fields[field.discriminator].default: variant for variant in get_args(field.annotation)}
    return Union(field.discriminator, variants)


def leaves(section: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of a section and their values."""
    for key, _, value in _fields(section):
        yield key, value


def meanings(section: BaseModel) -> dict[str, str]:
    """The docstring of each value of a section, by dotted key."""
    return {key: field.description or "" for key, field, _ in _fields(section)}


def _fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, value


def explicit(section: BaseModel, prefix: str = "") -> Values:
    """The values that were given when a section was made, tags included, by dotted key; not those left at default."""
    values: Values = {}
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            if union := union_of(field):
                values[f"{prefix}{name}.{union.tag}"] = getattr(value, union.tag)
            values |= explicit(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def unions(section: type[BaseModel], prefix: str = "") -> dict[str, Union]:
    """All sections that are one of several, by dotted key."""
    out: dict[str, Union] = {}
    for name, field in section.model_fields.items():
        if union := union_of(field):
            out[f"{prefix}{name}"] = union
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            out |= unions(field.annotation, f"{prefix}{name}.")
    return out


def keys_of(section: type[BaseModel], tags: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of the values that a section has.

    Args:
        tags: for the dotted key of each section that is one of several, which one it is.
    """
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        below = field.annotation
        if union := union_of(field):
            below = union.variants[tags[key]]
        if isinstance(below, type) and issubclass(below, BaseModel):
            yield from keys_of(below, tags, f"{key}.")
        else:
            yield key


def key_of_error(section: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """The dotted key of an error's location, in which pydantic names the tag of a section that is one of several."""
    names: list[str] = []
    tags = unions(section)
    for part in location:
        union = tags.get(".".join(names))
        if not (union and part in union.variants):
            names.append(str(part))
    return ".".join(names)


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
