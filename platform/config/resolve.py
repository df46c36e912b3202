"""Merges the layers of a run's configuration, and records the layer that each value comes from.

Later layers win: defaults < recipe < sources < experiment file < command line options < overrides `key=value`.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mcis.datasets.errors import UserError
from mcis.datasets.section import Contradictions
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.lists import did_you_mean
from mcis.datasets.sources.user_table import is_table
from mcis.datasets.storage.uris import holds_credentials, without_credentials
from mcis.platform.config.experiment import Experiment, read_experiment
from mcis.platform.config.keys import Values, explicit, leaves, nested
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import SOURCE_COMBINATIONS, Config, sources_of
from mcis.platform.config.training import ClassifierConfig

_NAMES = ("sources", "recipe")
_TABLE_SOURCE = "tags"
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")
COMMAND_LINE = "command line"
"""Origin of the values of command line options such as `--voc`."""
OVERRIDE = "override"
"""Origin of the values of overrides `key=value`."""

Layer = tuple[str, Values]
"""An origin, and its values by dotted key."""
Overrides = Sequence[str] | Mapping[str, object]
"""Values that win over all others: texts `key=value`, or values by dotted key."""


class Resolved(NamedTuple):
    """A configuration, and the layer that each of its values comes from, by dotted key."""

    config: Config
    origins: dict[str, str]

    def changed(self) -> Values:
        """Returns the values that the user changed, by dotted key: those of options and overrides, and those of a file
        that differ from its recipe and sources. A saved file has all values."""
        unchanged = ("default", f"recipe {self.config.recipe}", f"sources {self.config.sources}")
        has_file = not set(self.origins.values()) <= {*unchanged, COMMAND_LINE, OVERRIDE}
        original = dict(leaves(resolve(self.config.sources, self.config.recipe).config)) if has_file else {}
        changed: dict[str, Any] = {}
        for key, value in leaves(self.config):
            origin = self.origins[key]
            is_original = origin not in (COMMAND_LINE, OVERRIDE) and value == original.get(key)
            if origin in unchanged or is_original or key in _NAMES:
                continue
            changed[key] = value if isinstance(value, int | float | str | list | tuple | None) else str(value)
        return changed


def resolve(
    sources: str | None = None,
    recipe: str | None = None,
    options: Values | None = None,
    overrides: Overrides = (),
    *,
    file: Path | None = None,
) -> Resolved:
    """Merges the layers and validates the result once.

    Args:
        sources: Names of image sources joined by +, or a table of images and tags (path or URI), which is read as the
            source `tags`. None: the sources of `file`.
        recipe: Name of a recipe. None: the recipe of `file`, or else the default recipe of the first source.
        options: Values of command line options such as `--voc`, by dotted key.
        overrides: Texts `key=value`, or values by dotted key.
        file: An experiment file, see `mcis.platform.config.experiment`.

    Raises:
        UserError: Sources or recipe are unknown or contradict the file; or a list of all unknown keys, wrong types and
            contradictions.
    """
    experiment = read_experiment(file) if file else Experiment({}, {})
    sources, options = with_table(sources, options or {})
    given: dict[str, str] = {}
    if sources is not None:
        given["sources"] = sources
    if recipe is not None:
        given["recipe"] = recipe
    names = _names(given, experiment, file)
    overridden = parse_overrides(overrides)

    layers: list[Layer] = [
        (f"recipe {names['recipe']}", explicit(RECIPES[names["recipe"]]())),
        (f"sources {names['sources']}", explicit(source_values(names["sources"]))),
        (str(file), experiment.names | experiment.values),
        (COMMAND_LINE, given | options),
        (OVERRIDE, {key: value for key, value in overridden.items() if key not in _NAMES}),
    ]
    problems = [f"{file}: {problem}" for problem in experiment.problems]
    for key in overridden:
        if key in _NAMES:
            problems.append(f"{key} cannot be overridden: {_REMEDIES[key]}")

    config, origins = _merge(layers, names, problems, file)
    if config is None or problems:
        raise UserError(
            f"the configuration has {len(problems)} problem(s):\n  - " + "\n  - ".join(problems),
            "known keys, with values of their type that do not contradict each other",
            "correct these; `mcis config show SOURCE` lists every key, its value and where the value comes from",
        )
    return Resolved(config, {key: origins.get(key, "default") for key, _ in leaves(config)})


_REMEDIES = {"sources": "name the sources as the first argument", "recipe": "name the recipe by --recipe"}
"""How to set the keys that overrides cannot set, because other values depend on them."""


def location_values(locations: Mapping[str, object]) -> Values:
    """Converts locations of sources to values by dotted key.

    Args:
        locations: Name of a source -> path or URI of its images, or a list of them; None values are left out. A name
            that is no source is taken as a dotted key.
    """
    keys = {name: source.keys(name)[source.location] for name, source in SOURCES.items()}
    values: Values = {}
    for name, location in locations.items():
        if isinstance(location, list | tuple):
            values[keys.get(name, name)] = [str(part) for part in location]
        elif location is not None:
            values[keys.get(name, name)] = str(location)
    return values


def with_table(sources: str | None, options: Values) -> tuple[str | None, Values]:
    """Replaces a table that is given as the sources by the source `tags` and its location."""
    if sources is None or not is_table(sources):
        return sources, options

    values = location_values({_TABLE_SOURCE: sources})
    for key, table in values.items():
        if options.get(key, table) != table:
            found = f"two tables, {without_credentials(sources)} and {without_credentials(str(options[key]))}"
            raise UserError(found, "one table", f"leave out --{_TABLE_SOURCE}")
    return _TABLE_SOURCE, options | values


def _merge(
    layers: Sequence[Layer], names: Values, problems: list[str], file: Path | None
) -> tuple[Config | None, dict[str, str]]:
    """Merges and validates layers; appends what is wrong to `problems`.

    Returns:
        The configuration, None if it is invalid, and the origins of its values by dotted key.
    """
    known = [key for key, _ in leaves(Config())]
    values: Values = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            if key in known:
                values[key] = value
                origins[key] = origin
            else:
                problems.append(_prefix(origin, file) + _unknown_key(key, known))

    try:
        return Config.model_validate(nested(values | names)), origins
    except ValidationError as error:
        for item in error.errors():
            path = ".".join(map(str, item["loc"]))
            origin = next((origin for key, origin in origins.items() if f"{path}.".startswith(f"{key}.")), "")
            problems += [_prefix(origin, file) + text for text in _error_texts(path, item)]
        return None, origins


def _prefix(origin: str, file: Path | None) -> str:
    """Returns the name of the experiment for problems with its values, nothing for those of other layers."""
    return f"{file}: " if origin == str(file) else ""


def _unknown_key(key: str, known: Sequence[str]) -> str:
    """Describes an unknown key, with the most similar keys."""
    similar = difflib.get_close_matches(key, known, 3, 0.5)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    return f"unknown key {key!r}{hint}"


def _error_texts(key: str, error: ErrorDetails) -> Sequence[str]:
    """Describes a value that pydantic refused; contradictions between values name their keys themselves."""
    reason = error.get("ctx", {}).get("error")
    if isinstance(reason, Contradictions):
        return reason.problems

    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    if isinstance(value, str) and holds_credentials(value):
        value = without_credentials(value)
    return [f"{key}: {message} (found {value!r})"]


def _names(given: Mapping[str, str], experiment: Experiment, file: Path | None) -> dict[str, str]:
    """Returns the names of sources and recipe, given or from the experiment, after checking them."""
    names: dict[str, str] = {}
    for origin, layer in ((f"{file}: ", experiment.names), ("", given)):
        for key, name in layer.items():
            try:
                known = "+".join(sources_of(name)) if key == "sources" else _known_recipe(name)
            except UserError as error:
                raise UserError(f"{origin}{error.found}", error.expected, error.remedy) from None
            if names.setdefault(key, known) != known:
                raise UserError(
                    f"{key} {known} contradicts {file}, which has {key} {names[key]}",
                    f"one value of {key}",
                    f"leave out {known}, or change `{key}` in a copy of the file",
                )

    if "sources" not in names:
        raise UserError(
            f"{file} names no image sources" if file else "no image sources are given",
            f"a table of images and tags, such as photos.csv; one of {', '.join(SOURCE_COMBINATIONS)}; or other "
            "sources joined by +",
            "name them as the first argument, or name an experiment file by --config",
        )
    return {"recipe": SOURCES[sources_of(names["sources"])[0]].recipe, **names}


def source_values(sources: str) -> Config:
    """Returns the values that a combination of sources changes.

    Single-label images next to others are a second domain with affinities of its own (section 3.2).
    """
    names = sources_of(sources)
    several_domains = len(names) > 1 and any(SOURCES[name].domain == "source" for name in names)
    return Config(classifier=ClassifierConfig(num_domain_affinities=3)) if several_domains else Config()


def _known_recipe(recipe: str) -> str:
    if recipe not in RECIPES:
        hint = did_you_mean([recipe], [*RECIPES]) or "choose one of them"
        raise UserError(f"unknown recipe {recipe!r}", f"one of {', '.join(RECIPES)}", hint.strip())
    return recipe


def is_assignment(word: str) -> bool:
    """Returns whether a word of the command line is an override `key=value`; URIs and paths are not."""
    return _ASSIGNMENT.match(word) is not None


def parse_overrides(overrides: Overrides) -> Values:
    """Returns overrides as values by dotted key.

    Raises:
        UserError: A text has no key or no `=`.
    """
    if isinstance(overrides, Mapping):
        return dict(overrides)

    values: Values = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(
                f"the argument {without_credentials(text)!r}",
                "key=value",
                "write for example localize.related=3, or leave it out",
            )
        values[key.strip()] = parse_value(value)
    return values


def parse_value(text: str) -> Any:
    """Parses a value of the command line: JSON, or else the text itself. `None`, `null` and an empty text are None."""
    text = text.strip()
    if text in ("", "None"):
        return None
    try:
        return json.loads(text)
    except ValueError:  # also an integer with more digits than Python parses
        return text
