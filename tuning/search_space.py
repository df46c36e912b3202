"""What a search tries and what it maximizes: keys of the configuration, ranges of their values, and a score."""

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
from mcis.platform.config.resolve import parse_value
from mcis.platform.outputs.read_index import rows_in_split
from mcis.platform.runs.files import fingerprint
from mcis.platform.runs.listing import listing
from mcis.platform.runs.scores import SCORED_OUTPUTS, Score
from mcis.tuning.definition import configured, trial_values
from mcis.tuning.trials import Sweep, Trial, short_names

_FORM = re.compile(r"\s*([\w.]+)\s*=\s*(\w+)\((.*)\)\s*")
_EXAMPLE = "write for example --axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)'"
_FORMS = "uniform(low,high), loguniform(low,high), integer(low,high), logint(low,high) or choice(a,b,...)"
_NAMES_DATA = ("sources", "recipe", "data.")
"""Keys of what trials of one search have in common begin so."""


def parse_axes(texts: Sequence[str]) -> dict[str, BaseDistribution]:
    """`KEY=FORM(...)` texts -> Optuna's distributions by dotted key, ends of ranges included; UserError for others."""
    if not texts:
        raise UserError("no --axis", "at least one KEY and its range", _EXAMPLE)
    axes: dict[str, BaseDistribution] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if not match:
            raise UserError(f"--axis {text}", f"KEY={_FORMS}", _EXAMPLE)
        key, form, inside = match.groups()
        if key in axes:
            raise UserError(f"two --axis {key}", "one range for a key", "leave one of them out")
        axes[key] = _distribution(text, form, [parse_value(item) for item in inside.split(",")])
    return axes


def _distribution(text: str, form: str, values: list[Any]) -> BaseDistribution:
    if form == "choice":
        if len(values) < 2 or len({str(value) for value in values}) < len(values) or "" in values:
            raise UserError(f"--axis {text}", "two or more different values", "name them between commas")
        return CategoricalDistribution(values)
    if form not in ("uniform", "loguniform", "integer", "logint"):
        raise UserError(f"--axis {text}", _FORMS, _EXAMPLE)
    whole, logarithmic = form in ("integer", "logint"), form.startswith("log")
    numbers = [value for value in values if type(value) is int or (type(value) is float and not whole)]
    if len(numbers) != 2 or len(values) != 2 or not all(math.isfinite(number) for number in numbers):
        raise UserError(f"--axis {text}", f"two {'whole ' if whole else ''}numbers", "name the lower and the upper end")
    low, high = numbers
    if low >= high or (logarithmic and low <= 0):
        above = " above 0" if logarithmic else ""
        raise UserError(f"--axis {text}", f"a lower end{above} that is less than the upper one", "correct the ends")
    kind: Any = IntDistribution if whole else FloatDistribution
    return kind(low, high, log=logarithmic)


def _examples(axis: BaseDistribution) -> list[Any]:
    """Values that show whether a key takes what lies on its axis: all choices, or both ends of a range.

    Of a range of numbers that are not whole ones, also such a number between.
    """
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    assert isinstance(axis, FloatDistribution | IntDistribution)
    between = [] if isinstance(axis, IntDistribution) else [axis.low + (axis.high - axis.low) * 0.6180339887]
    return [axis.low, axis.high, *between]


class Objective(NamedTuple):
    """What a search maximizes.

    Attributes:
        about: in words.
        until: the stage that ends a trial.
        what, crf: of the score (`Score`); None = the classifier's mean average precision.
    """

    about: str
    until: str
    what: str | None = None
    crf: bool | None = None

    def value(self, val_map: float | None, scores: Sequence[Score]) -> float:
        """What is maximized, percent, of a trial that ran to its end; UserError where it has no such score.

        Maps of a single round are scored beside those of related images, which come last and count. `val_map` is the
        classifier's mean average precision on val images, percent.
        """
        values = [score.miou for score in scores if score.what == self.what and self.crf in (None, score.crf)]
        value = val_map if self.what is None else values[-1] if values else None
        if value is None or math.isnan(value):
            raise UserError(f"no figure of: {self.about}", "one", "see the trial's report")
        return value


OBJECTIVES: Mapping[str, Objective] = {
    "val_map": Objective("mAP % of the classifier, val", "train_classifier"),
    **{
        variant.objective: Objective(f"mIoU % of {variant.title}", output.until, what, variant.crf)
        for what, output in SCORED_OUTPUTS.items()
        for variant in output.variants
    },
}


