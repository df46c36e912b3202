"""The layers that a run's configuration is put together from, each value with its origin.

Later layers win: defaults < recipe < setting < file of an experiment < command line options < `--set key=value`. Behind
them `compute.scale_batch`, where it is asked for, multiplies batches and learning rates.
"""

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mcis.datasets.errors import UserError
from mcis.datasets.section import Contradictions
from mcis.datasets.storage.files import holds_credentials, without_credentials
from mcis.platform.config.experiment import Experiment, read_experiment
from mcis.platform.config.keys import Values, explicit, key_of_error, keys_of, leaves, nested, unions
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import SETTINGS, default_recipe, setting_values, sources_of
from mcis.platform.config.training import NETWORKS, ClassifierConfig


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
    """Values by dotted key, and where they come from; problems with the values of a file name it."""

    origin: str
    values: Values
    is_file: bool = False


class Names(NamedTuple):
    """Which data setting and which recipe a configuration is of."""

    setting: str
    recipe: str


def resolve(
    setting: str | None = None,
    recipe: str | None = None,
    options: Values | None = None,
    assignments: Sequence[str] = (),
    *,
    file: Path | None = None,
) -> Resolved:
    """Puts the layers together and validates the result once.

    Args:
        setting, recipe: None = as `file` says; without one, the setting's `default_recipe`.
        options: values by dotted key that command line options such as `--voc` set.
        assignments: `key=value` texts of `--set`.
        file: an experiment, see `experiment`.

    Raises:
        UserError: every unknown key, wrong type and contradiction, in one message; or a setting or recipe that is
            unknown, or not the file's.
    """
    experiment = read_experiment(file) if file else Experiment(None, None, {}, ())
    chosen = _names(setting, recipe, experiment, file)
    merged = _Merged()
    merged.problems += [f"{file}: {problem}" for problem in experiment.problems]
    merged.add(Layer(f"recipe {chosen.recipe}", explicit(RECIPES[chosen.recipe]())))
    merged.add(Layer(f"setting {chosen.setting}", explicit(setting_values(chosen.setting))))
    if file:
        of_file = {name: value for name, value in chosen._asdict().items() if getattr(experiment, name) is not None}
        merged.add(Layer(str(file), {**of_file, **experiment.values}, is_file=True))
    given = {name: value for name, value in chosen._asdict().items() if {"setting": setting, "recipe": recipe}[name]}
    merged.add(Layer("command line", {**given, **(options or {})}))
    merged.add(Layer("--set", parse_assignments(assignments)))
    merged.values |= chosen._asdict()
    config = merged.validated()
    if config is not None and config.compute.scale_batch:
        merged.add(Layer(f"compute.scale_batch, x {config.compute.workers} workers", dict(_scaled(config))))
        config = merged.validated()
    if config is None or merged.problems:
        raise UserError(
            f"the configuration has {len(merged.problems)} problem(s):\n  - " + "\n  - ".join(merged.problems),
            "known keys with values of their type",
            "see `mcis config show` for every key, its value and where it comes from",
        )
    return Resolved(config, {key: merged.origins.get(key, "default") for key, _ in leaves(config)})


def _scaled(config: Config) -> Iterator[tuple[str, int | float]]:
    """The values that `compute.scale_batch` changes; with it done, so that a file of them is not scaled again."""
    workers = config.compute.workers
    for name in NETWORKS.values():
        section = getattr(config, name)
        rate = workers if section.optimizer.name == "sgd" else math.sqrt(workers)
        yield f"{name}.batch", section.batch * workers
        yield f"{name}.optimizer.learning_rate", section.optimizer.learning_rate * rate
        if not isinstance(section, ClassifierConfig):  # its epochs have fewer updates by themselves
            yield f"{name}.steps", math.ceil(section.steps / workers)
    yield "compute.scale_batch", False


