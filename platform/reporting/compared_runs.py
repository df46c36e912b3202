"""Opens the runs to compare, from one or several workspaces: single runs, and groups of runs with different seeds."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.storage.folders import path_exists
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.scores import SCORED_OUTPUTS, SCORES, Score, read_scores
from mcis.platform.runs.workspace import RunFolder, Workspace

_IMPORTED_OUTPUTS = {"localize": "localize.maps", "pseudo_masks": "pseudo_masks.masks", "predict": "predict.masks"}
"""Keys of folders that another program wrote, by the stage that reads them. Each of its trainings, with a seed of its
own, has other folders."""
STAGES_OF_SECTION = {
    "recipe": ("localize", "pseudo_masks", "predict"),
    "weights": ("localize", "train_affinity", "predict"),
    "classifier": ("localize",),
    "localize": ("localize",),
    "maps": ("localize",),
    "affinity_net": ("train_affinity",),
    "pseudo_masks": ("pseudo_masks",),
    "segmenter": ("predict",),
    "predict": ("predict",),
}
"""Stages whose outputs, or the scores of these, depend on a section of the configuration. Sections that are not listed
apply to every run."""
_MAY_DIFFER = ("seed", "compute.", "tracking.")
"""Prefixes of other keys in which the runs of a group may differ. `compute` changes results only by rounding."""


class Run(NamedTuple):
    """A run with scores.

    Attributes:
        name: Its name, followed by the workspace if two of the compared runs have the same name.
        workspace: Its workspace.
        folder: Its files.
        outputs: Folders of the outputs of its stages, by stage.
        scores: Its scores by `Variant.title`.
        configuration: Values as text, by dotted key.
    """

    name: str
    workspace: Workspace
    folder: RunFolder
    outputs: Mapping[str, Path]
    scores: Mapping[str, Score]
    configuration: Mapping[str, str]

    @property
    def seed(self) -> str:
        """The seed as text."""
        return self.configuration.get("seed", "none")

    def applies(self, key: str) -> bool:
        """Whether a key has an effect in this run: not if it is for outputs that the run lacks or that are imported.

        The folders of imported outputs always apply, so that a comparison states where outputs come from.
        """
        if key in _IMPORTED_OUTPUTS.values():
            return True
        if key == "localize.maps_format":
            return "localize.maps" in self.configuration
        stages = STAGES_OF_SECTION.get(key.partition(".")[0])
        return stages is None or any(self._computes(stage) for stage in stages)

    def _computes(self, stage: str) -> bool:
        """Whether the run has an output of a stage that is not of another program."""
        return stage in self.outputs and _IMPORTED_OUTPUTS.get(stage) not in self.configuration

    def scored_output(self, title: str) -> str:
        """Name of the folder of the output with this score, which is that of the run if the output is missing."""
        stage = SCORED_OUTPUTS[self.scores[title].output].stage
        return self.outputs.get(str(stage), self.folder.path).name


class RunGroup(NamedTuple):
    """One run, or several runs that differ only in their seed and in the folders of another program, sorted by seed.

    Attributes:
        label: Name of the group in tables.
        runs: At least one.
    """

    label: str
    runs: tuple[Run, ...]

    def titles(self) -> list[str]:
        """The `Variant.title` of each score that any of the runs has."""
        titles: dict[str, None] = {}
        for run in self.runs:
            titles |= dict.fromkeys(run.scores)
        return list(titles)

    def runs_by_output(self, title: str) -> list[list[Run]]:
        """The runs that have the score with this `Variant.title`, a list for each different output that is scored."""
        runs: dict[str, list[Run]] = {}
        for run in self.runs:
            if title in run.scores:
                runs.setdefault(run.scored_output(title), []).append(run)
        return list(runs.values())

    def trainings(self, title: str) -> list[Run]:
        """The runs that have this score; of several runs that share one output, only the first."""
        return [runs[0] for runs in self.runs_by_output(title)]

    def seeds(self, title: str) -> list[str]:
        """The seed of each training."""
        return [run.seed for run in self.trainings(title)]

    def scores(self, title: str) -> list[Score]:
        """The score of each training."""
        return [run.scores[title] for run in self.trainings(title)]


def open_run_groups(root: Path, arguments: Sequence[str], *, min_groups: int = 2) -> list[RunGroup]:
    """Opens the runs to compare.

    Args:
        root: The workspace of runs that are given by name.
        arguments: Each is the name of a run or the path of a run's folder in any workspace, or several of these,
            separated by commas, for runs that differ only in their seed.
        min_groups: Minimum number of groups, one for each argument.

    Raises:
        UserError: There are too few arguments; a run is missing, is given twice, has no scores, or has other
            classes than the first run; or the runs of a group differ in more than their seed.
    """
    if len(arguments) < min_groups:
        raise UserError(
            f"{len(arguments)} run to compare", "at least two runs", "name another: `mcis compare FIRST SECOND`"
        )

    folder_groups = []
    for argument in arguments:
        folder_groups.append([_find_run(root, text.strip()) for text in argument.split(",")])
    _check_given_once(folder_groups)

    names = [folder.path.name for folder in itertools.chain.from_iterable(folder_groups)]
    run_groups = []
    for folders in folder_groups:
        run_groups.append([_open_run(folder, names.count(folder.path.name) > 1) for folder in folders])
    _check_classes(list(itertools.chain.from_iterable(run_groups)))
    return [_make_group(runs) for runs in run_groups]


def differing_keys(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Keys whose values differ between groups, with the value in each group as text; `-` if it has none."""
    keys: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            keys |= dict.fromkeys(run.configuration)

    differing = {}
    for key in keys:
        values = []
        for group in groups:
            group_values = [run.configuration[key] for run in group.runs if key in run.configuration]
            values.append(joined_once(group_values) or "-")
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def differing_settings(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """`differing_keys` that differ between groups to which they apply, with `-` for the other groups."""
    settings = {}
    for key, values in differing_keys(groups).items():
        shown = []
        applied = set()
        for group, value in zip(groups, values, strict=True):
            is_applied = group.runs[0].applies(key)
            shown.append(value if is_applied else "-")
            if is_applied:
                applied.add(value)
        if len(applied) > 1:
            settings[key] = shown
    return settings


def joined_once(texts: Iterable[str]) -> str:
    """Joins different texts by commas."""
    return ", ".join(dict.fromkeys(texts))


def _find_run(root: Path, text: str) -> RunFolder:
    """Returns the existing folder of a run that is given by its name or path."""
    if "/" in text:
        folder = Path(os.path.expanduser(text)).resolve()
        if folder.parent.name != "runs" or not folder.is_dir():
            raise UserError(
                f"{text} is not the folder of a run",
                "the name of a run, or its folder WORKSPACE/runs/NAME",
                "correct the path, or name a run of the workspace",
            )
        return RunFolder(folder)

    workspace = Workspace(root, create=False)
    run = workspace.run(text, create=False)
    if not run.path.is_dir():
        raise UserError(
            f"no run {text!r} in {workspace.root}",
            "the name of a run, the path of its folder, or several of them separated by commas",
            "start such a run, or name one of: "
            f"{join_shortened([path.name for path in workspace.run_folders()]) or 'none'}",
        )
    return run


def _check_given_once(folder_groups: Sequence[Sequence[RunFolder]]) -> None:
    """Raises UserError if a run is given twice."""
    seen: list[RunFolder] = []
    for folders in folder_groups:
        for folder in folders:
            if folder in seen:
                raise UserError(f"run {folder.path.name!r} is given twice", "different runs", "name it once")
            seen.append(folder)


def _open_run(folder: RunFolder, name_is_shared: bool) -> Run:
    """Reads a run.

    Args:
        folder: The folder of the run.
        name_is_shared: Whether another of the compared runs has the same name.
    """
    workspace = Workspace(folder.path.parent.parent, create=False)
    name = folder.path.name
    outputs = workspace.outputs(name)
    if not outputs and folder.study.exists():
        raise UserError(f"{name!r} is a study", "a run", f"compare its trials, whose names begin with {name}-")
    if "evaluate" not in outputs or not path_exists(outputs["evaluate"] / SCORES):
        raise UserError(
            f"run {name!r} has no scores in {workspace.root}; it has reached "
            f"{join_shortened(list(outputs)[-1:]) or 'no stage'}",
            "a run that has finished the stage evaluate",
            "repeat its command, which continues the run",
        )

    scores: dict[str, Score] = {}
    for score in read_scores(outputs):
        if score.variant:
            scores[score.variant.title] = score  # maps with related images follow single-round maps, and replace them
    experiment = read_experiment(folder.config)
    values = experiment.names | experiment.values
    configuration = {key: str(value) for key, value in values.items() if value is not None}
    label = f"{name} in {workspace.root}" if name_is_shared else name
    return Run(label, workspace, folder, outputs, scores, configuration)


def _check_classes(runs: Sequence[Run]) -> None:
    """Raises UserError if the scored labels differ between runs."""
    scored_labels = []
    for run in runs:
        for score in list(run.scores.values())[:1]:
            scored_labels.append((run.name, list(score.iou)))

    for name, labels in scored_labels[1:]:
        first_name, first_labels = scored_labels[0]
        if labels != first_labels:
            first_classes = ", ".join(first_labels[1:])
            raise UserError(
                f"run {first_name!r} has the classes {first_classes}, run {name!r} {', '.join(labels[1:])}",
                "runs with the same classes in the same order",
                "compare runs on one data set",
            )


def _make_group(runs: Sequence[Run]) -> RunGroup:
    """Makes a group; UserError unless its runs differ in their seed, and in nothing else that changes results."""
    if len(runs) == 1:
        return RunGroup(runs[0].name, tuple(runs))

    names = ", ".join(run.name for run in runs)
    remedy = "separate seeds of one configuration by commas, and different configurations by spaces"
    differing = differing_keys([RunGroup(run.name, (run,)) for run in runs])
    other_keys = [key for key, values in differing.items() if not _may_differ(key, values)]
    if other_keys:
        found = f"{names} differ in {join_shortened(other_keys)}"
        raise UserError(found, "runs that differ only in their seed", remedy)
    if len({run.seed for run in runs}) < len(runs):
        seeds = ", ".join(f"{run.name!r} has seed {run.seed}" for run in runs)
        raise UserError(f"two runs of a group have the same seed: {seeds}", "a different seed for each run", remedy)
    if len({read_result(run.outputs["index"], IndexResult).identity for run in runs}) > 1:
        raise UserError(f"{names} have different images or tags", "runs that differ only in their seed", remedy)

    ordered = sorted(runs, key=lambda run: (len(run.seed), run.seed))
    return RunGroup(_group_label(ordered) or names, tuple(ordered))


def _may_differ(key: str, values: Sequence[str]) -> bool:
    """Whether the runs of a group may have these values of a key (`differing_keys`)."""
    if key in _IMPORTED_OUTPUTS.values():
        return "-" not in values  # otherwise, some runs are of another program and some are not
    return key.startswith(_MAY_DIFFER)


def _group_label(runs: Sequence[Run]) -> str | None:
    """Label such as `a-s{0,1}` for the runs a-s0 and a-s1; None if their names do not end in their seeds."""
    stem = runs[0].name.removesuffix(runs[0].seed)
    if any(run.name != stem + run.seed for run in runs):
        return None
    seeds = ",".join(run.seed for run in runs)
    return f"{stem}{{{seeds}}}"