@dataclass(frozen=True, kw_only=True)
class Search(Sweep):
    """A search before it runs; its trials are the runs NAME-t000, NAME-t001 ...

    Attributes:
        axes: Optuna's distributions by dotted key (`parse_axes`).
        objective: one of OBJECTIVES.
        trials: how many end, at most, those of earlier calls included.
        minutes: after which no trial goes on; None = without end.
        halving: of the trials that reach validation 1, 3, 9, ... (for 3) one in so many goes on; 0 = all.
        images: fingerprint of the images and their tags, of which all its trials are.
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
        """What is maximized."""
        return OBJECTIVES[self.objective]

    @property
    def default(self) -> Values:
        """The values of the axes that the configuration itself has."""
        values = dict(leaves(self.resolved.config))
        return {key: values[key] for key in self.axes}

    def about(self) -> Values:
        """What it is, in plain values, for its file."""
        config, axes = self.resolved.config, {key: repr(axis) for key, axis in self.axes.items()}
        of_all = {"sources": config.sources, "recipe": config.recipe, "changed": self.resolved.changed()}
        return {**of_all, "objective": self.goal.about, "axes": axes, "halving": self.halving}

    def identity(self) -> str:
        """Fingerprint of what may not change when the search goes on."""
        return fingerprint(self.name, self.about(), self.images)

    def trial_name(self, number: int) -> str:
        """The name of a trial's run."""
        return f"{self.name}-t{number:03d}"

    def trial(self, number: int, values: Values) -> Trial:
        """A trial with these values of the axes."""
        changed = trial_values(self.resolved, values)
        with contextlib.suppress(UserError):  # of values that contradict each other, which the trial says
            changed = configured(self.resolved, values).changed()  # paths are this process's
        varied = {short: values[key] for key, short in short_names(list(self.axes)).items()}
        return Trial(self.trial_name(number), self.resolved.config.sources, changed, self.goal.until, varied)


def check_search(search: Search) -> None:
    """Finds what cannot be searched, before the first trial.

    Raises:
        UserError: an unknown objective, or one that the data have no score of, or of the images that are reported; keys
            or ends of an axis that the configuration does not take; what would end every trial.
    """
    if search.objective not in OBJECTIVES:
        raise UserError(f"--objective {search.objective}", f"one of {', '.join(OBJECTIVES)}", "choose one of them")
    config = search.resolved.config
    told = sorted(key for key in search.axes if search.resolved.origins.get(key) == "--set")
    if told:
        raise UserError(f"{' and '.join(told)} by --set and by --axis", "one of the two", "leave it out of --set")
    shared = sorted(key for key in search.axes if key.startswith(_NAMES_DATA))
    if shared:
        raise UserError(f"--axis {' and '.join(shared)}", "keys that trials may differ in", "run several searches")
    for key, axis in search.axes.items():
        for value in _examples(axis):
            configured(search.resolved, {key: value})
    _check_objective(search)
    pipeline.check(config, search.workspace, search.name, until=search.goal.until)


def _check_objective(search: Search) -> None:
    """Finds why trials would have no figure of the objective, or one that may not choose."""
    config, goal = search.resolved.config, search.goal
    another = "choose another objective"
    if goal.what == "segmentation" and config.predict.split != "train":
        raise UserError(
            f"--objective {search.objective} with predict.split={config.predict.split}: what is chosen by the images "
            "whose score is reported makes that score too high",
            "an objective of other images: val_map, maps or masks; or the segmentation of the split train",
            f"{another}, or --set predict.split=train",
        )
    if goal.crf and not config.predict.crf.iterations:
        raise UserError("--objective segmentation-crf with predict.crf.iterations=0", "at least 1", another)
    if config.supervision == "full" and goal.until != "evaluate":
        found = f"--objective {search.objective} with supervision=full, which trains no classifier"
        raise UserError(found, "supervision=tags, or the objective segmentation", another)
    images = listing(config).table.select(["split", "mask_uri", "tags"])
    masks = rows_in_split(images, "train", tagged=True)["mask_uri"]
    if goal.what is not None and masks.null_count == len(masks):
        raise UserError(
            "no training image has a ground-truth mask",
            "masks of some training images, for the objective",
            "name their folder, or search by --objective val_map",
        )
    untaught = not config.classifier.val_every or config.weights.classifier is not None
    if goal.what is None and (untaught or not len(rows_in_split(images, "val", tagged=True))):
        raise UserError(
            "--objective val_map without a classifier that is trained and validated on tagged images of the split val",
            "val images with tags, classifier.val_every of at least 1, and no weights.classifier",
            another,
        )
