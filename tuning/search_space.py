"""The search space and the objective of a hyperparameter search."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import OVERRIDE, parse_value
from mcis.platform.outputs.read_index import rows_in_split
from mcis.platform.runs.files import fingerprint
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.scores import SCORED_OUTPUTS, Score
from mcis.tuning.definition import configured, trial_values
from mcis.tuning.trials import Sweep, Trial, short_names

_AXIS = re.compile(r"\s*([\w.]+)\s*=\s*(\w+)\((.*)\)\s*")
_EXAMPLE = "write for example --axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)'"
_FORMS = "uniform(low,high), loguniform(low,high), integer(low,high), logint(low,high) or choice(a,b,...)"
_SHARED_KEYS = ("sources", "recipe", "data.", "compute.")
"""Prefixes of the keys that all trials of a search share."""


def parse_axes(texts: Sequence[str]) -> dict[str, BaseDistribution]:
    """Parses the values of --axis.

    Args:
        texts: `KEY=FORM(...)` each, for example `localize.related=integer(0,32)`.

    Returns:
        Optuna's distributions by dotted key. Both ends of a range are included.

    Raises:
        UserError: There is no axis, a text has another form, or a key occurs twice.
    """
    if not texts:
        raise UserError("no --axis", "at least one key with a range of values", _EXAMPLE)

    axes: dict[str, BaseDistribution] = {}
    for text in texts:
        match = _AXIS.fullmatch(text)
        if not match:
            raise UserError(f"--axis {text}", f"KEY={_FORMS}", _EXAMPLE)

        key, form, arguments = match.groups()
        if key in axes:
            raise UserError(f"two --axis {key}", "one range per key", "remove one of them")
        values = [parse_value(argument) for argument in arguments.split(",")]
        axes[key] = _choice(text, values) if form == "choice" else _range(text, form, values)
    return axes


def _choice(text: str, values: list[Any]) -> CategoricalDistribution:
    different_values = {str(value) for value in values}
    if len(values) < 2 or len(different_values) < len(values) or "" in values:
        raise UserError(f"--axis {text}", "two or more different values", "separate them by commas")
    return CategoricalDistribution(values)


def _range(text: str, form: str, values: list[Any]) -> FloatDistribution | IntDistribution:
    if form not in ("uniform", "loguniform", "integer", "logint"):
        raise UserError(f"--axis {text}", _FORMS, _EXAMPLE)
    is_integer = form in ("integer", "logint")
    is_logarithmic = form.startswith("log")

    allowed_types = (int,) if is_integer else (int, float)
    are_numbers = all(type(value) in allowed_types and math.isfinite(value) for value in values)  # a bool is no number
    if len(values) != 2 or not are_numbers:
        expected = "two integers" if is_integer else "two numbers"
        raise UserError(f"--axis {text}", expected, "write the lower and the upper end of the range")

    low, high = values
    if low >= high:
        raise UserError(f"--axis {text}", "a lower end that is less than the upper end", "correct the ends")
    if is_logarithmic and low <= 0:
        raise UserError(f"--axis {text}", "a lower end above 0 for a logarithmic range", "correct the lower end")
    if is_integer:
        return IntDistribution(low, high, log=is_logarithmic)
    return FloatDistribution(low, high, log=is_logarithmic)


def _examples(axis: BaseDistribution) -> list[Any]:
    """Values that show whether a key accepts the values of its axis.

    These are all choices, or both ends of a range and, unless it is a range of integers, one number between them.
    """
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    if isinstance(axis, IntDistribution):
        return [axis.low, axis.high]
    assert isinstance(axis, FloatDistribution)
    fraction = 0.6180339887  # an arbitrary one, so that the number has decimals
    return [axis.low, axis.high, axis.low + (axis.high - axis.low) * fraction]


class Objective(NamedTuple):
    """What a search maximizes.

    Attributes:
        about: Description, with the unit.
        until: Last stage of a trial.
        output: The scored output (`Score.output`); None: mean average precision of the classifier.
        crf: Whether the score is the one after the CRF; None: any.
    """

    about: str
    until: str
    output: str | None = None
    crf: bool | None = None

    def value(self, val_map: float | None, scores: Sequence[Score]) -> float:
        """Computes the objective of a finished trial, in percent.

        If maps with and without related images are scored, the score with related images, the last one, counts.

        Args:
            val_map: Mean average precision of the classifier on val, in percent, or None.
            scores: Scores of the trial's run.

        Raises:
            UserError: The trial has no such score.
        """
        value = val_map
        if self.output is not None:
            values = [score.miou for score in scores if score.output == self.output and self.crf in (None, score.crf)]
            value = values[-1] if values else None

        if value is None or math.isnan(value):
            raise UserError(f"no score `{self.about}`", "a score of each trial", "see the trial's report")
        return value


OBJECTIVES: dict[str, Objective] = {"val_map": Objective("mAP % of the classifier on val", "train_classifier")}
"""Objectives by name: the classifier's mean average precision, and each score of a run."""
for _output, _scored_output in SCORED_OUTPUTS.items():
    for _variant in _scored_output.variants:
        OBJECTIVES[_variant.objective] = Objective(
            f"mIoU % of {_variant.title}", _scored_output.until, _output, _variant.crf
        )


