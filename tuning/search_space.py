"""What a search tries and what it maximizes, however its values are drawn: configurations over axes, and a score."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.runtime import check_cpus, ray_session
from mcis.platform.outputs.read_index import of_split
from mcis.platform.runs.bookkeeping import recorded
from mcis.platform.runs.files import fingerprint, write_text
from mcis.platform.runs.listing import listing
from mcis.platform.runs.scores import Score
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder, Workspace
from mcis.tuning.axes import ends
from mcis.tuning.cases import trial_values
from mcis.tuning.trials import Common, Trial, miou_of, short_names

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
        """What is maximized, percent, of a trial that ran to its end.

        Args:
            val_map: the classifier's mean average precision on val images, percent, or None.

        Raises:
            UserError: the trial has no such score.
        """
        value = val_map if self.what is None else miou_of(scores, self.what, crf=self.crf)
        if value is None or value != value:
            raise UserError(f"no figure of: {self.about}", "one", "see the trial's report")
        return float(value)


OBJECTIVES: Mapping[str, Objective] = {
    "val_map": Objective("mAP % of the classifier, val", "train_classifier"),
    "maps": Objective("mIoU % of the localization maps", "localize", "localization_maps"),
    "masks": Objective("mIoU % of the pseudo masks", "pseudo_masks", "pseudo_masks"),
    "segmentation": Objective("mIoU % of the segmentation", "evaluate", "segmentation", False),
    "segmentation-crf": Objective("mIoU % of the segmentation after the CRF", "evaluate", "segmentation", True),
}
_NAMES_DATA = ("setting", "recipe", "data.")
"""Keys of what trials of one search have in common begin so."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search tries and what it maximizes.

    Attributes:
        name: of its run; the names of its trials begin with it.
        resolved: the configuration that all trials share.
        axes: Optuna's distributions by dotted key (`axes.parse_axes`).
        objective: one of OBJECTIVES.
        parallel: trials at a time.
    """

    name: str
    resolved: Resolved
    workspace: Workspace
    axes: "Mapping[str, BaseDistribution]"
    objective: str = "maps"
    parallel: int = 1
    verbose: bool = False

    @property
    def folder(self) -> RunFolder:
        """Of its run."""
        return self.workspace.run(self.name)

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
        return {
            "setting": self.resolved.config.setting,
            "recipe": self.resolved.config.recipe,
            "changed": self.resolved.changed(),
            "objective": self.goal.about,
            "axes": {key: repr(axis) for key, axis in self.axes.items()},
        }

    def identity_with(self, *how: object) -> str:
        """Fingerprint of what is searched, and how."""
        axes = {key: repr(axis) for key, axis in self.axes.items()}
        config = self.resolved.config
        return fingerprint(
            self.name, axes, self.objective, *how, self.resolved.changed(), config.recipe, config.setting
        )

    def common(self, parent: str) -> Common:
        """What its trials share, `parent` being its MLflow run."""
        recipe, workspace = self.resolved.config.recipe, str(self.workspace.root)
        return Common(recipe=recipe, workspace=workspace, study=self.name, parent=parent)

    def trial(self, name: str, values: Values, varied: Values | None = None) -> Trial:
        """One of its trials.

        Args:
            values: what its configuration changes, by dotted key; those of the axes among them.
            varied: what tells it from the others beside the values of the axes, by short names.
        """
        config, changed = self.resolved.config, trial_values(self.resolved, values)
        with contextlib.suppress(UserError):  # of values that contradict each other, which the trial says
            changed = resolve(config.setting, config.recipe, changed).changed()  # paths are this process's
        of_axes = {short: values[key] for key, short in short_names(list(self.axes)).items()}
        return Trial(name, config.setting, changed, self.goal.until, {**(varied or {}), **of_axes})


def check_space(space: SearchSpace) -> None:
    """Finds what cannot be searched, before the first trial.

    Raises:
        UserError: an unknown objective, or one that the data have no score of, or of the images that are reported; keys
            or ends of an axis that the configuration does not take; what would end every trial.
    """
    if space.objective not in OBJECTIVES:
        raise UserError(f"--objective {space.objective}", f"one of {', '.join(OBJECTIVES)}", "choose one of them")
    config, goal = space.resolved.config, space.goal
    if goal.what == "segmentation" and config.predict.split != "train":
        raise UserError(
            f"--objective {space.objective} with predict.split={config.predict.split}: what is chosen by the images "
            "whose score is reported makes that score too high",
            "an objective of other images: val_map, maps or masks; or the segmentation of the split train",
            "choose another objective, or --set predict.split=train",
        )
    told = sorted(key for key in space.axes if space.resolved.origins.get(key) == "--set")
    if told:
        raise UserError(f"{' and '.join(told)} by --set and by --axis", "one of the two", "leave it out of --set")
    shared = sorted(key for key in space.axes if key.startswith(_NAMES_DATA))
    if shared:
        raise UserError(
            f"--axis {' and '.join(shared)}", "keys that trials of the same data may differ in", "run several searches"
        )
    for key, axis in space.axes.items():
        for value in ends(axis):
            resolve(config.setting, config.recipe, trial_values(space.resolved, {key: value}))
    if config.supervision == "full" and goal.until != "evaluate":
        raise UserError(
            f"--objective {space.objective} with supervision=full, which trains no classifier",
            "supervision=tags, or the objective segmentation",
            "choose another objective",
        )
    images = listing(config).table
    if goal.what is not None:
        check_masks(images, "for the objective", "search by --objective val_map")
    untaught = not config.classifier.val_every or config.weights.classifier is not None
    if goal.what is None and (untaught or not len(of_split(images.select(["split", "tags"]), "val", tagged=True))):
        raise UserError(
            "--objective val_map without a classifier that is trained and validated on tagged images of the split val",
            "val images with tags, classifier.val_every of at least 1, and no weights.classifier",
            "choose another objective",
        )
    pipeline.check(config, space.workspace, space.name, until=goal.until)


def check_masks(images: pa.Table, why: str, otherwise: str) -> None:
    """Raises UserError where no tagged training image has a ground-truth mask, of which maps and masks are scored.

    Args:
        images: a listing.
        why: they are needed.
        otherwise: what can be done without them.
    """
    train = of_split(images.select(["split", "mask_uri", "tags"]), "train", tagged=True)["mask_uri"]
    if train.null_count == len(train):
        raise UserError(
            "no training image has a ground-truth mask",
            f"masks of some training images, {why}",
            f"name their folder, or {otherwise}",
        )


@contextlib.contextmanager
def running(space: SearchSpace, *, kind: str, identity: str) -> Iterator[Tracker]:
    """Holds the search's name, connects Ray, and begins the MLflow run that the trials' runs become children of.

    Args:
        kind: of the search, in a tag.
        identity: of the search; another one has another MLflow run.

    Raises:
        UserError: another process holds the name.
    """
    config = space.resolved.config
    with (
        recorded(space.workspace, space.name, whole=True, kind="study"),
        ray_session(config.compute, shared=space.parallel > 1, verbose=space.verbose),
    ):
        if space.parallel > 1:
            check_cpus(config.compute, config.compute.workers, space.parallel)
        tracker = Tracker(space.workspace, space.name, identity=identity)
        with tracker.running():
            tracker.tags({"setting": config.setting, "recipe": config.recipe, "study": space.name, "study.kind": kind})
            tracker.parameters({key: value for key, value in leaves(config) if key not in space.axes})
            write_text(space.folder.config, experiment_text(config, space.resolved.origins))
            yield tracker


def write_best(space: SearchSpace, values: Values) -> None:
    """Writes the configuration with the best values, by dotted key, which `mcis run --config` takes."""
    config = space.resolved.config
    best = resolve(config.setting, config.recipe, trial_values(space.resolved, values))
    own = {key: f"search {space.name}" for key in values}
    write_text(space.folder.best, experiment_text(best.config, space.resolved.origins | own))
