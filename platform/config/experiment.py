"""An experiment as a TOML file: every value of a configuration, with its meaning and where it came from.

TOML has no null. A value that is None is left out, and where recipe, setting or defaults have another value in its
place, the list `unset` names its key.
"""

import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
import tomlkit.items
from pydantic import BaseModel
from tomlkit.container import Container

from mcis.datasets.errors import UserError, unquoted
from mcis.platform.config.keys import Values, explicit, leaves
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import setting_values

_LARGEST = 2**20  # bytes
_WIDTH = 118
_HEAD = (
    "An experiment of mcis: `mcis run --config FILE --name NAME` runs it, and `--set KEY=VALUE` changes a value.",
    "What follows a value says where it came from; a value without such a note is the default.",
)


class Experiment(NamedTuple):
    """What a file says.

    Attributes:
        setting, recipe: None where the file does not say.
        values: all others by dotted key.
        problems: what is wrong with the file's form, one text each.
    """

    setting: str | None
    recipe: str | None
    values: Values
    problems: tuple[str, ...]


def read_experiment(path: Path) -> Experiment:
    """Reads a file; whether its keys and values are ones of a configuration is for `resolve` to say.

    Raises:
        UserError: there is no such file, or it is no TOML.
    """
    expected = "a TOML file as `mcis config show SETTING --save FILE` writes it"
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"{path} is larger than {_LARGEST >> 20} MiB", expected, "name another file by --config")
        tree = tomllib.loads(content.decode())
    except IsADirectoryError:
        raise UserError(f"{path} is a folder", expected, "name a file in it by --config") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", expected, "name a file by --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {unquoted(error)}", expected, "correct that line") from None
    problems, names = [], {}
    for key in ("setting", "recipe"):
        names[key] = tree.pop(key, None)
        if not isinstance(names[key], str | None):
            problems.append(f"{key}: Input should be a text (found {names[key]!r})")
            names[key] = None
    unset = tree.pop("unset", [])
    if not (isinstance(unset, list) and all(isinstance(key, str) for key in unset)):
        problems.append(f"unset: Input should be a list of keys (found {unset!r})")
        unset = []
    values = dict(_flat(tree))
    problems += [f"{key} is in the list unset and has a value" for key in unset if key in values]
    return Experiment(values={**dict.fromkeys(unset), **values}, problems=tuple(problems), **names)


def read_origins(path: Path) -> dict[str, str]:
    """Where each value of a file came from, by dotted key: what `experiment_text` wrote behind it, else `default`.

    Raises:
        UserError: as `read_experiment`.
    """
    read_experiment(path)
    return dict(_noted(tomlkit.parse(path.read_text(encoding="utf-8"))))


def _noted(container: Container, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in container.body:
        if isinstance(item, tomlkit.items.Table) and key is not None:
            yield from _noted(item.value, f"{prefix}{key.key}.")
        elif key is not None:
            yield f"{prefix}{key.key}", item.trivia.comment.removeprefix("# ") or "default"


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def experiment_text(config: Config, origins: dict[str, str]) -> str:
    """The text of a file that `resolve` makes the same configuration of.

    Args:
        origins: layer that each value comes from, by dotted key.

    Raises:
        UserError: a text that is no UTF-8, such as a file name of another encoding.
    """
    brought = dict(leaves(Config())) | explicit(RECIPES[config.recipe]()) | explicit(setting_values(config.setting))
    unset = [key for key, value in leaves(config) if value is None and brought.get(key) is not None]
    head = [f"# {line}" for line in _HEAD]
    if unset:
        head += ["", "# Keys that are None although recipe, setting or defaults have a value."]
        head.append(f"unset = {tomlkit.item(unset).as_string()}")
    text = "\n".join([*head, "", *_lines(config, "", origins)]) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].rpartition("\n")[2] + text[error.start :].partition("\n")[0]
        raise UserError(
            f"{line!r} in the configuration", "text and file names in UTF-8", "rename the file or folder"
        ) from None
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
        origin = "" if origins[key] == "default" else f"  # {_one_line(origins[key])}"
        yield f"# {name} is None" if value is None else f"{name} = {_plain(value).as_string()}{origin}"
    yield from below


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _plain(value: Any) -> tomlkit.items.Item:
    """A value as TOML knows it: paths are texts, tuples lists."""
    return tomlkit.item(list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value)
