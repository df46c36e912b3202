"""An experiment file (TOML): all values of a configuration, with their meanings and origins.

TOML has no null. A value that is None is left out; if recipe, sources or defaults have another value for its key, the
list `unset` contains the key.
"""

import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tomlkit
from pydantic import BaseModel

from mcis.datasets.errors import UserError, one_line, unquoted
from mcis.platform.config.keys import Values, flat, leaves
from mcis.platform.config.sections import Config

_WIDTH = 118
_HEAD = (
    "An experiment of mcis: `mcis run --config FILE --name NAME` runs it, and KEY=VALUE after that changes a value.",
    "The comment after a value names its origin; values without one are defaults.",
)


class Experiment(NamedTuple):
    """Content of an experiment file.

    Attributes:
        names: `sources` and `recipe`, if the file states them.
        values: All other values by dotted key.
        problems: Problems with the form of the file.
    """

    names: dict[str, str]
    values: Values
    problems: Sequence[str] = ()


def read_experiment(path: Path) -> Experiment:
    """Reads an experiment file. Its keys and values are validated by `resolve`.

    Raises:
        UserError: The file cannot be read, or is not TOML.
    """
    expected = "a TOML file, as `mcis config show SOURCE --save FILE` writes it"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror})", expected, "correct the path after --config"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {unquoted(error)}", expected, "correct the file") from None

    names: dict[str, str] = {}
    problems: list[str] = []
    for key in ("sources", "recipe"):
        value = tree.pop(key, None)
        if isinstance(value, str):
            names[key] = value
        elif value is not None:
            problems.append(f"{key}: Input should be a text (found {value!r})")

    unset = tree.pop("unset", [])
    if not (isinstance(unset, list) and all(isinstance(key, str) for key in unset)):
        problems.append(f"unset: Input should be a list of keys (found {unset!r})")
        unset = []
    values = dict(flat(tree))
    problems += [f"{key} is in the list unset and has a value" for key in unset if key in values]
    return Experiment(names, {**dict.fromkeys(unset), **values}, problems)


def experiment_text(config: Config, origins: dict[str, str]) -> str:
    """Text of an experiment file from which `resolve` makes the same configuration.

    Args:
        origins: Layer that each value comes from, by dotted key.

    Raises:
        UserError: A value is not valid UTF-8, such as a file name in another encoding.
    """
    unset = [key for key, value in leaves(config) if value is None and origins[key] != "default"]
    head = [f"# {line}" for line in _HEAD]
    if unset:
        head += ["", "# Keys that are None although the recipe, the sources or the defaults may have a value for them."]
        head.append(f"unset = {tomlkit.item(unset).as_string()}")
    text = "\n".join([*head, "", *_lines(config, "", origins)]) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[max(0, error.start - 40) : error.end]!r} in the configuration"
        raise UserError(found, "text and file names in UTF-8", "rename the file or folder") from None
    return text


def _lines(section: BaseModel, prefix: str, origins: dict[str, str]) -> Iterator[str]:
    """Lines of the values of a section, followed by its subsections, as TOML requires."""
    subsections: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            subsections += ["", *_comment((value.__doc__ or "").splitlines()[0]), f"[{key}]"]
            subsections += _lines(value, f"{key}.", origins)
            continue

        yield from _comment(field.description or "")
        if value is None:
            yield f"# {name} is None"
        else:
            origin = one_line(origins[key])
            suffix = "" if origin == "default" else f"  # {origin}"
            yield f"{name} = {_toml_text(value)}{suffix}"
    yield from subsections


def _toml_text(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Path):
        value = str(value)
    return tomlkit.item(value).as_string()


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]
