"""An experiment as a TOML file: every value of a configuration, with its meaning and where it came from.

TOML has no null. A value that is None is left out, and where recipe, setting or defaults have another value in its
place, the list `unset` names its key.
"""

import textwrap
import tomllib
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values, explicit, leaves
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import setting_values

_LARGEST = 2**20  # bytes
_WIDTH = 118
_HEAD = """\
# An experiment of mcis: `mcis run --config FILE --name NAME` runs it, and `--set KEY=VALUE` changes a value.
# What follows a value says where it came from; a value without such a note is the default.
"""


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
        raise UserError(f"{path} is no TOML: {error}", expected, "correct that line") from None
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
    """
    brought = dict(leaves(Config())) | explicit(RECIPES[config.recipe]()) | explicit(setting_values(config.setting))
    unset = [key for key, value in leaves(config) if value is None and brought.get(key) is not None]
    lines = [_HEAD]
    if unset:
        lines += ["# Keys that are None although recipe, setting or defaults have a value.", f"unset = {_toml(unset)}"]
    return "\n".join([*lines, *_table(config, "", origins)]) + "\n"


def _table(section: BaseModel, prefix: str, origins: dict[str, str]) -> Iterator[str]:
    """Lines of a section: its values, then the sections below it, as TOML wants it."""
    fields = {name: (field, getattr(section, name)) for name, field in type(section).model_fields.items()}
    for name, (field, value) in fields.items():
        if isinstance(value, BaseModel):
            continue
        yield from _comment(field.description or "")
        if value is None:
            yield f"# {name} is None"
            continue
        origin = origins[f"{prefix}{name}"]
        yield f"{name} = {_toml(value)}" + (f"  # {_one_line(origin)}" if origin != "default" else "")
    for name, (_, value) in fields.items():
        if isinstance(value, BaseModel):
            yield ""
            yield from _comment((value.__doc__ or "").splitlines()[0])
            yield f"[{prefix}{name}]"
            yield from _table(value, f"{prefix}{name}.", origins)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value)
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        raise UserError(f"{text!r} in the configuration", "text and file names in UTF-8", "rename the file or folder")
    # JSON's escapes are TOML's as well; TOML wants one more character escaped.
    return dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
