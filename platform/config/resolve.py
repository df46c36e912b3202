"""The layers that a run's configuration is put together from, each value with its origin.

Later layers win: defaults < recipe < sources < file of an experiment < command line options < `--set key=value`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mcis.datasets.errors import UserError
from mcis.datasets.section import Contradictions
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.lists import did_you_mean
from mcis.datasets.storage.uris import holds_credentials, without_credentials
from mcis.platform.config.experiment import Experiment, read_experiment
from mcis.platform.config.keys import Values, explicit, leaves, nested
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.renamed import RENAMED_RECIPES, current_assignment
from mcis.platform.config.sections import SOURCE_COMBINATIONS, Config, sources_of
from mcis.platform.config.training import ClassifierConfig

_NAMES = ("sources", "recipe")
Layer = tuple[str, Values]
"""Where values come from, and these by dotted key."""


class Resolved(NamedTuple):
    """A configuration, and for each dotted key the layer that its value comes from."""

    config: Config
    origins: dict[str, str]

    def changed(self) -> Values:
        """The values that neither defaults, recipe nor sources brought, by dotted key."""
        brought = ("default", f"recipe {self.config.recipe}", f"sources {self.config.sources}")
        return {
            key: value if isinstance(value, int | float | str | list | tuple | None) else str(value)
            for key, value in leaves(self.config)
            if self.origins[key] not in brought and key not in _NAMES
        }


def resolve(
    sources: str | None = None,
    recipe: str | None = None,
    options: Values | None = None,
    assignments: Sequence[str] = (),
    *,
    file: Path | None = None,
) -> Resolved:
    """Puts the layers together and validates the result once.

    Args:
        sources, recipe: None = as `file` says; without one, that of the source which names the classes.
        options: values by dotted key that command line options such as `--voc` set.
        assignments: `key=value` texts of `--set`.
        file: an experiment, see `experiment`.

    Raises:
        UserError: every unknown key, wrong type and contradiction, in one message; or sources or a recipe that are
            unknown, or not the file's.
    """
    experiment = read_experiment(file) if file else Experiment({}, {})
    given = {key: name for key, name in (("sources", sources), ("recipe", recipe)) if name is not None}
    names = _names(given, experiment, file)
    assigned = parse_assignments(assignments)
    layers: list[Layer] = [
        (f"recipe {names['recipe']}", explicit(RECIPES[names["recipe"]]())),
        (f"sources {names['sources']}", explicit(source_values(names["sources"]))),
        (str(file), experiment.names | experiment.values),
        ("command line", given | (options or {})),
        ("--set", {key: value for key, value in assigned.items() if key not in _NAMES}),
    ]
    problems = [f"{file}: {problem}" for problem in experiment.problems]
    problems += [f"{key} by --set only changes its name: use the command line" for key in _NAMES if key in assigned]
    config, origins = _merged(layers, names, problems, file)
    if config is None or problems:
        raise UserError(
            f"the configuration has {len(problems)} problem(s):\n  - " + "\n  - ".join(problems),
            "known keys with values of their type",
            "see `mcis config show` for every key, its value and where it comes from",
        )
    return Resolved(config, {key: origins.get(key, "default") for key, _ in leaves(config)})


def location_values(locations: Mapping[str, object]) -> Values:
    """Where sources are, by their names -> values by dotted key; None is left out, and any other name kept."""
    keys = {name: source.keys(name)[source.location] for name, source in SOURCES.items()}
    return {keys.get(name, name): str(location) for name, location in locations.items() if location is not None}


def _merged(
    layers: Sequence[Layer], names: Values, problems: list[str], file: Path | None
) -> tuple[Config | None, dict[str, str]]:
    """The configuration of the layers, None if it cannot be, and the origins of its values; adds to the problems."""
    known = [key for key, _ in leaves(Config())]
    values: Values = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            if key in known:
                values[key], origins[key] = value, origin
            else:
                prefix = f"{file}: " if origin == str(file) else ""
                problems.append(prefix + _unknown_key(key, value, known))
    try:
        return Config.model_validate(nested(values | names)), origins
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            origin = next((origin for each, origin in origins.items() if f"{key}.".startswith(f"{each}.")), "")
            problems += [f"{file}: " * (origin == str(file)) + text for text in _error_texts(key, item)]
        return None, origins


def _unknown_key(key: str, value: object, known: Sequence[str]) -> str:
    """The problem with an unknown key, with its current name if it was renamed, or else the most similar keys."""
    renamed = current_assignment(key, value)
    if renamed:
        return f"key {key!r} was renamed: write {renamed}"
    similar = difflib.get_close_matches(key, known, 3, 0.5)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    return f"unknown key {key!r}{hint}"


def _error_texts(key: str, error: ErrorDetails) -> Sequence[str]:
    """What is wrong with a value, by its dotted key; or all that contradicts itself, which names its keys."""
    if isinstance(reason := error.get("ctx", {}).get("error"), Contradictions):
        return reason.problems
    message, value = error["msg"].removeprefix("Value error, "), error["input"]
    found = without_credentials(value) if isinstance(value, str) and holds_credentials(value) else value
    return [f"{key}: {message} (found {found!r})"]


def _names(given: Mapping[str, str], experiment: Experiment, file: Path | None) -> dict[str, str]:
    """Sources and recipe, as given or as a file says, the sources in their order."""
    names: dict[str, str] = {}
    for origin, named in ((f"{file}: ", experiment.names), ("", given)):
        for key, name in named.items():
            try:
                known = "+".join(sources_of(name)) if key == "sources" else _known_recipe(name)
            except UserError as error:
                raise UserError(f"{origin}{error.found}", error.expected, error.remedy) from None
            if names.setdefault(key, known) != known:
                raise UserError(
                    f"{key} {known} is given beside {file}, which is of {key} {names[key]}",
                    f"a single {key}",
                    f"leave {key} {known} out, or change `{key}` in a copy of the file",
                )
    if "setting" in experiment.values and "sources" not in names:
        value = experiment.values["setting"]
        raise UserError(
            f"{file} was written by an earlier version of mcis: it has the key 'setting'",
            "the key 'sources'",
            f"write sources = {value!r} in a copy of the file; further renamed keys are then reported together",
        )
    if "sources" not in names:
        raise UserError(
            f"{file} without sources" if file else "no sources",
            f"one of {', '.join(SOURCE_COMBINATIONS)}, or other sources joined by +",
            "name it as the first argument, or name a file that has one by --config",
        )
    return {"recipe": SOURCES[sources_of(names["sources"])[0]].recipe, **names}


def source_values(sources: str) -> Config:
    """Values that a combination of sources changes: single-label images next to others are a second domain with its own
    affinities (section 3.2)."""
    names = sources_of(sources)
    several_domains = len(names) > 1 and any(SOURCES[name].domain == "source" for name in names)
    return Config(classifier=ClassifierConfig(num_domain_affinities=3)) if several_domains else Config()


def _known_recipe(recipe: str) -> str:
    if recipe in RENAMED_RECIPES:
        current = RENAMED_RECIPES[recipe]
        raise UserError(f"recipe {recipe!r} was renamed", f"recipe {current}", f"use {current}")
    if recipe not in RECIPES:
        hint = did_you_mean([recipe], [*RECIPES]) or "choose one of them"
        raise UserError(f"unknown recipe {recipe!r}", f"one of {', '.join(RECIPES)}", hint.strip())
    return recipe


def parse_assignments(assignments: Sequence[str]) -> Values:
    """`--set key=value` texts -> values (`parse_value`); UserError for one without `=` or a key."""
    values: Values = {}
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {text}", "--set key=value", "write for example --set localize.related=3")
        values[key.strip()] = parse_value(value)
    return values


def parse_value(text: str) -> Any:
    """The value that a text of the command line stands for: JSON where it parses as such, else the text."""
    try:
        return json.loads(text)
    except ValueError:  # also a whole number of more digits than Python reads
        return text.strip()
