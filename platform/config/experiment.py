"""An experiment as a TOML file: every value of a configuration, with its meaning and where it came from.

TOML has no null. A value that is None is left out, and where recipe, sources or defaults have another value in its
place, the list `unset` names its key.
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
    "An experiment of mcis: `mcis run --config FILE --name NAME` runs it, and `--set KEY=VALUE` changes a value.",
    "What follows a value says where it came from; a value without such a note is the default.",
)


class Experiment(NamedTuple):
    """What a file says.

    Attributes:
        names: `sources` and `recipe`, where the file has them.
        values: all others by dotted key.
        problems: what is wrong with the file's form, one text each.
    """

    names: dict[str, str]
    values: Values
    problems: Sequence[str] = ()


def read_experiment(path: Path) -> Experiment:
    """Reads a file; whether its keys and values are ones of a configuration is for `resolve` to say. UserError where
    there is no such file, or it is no TOML."""
    expected = "a TOML file as `mcis config show SETTING --save FILE` writes it"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", expected, "name a file by --config") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {unquoted(error)}", expected, "correct that line") from None
    names = {key: tree.pop(key) for key in ("sources", "recipe") if key in tree}
    told = "Input should be a text"
    problems = [f"{key}: {told} (found {of!r})" for key, of in names.items() if not isinstance(of, str)]
    unset = tree.pop("unset", [])
    if not (isinstance(unset, list) and all(isinstance(key, str) for key in unset)):
        problems.append(f"unset: Input should be a list of keys (found {unset!r})")
        unset = []
    values = dict(flat(tree))
    problems += [f"{key} is in the list unset and has a value" for key in unset if key in values]
    texts: dict[str, str] = {key: name for key, name in names.items() if isinstance(name, str)}
    return Experiment(texts, {**dict.fromkeys(unset), **values}, problems)


def experiment_text(config: Config, origins: dict[str, str]) -> str:
    """The text of a file that `resolve` makes the same configuration of.

    Args:
        origins: layer that each value comes from, by dotted key.

    Raises:
        UserError: a text that is no UTF-8, such as a file name of another encoding.
    """
    unset = [key for key, value in leaves(config) if value is None and origins[key] != "default"]
    head = [f"# {line}" for line in _HEAD]
    if unset:
        head += ["", "# Keys that are None where recipe, sources or defaults may have a value."]
        head.append(f"unset = {tomlkit.item(unset).as_string()}")
    text = "\n".join([*head, "", *_lines(config, "", origins)]) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[max(0, error.start - 40) : error.end]!r} in the configuration"
        raise UserError(found, "text and file names in UTF-8", "rename the file or folder") from None
    return text


def _lines(section: BaseModel, prefix: str, origins: dict[str, str]) -> Iterator[str]:
    """The lines of a section's values, then those of the sections below it, as TOML wants it."""
    below = []
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            below += ["", *_comment((value.__doc__ or "").splitlines()[0]), f"[{key}]"]
            below += _lines(value, f"{key}.", origins)
            continue
        yield from _comment(field.description or "")
        if value is None:
            yield f"# {name} is None"
            continue
        plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        line = one_line(origins[key])
        origin = "" if line == "default" else f"  # {line}"
        yield f"{name} = {tomlkit.item(plain).as_string()}{origin}"
    yield from below


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]