@dataclass(frozen=True, kw_only=True)
class Search(Sweep):
    """A search before it runs. Its trials are the runs NAME-t000, NAME-t001, ...

    Attributes:
        axes: Optuna's distributions by dotted key, see `parse_axes`.
        objective: Name of an objective in OBJECTIVES.
        trials: Number of trials, including the trials of earlier calls.
        minutes: Time limit of a call; None: no limit.
        halving: Reduction factor N of successive halving: at validations 1, N, N^2, ... of the classifier, the best
            1/N of the trials continue; 0 = all trials continue.
        images: Fingerprint of the images and tags that all trials use.
    """

    kind: str = "search"
    axes: Mapping[str, BaseDistribution]
    objective: str = "maps"
    trials: int = 30
    minutes: float | None = None
    halving: int = 3
    images: str = ""

    @property
    def goal(self) -> Objective:
        """What the search maximizes."""
        return OBJECTIVES[self.objective]

    @property
    def default(self) -> Values:
        """The values of the configuration itself, by key of the axes."""
        values = dict(leaves(self.resolved.config))
        return {key: values[key] for key in self.axes}

    def about(self) -> Values:
        """The description of the search in study.json."""
        config = self.resolved.config
        return {
            "sources": config.sources,
            "recipe": config.recipe,
            "changed": self.resolved.changed(),
            "objective": self.goal.about,
            "axes": {key: repr(axis) for key, axis in self.axes.items()},
            "halving": self.halving,
        }

    def identity(self) -> str:
        """Fingerprint of what must not change when the search continues."""
        return fingerprint(self.name, self.about(), self.images)

    def trial_name(self, number: int) -> str:
        """Name of the run of a trial."""
        return f"{self.name}-t{number:03d}"

    def trial(self, number: int, values: Values) -> Trial:
        """The trial with these values of the axes."""
        changed = trial_values(self.resolved, values)
        with contextlib.suppress(UserError):  # values that contradict each other: the trial raises the error
            changed = configured(self.resolved, values).changed()  # makes paths absolute
        varied = {short: values[key] for key, short in short_names(list(self.axes)).items()}
        config = self.resolved.config
        return Trial(self.trial_name(number), config.sources, config.recipe, changed, self.goal.until, varied, {})


def check_search(search: Search) -> None:
    """Checks a search before its first trial.

    Raises:
        UserError: The objective is unknown, cannot be computed, or uses the images whose score is reported; an axis has
            a key or values that the configuration does not accept; or every trial would fail.
    """
    if search.objective not in OBJECTIVES:
        raise UserError(f"--objective {search.objective}", f"one of {', '.join(OBJECTIVES)}", "choose one of them")

    fixed_keys = sorted(key for key in search.axes if search.resolved.origins.get(key) == OVERRIDE)
    if fixed_keys:
        found = f"override and --axis for {' and '.join(fixed_keys)}"
        raise UserError(found, "a fixed value or a range", "remove the override")
    shared_keys = sorted(key for key in search.axes if key.startswith(_SHARED_KEYS))
    if shared_keys:
        raise UserError(
            f"--axis {' and '.join(shared_keys)}", "keys that may differ between trials", "run one search per value"
        )
    for key, axis in search.axes.items():
        for value in _examples(axis):
            configured(search.resolved, {key: value})

    _check_objective(search)
    pipeline.check(search.resolved.config, search.workspace, search.name, until=search.goal.until)


def _check_objective(search: Search) -> None:
    """Raises a `UserError` if trials would not have the objective, or if it must not be used to choose values."""
    config = search.resolved.config
    goal = search.goal
    choose_another = "choose another objective"
    if goal.output == "segmentation" and config.predict.split != "train":
        raise UserError(
            f"--objective {search.objective} with predict.split={config.predict.split}, the images whose score is "
            "reported: a score on the images that chose the values is too high",
            "an objective on other images: val_map, maps or masks, or the segmentation of split train",
            f"{choose_another}, or use predict.split=train",
        )
    if goal.crf and not config.predict.crf.iterations:
        found = "--objective segmentation-crf with predict.crf.iterations=0"
        raise UserError(found, "at least 1 iteration", choose_another)
    if config.supervision == "full" and goal.until != "evaluate":
        found = f"--objective {search.objective} with supervision=full, which trains no classifier"
        raise UserError(found, "supervision=tags, or --objective segmentation", choose_another)
    _check_images(search)


def _check_images(search: Search) -> None:
    """Raises a `UserError` if no image has what the objective needs."""
    config = search.resolved.config
    images = list_images(config).table.select(["split", "mask_uri", "tags"])
    if search.goal.output is not None:
        masks = rows_in_split(images, "train", tagged=True)["mask_uri"]
        if masks.null_count == len(masks):
            raise UserError(
                "no training image has a ground-truth mask",
                "masks of some training images, for the objective",
                "set data.truth_masks to their folder, or use --objective val_map",
            )
        return

    is_validated = config.trains_classifier and config.classifier.val_every and config.weights.classifier is None
    if not is_validated or not len(rows_in_split(images, "val", tagged=True)):
        raise UserError(
            "--objective val_map without a classifier that is trained and validated on tagged images of the split val",
            "tagged val images, classifier.val_every of at least 1, and no weights.classifier",
            "choose another objective",
        )
