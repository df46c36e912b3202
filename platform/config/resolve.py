"""The layers that a run's configuration is put together from, each value with its origin.

Later layers win: defaults < recipe < setting < command line options < `--set key=value`.
"""

import difflib
import json
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values, explicit, key_of_error, keys_of, leaves, nested, unions
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.section import Contradictions
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import setting_values, sources_of


class Resolved(NamedTuple):
    """A configuration, and for each dotted key the layer that its value comes from."""

    config: Config
    origins: dict[str, str]

    def changed(self) -> Values:
        """The values that neither defaults, recipe nor setting brought, by dotted key."""
        brought = ("default", f"recipe {self.config.recipe}", f"setting {self.config.setting}")
        return {
            key: value if isinstance(value, int | float | str | list | tuple | None) else str(value)
            for key, value in leaves(self.config)
            if self.origins[key] not in brought and key not in ("setting", "recipe")
        }


class Layer(NamedTuple):
    """Values by dotted key, and where they come from."""

    origin: str
    values: Values


def resolve(setting: str, recipe: str, options: Values | None = None, assignments: Sequence[str] = ()) -> Resolved:
    """Puts the layers together and validates the result once.

    Args:
        options: values by dotted key that command line options such as `--voc` set.
        assignments: `key=value` texts of `--set`.

    Raises:
        UserError: every unknown key, wrong type and contradiction, in one message.
    """
    setting = "+".join(sources_of(setting))
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of them"
        raise UserError(f"unknown recipe {recipe!r}", f"one of {', '.join(RECIPES)}", hint)
    layers = [
        Layer(f"recipe {recipe}", explicit(RECIPES[recipe]())),
        Layer(f"setting {setting}", explicit(setting_values(setting))),
        Layer("command line", {"setting": setting, "recipe": recipe, **(options or {})}),
        Layer("--set", parse_assignments(assignments)),
    ]
    merged = _Merged()
    for layer in layers:
        merged.add(layer)
    config, problems = None, merged.problems
    try:
        config = Config.model_validate(nested(merged.values))
    except ValidationError as error:
        for item in error.errors():
            problems += _problems(item)
    if config is None or problems:
        raise UserError(
            f"the configuration has {len(problems)} problem(s):\n  - " + "\n  - ".join(problems),
            "known keys with values of their type",
            "see `mcis config show` for every key, its value and where it comes from",
        )
    return Resolved(config, {key: merged.origins.get(key, "default") for key, _ in leaves(config)})


def _problems(error: ErrorDetails) -> Sequence[str]:
    """What is wrong with a value, by its dotted key; or all that contradicts itself, which names its keys."""
    key, message, value = key_of_error(Config, error["loc"]), error["msg"], error["input"]
    if isinstance(reason := error.get("ctx", {}).get("error"), Contradictions):
        return reason.problems
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["discriminator"].strip("'")
        return [f"{key}.{tag}: Input should be one of {error['ctx']['expected_tags']} (found {value[tag]!r})"]
    return [f"{key}: {message} (found {value!r})"]


class _Merged:
    """The values of layers, one after the other; a layer that changes a tag drops what lay below the other one."""

    def __init__(self) -> None:
        self.unions = unions(Config)
        defaults = dict(leaves(Config()))
        self.tags: dict[str, str] = {key: defaults[f"{key}.{union.tag}"] for key, union in self.unions.items()}
        self.values: Values = {f"{key}.{union.tag}": self.tags[key] for key, union in self.unions.items()}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []

    def add(self, layer: Layer) -> None:
        """Puts a layer on top; what is no key of it joins the problems."""
        for key in self.unions:
            self._choose(key, layer)
        known_keys = set(keys_of(Config, self.tags))
        for key, value in layer.values.items():
            if key not in known_keys:
                self.problems.append(self._unknown(key, sorted(known_keys)))
            elif layer.origin == "--set" and key in ("setting", "recipe"):
                self.problems.append(f"{key} by --set would only change its name; choose it on the command line")
            else:
                self.values[key], self.origins[key] = value, layer.origin

    def _choose(self, key: str, layer: Layer) -> None:
        """Takes another variant of the section `key` where the layer names one."""
        union = self.unions[key]
        chosen = layer.values.get(f"{key}.{union.tag}", self.tags[key])
        if chosen == self.tags[key] or chosen not in list(union.variants):  # the latter is told by validation
            return
        for old in [old for old in self.values if old.startswith(f"{key}.")]:
            del self.values[old]
            self.origins.pop(old, None)
        self.tags[key] = chosen

    def _unknown(self, key: str, known_keys: Sequence[str]) -> str:
        section, _, name = key.rpartition(".")
        if union := self.unions.get(section):
            having = [tag for tag, variant in union.variants.items() if name in variant.model_fields]
            if having:
                tag = f"{section}.{union.tag}"
                return f"unknown key {key!r} with {tag}={self.tags[section]}; it goes with {tag}={' or '.join(having)}"
        near = difflib.get_close_matches(key, known_keys, 3, 0.5)
        return f"unknown key {key!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def parse_assignments(assignments: Sequence[str]) -> Values:
    """`--set key=value` texts -> values; a value is JSON where it parses as such, else text.

    Raises:
        UserError: an assignment without `=` or a key.
    """
    values: Values = {}
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {text}", "--set key=value", "write for example --set localize.related=3")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:  # also a whole number of more digits than Python reads
            values[key.strip()] = value.strip()
    return values