def _names(setting: str | None, recipe: str | None, experiment: Experiment, file: Path | None) -> Names:
    """Setting and recipe, as given or as a file says.

    Raises:
        UserError: there is no setting, one of the two is unknown, or another one is given beside the file.
    """
    try:
        of_file = "+".join(sources_of(experiment.setting)) if experiment.setting is not None else None
        if experiment.recipe is not None:
            _check_recipe(experiment.recipe)
    except UserError as error:
        raise UserError(f"{file}: {error.found}", error.expected, error.remedy) from None
    given = "+".join(sources_of(setting)) if setting is not None else None
    if recipe is not None:
        _check_recipe(recipe)
    for word, on_command_line, in_file in (("setting", given, of_file), ("recipe", recipe, experiment.recipe)):
        if on_command_line is not None and in_file is not None and on_command_line != in_file:
            raise UserError(
                f"{word} {on_command_line} is given beside {file}, which is of {word} {in_file}",
                f"a single {word}",
                f"leave {word} {on_command_line} out, or change `{word}` in a copy of the file",
            )
    chosen = given or of_file
    if chosen is None:
        raise UserError(
            f"{file} without a setting" if file else "no setting",
            f"one of {', '.join(SETTINGS)}, or other sources joined by +",
            "name it as the first argument, or name a file that has one by --config",
        )
    return Names(chosen, recipe or experiment.recipe or default_recipe(chosen))


def _check_recipe(recipe: str) -> None:
    if recipe not in RECIPES:
        nearest = difflib.get_close_matches(recipe, RECIPES, 1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one of them"
        raise UserError(f"unknown recipe {recipe!r}", f"one of {', '.join(RECIPES)}", hint)


def _problems(key: str, error: ErrorDetails) -> Sequence[str]:
    """What is wrong with a value, by its dotted key; or all that contradicts itself, which names its keys."""
    message, value = error["msg"], error["input"]
    if isinstance(reason := error.get("ctx", {}).get("error"), Contradictions):
        return reason.problems
    if error["type"] == "union_tag_invalid":
        tag = error["ctx"]["discriminator"].strip("'")
        return [f"{key}.{tag}: Input should be one of {error['ctx']['expected_tags']} (found {value[tag]!r})"]
    found = without_credentials(value) if isinstance(value, str) and holds_credentials(value) else value
    return [f"{key}: {message.removeprefix('Value error, ')} (found {found!r})"]


class _Merged:
    """The values of layers, one after the other; a layer that changes a tag drops what lay below the other one."""

    def __init__(self) -> None:
        self.unions = unions(Config)
        defaults = dict(leaves(Config()))
        self.tags: dict[str, str] = {key: defaults[f"{key}.{union.tag}"] for key, union in self.unions.items()}
        self.values: Values = {f"{key}.{union.tag}": self.tags[key] for key, union in self.unions.items()}
        self.origins: dict[str, str] = {}
        self.files: set[str] = set()
        self.problems: list[str] = []

    def add(self, layer: Layer) -> None:
        """Puts a layer on top; its keys that are none join the problems."""
        if layer.is_file:
            self.files.add(layer.origin)
        for key in self.unions:
            self._choose(key, layer)
        known_keys = list(keys_of(Config, self.tags))
        for key, value in layer.values.items():
            if layer.is_file and value == {} and any(known_key.startswith(f"{key}.") for known_key in known_keys):
                continue  # a section that a file names and gives no values
            if key not in known_keys:
                self._tell(layer.origin, self._unknown(key, known_keys))
            elif layer.origin == "--set" and key in Names._fields:
                self._tell(layer.origin, f"{key} by --set would only change its name; choose it on the command line")
            else:
                self.values[key], self.origins[key] = value, layer.origin

    def validated(self) -> Config | None:
        """The configuration; None if it cannot be, which the problems tell."""
        try:
            return Config.model_validate(nested(self.values))
        except ValidationError as error:
            for item in error.errors():
                key = key_of_error(Config, item["loc"])
                origin = next((self.origins[k] for k in self.origins if f"{key}.".startswith(f"{k}.")), "")
                for problem in _problems(key, item):
                    self._tell(origin, problem)
            return None

    def _tell(self, origin: str, problem: str) -> None:
        self.problems.append(f"{origin}: {problem}" if origin in self.files else problem)

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
        nearest = difflib.get_close_matches(key, known_keys, 3, 0.5)
        return f"unknown key {key!r}" + (f"; did you mean {' or '.join(nearest)}?" if nearest else "")


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
