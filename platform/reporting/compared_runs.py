"""What is compared: runs of one or several workspaces, by themselves or as the seeds of one configuration."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.index import shown
from mcis.datasets.storage.folders import path_exists
from mcis.platform.config.experiment import read_experiment
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.scores import SCORES, Score, read_scores
from mcis.platform.runs.workspace import RunFolder, Workspace

_OF_A_SEED = ("seed", "compute.", "tracking.")
"""Beginnings of the keys in which the runs of a case may differ: all but `seed` change no result but for rounding."""


class Run(NamedTuple):
    """A run that came to its scores.

    Attributes:
        name: its name; where two runs have one, with the workspace.
        folder: its files.
        outputs: the folder of each stage's output.
        scores: by what is scored, and for segmentation also which of them.
        configuration: by dotted key, each value as text.
    """

    name: str
    workspace: Workspace
    folder: RunFolder
    outputs: Mapping[str, Path]
    scores: Mapping[str, Score]
    configuration: Mapping[str, str]

    @property
    def seed(self) -> str:
        return self.configuration.get("seed", "none")


class Case(NamedTuple):
    """A configuration that is compared, by its name: one run, or several of different seeds, ordered by these."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[str]:
        return [run.seed for run in self.runs]

    def scores(self, key: str) -> list[Score]:
        """The score of each of its runs; none where they did not come to it."""
        return [run.scores[key] for run in self.runs if key in run.scores]


def open_cases(root: Path, arguments: Sequence[str]) -> list[Case]:
    """Opens what is to be compared.

    Args:
        root: the workspace of runs that are given by their names.
        arguments: at least two; each the name of a run or the path of a run's folder in any workspace, or several of
            them joined by commas, which are the seeds of one configuration.

    Raises:
        UserError: fewer than two; a run is absent, is given twice, has no scores or other classes than the first; or
            the runs of a case differ by more than their seed.
    """
    if len(arguments) < 2:
        raise UserError(f"{len(arguments)} run to compare", "at least two", "name another: `mcis compare FIRST SECOND`")
    texts = [[text.strip() for text in argument.split(",")] for argument in arguments]
    folders = [[_folder(root, text) for text in of_case] for of_case in texts]
    flat = [folder for of_case in folders for folder in of_case]
    if twice := [folder.path.name for i, folder in enumerate(flat) if folder in flat[:i]]:
        raise UserError(f"run {twice[0]!r} is given twice", "runs apart", "leave it out once")
    names = [folder.path.name for folder in flat]
    opened = [[_opened(folder, names.count(folder.path.name) > 1) for folder in of_case] for of_case in folders]
    _check_classes([run for of_case in opened for run in of_case])
    return [_case(runs) for runs in opened]


def differing_keys(cases: Sequence[Case]) -> dict[str, list[str]]:
    """The keys whose values differ between cases: of each case the value as text, `-` where it has none."""
    keys, rows = dict.fromkeys(key for case in cases for run in case.runs for key in run.configuration), {}
    for key in keys:
        of_cases = [[run.configuration[key] for run in case.runs if key in run.configuration] for case in cases]
        values = [merged(of_case) or "-" for of_case in of_cases]
        if len(set(values)) > 1:
            rows[key] = values
    return rows


def merged(texts: Iterable[str]) -> str:
    """Texts behind one another, each once."""
    return ", ".join(dict.fromkeys(texts))


def _folder(root: Path, text: str) -> RunFolder:
    """The folder of a run, which exists."""
    if "/" in text:
        folder = Path(os.path.expanduser(text)).resolve()
        if folder.parent.name != "runs" or not folder.is_dir():
            raise UserError(
                f"{text} is no folder of a run",
                "the name of a run, or its folder WORKSPACE/runs/NAME",
                "correct the path, or name a run of the workspace",
            )
        return RunFolder(folder)
    workspace = Workspace(root, create=False)
    run = workspace.run(text, create=False)
    if not run.path.is_dir():
        raise UserError(
            f"no run {text!r} in {workspace.root}",
            "the name of a run, the path of its folder, or several of them joined by commas",
            f"run it, or name another; there are {shown([path.name for path in workspace.run_folders()]) or 'none'}",
        )
    return run


def _opened(folder: RunFolder, is_shared: bool) -> Run:
    """Reads a run; `is_shared` says whether another one has its name."""
    workspace, name = Workspace(folder.path.parent.parent, create=False), folder.path.name
    outputs = workspace.outputs(name)
    if not outputs and folder.study.exists():
        raise UserError(f"{name!r} is a study", "a run", f"compare its trials, whose names begin with {name}-")
    if "evaluate" not in outputs or not path_exists(outputs["evaluate"] / SCORES):
        raise UserError(
            f"run {name!r} has no scores in {workspace.root}; it has come to {shown(list(outputs)[-1:]) or 'no stage'}",
            "a run that came to the stage evaluate",
            "repeat its command, which goes on from there",
        )
    scores: dict[str, Score] = {}
    for score in read_scores(outputs):
        if score.what != "baseline":
            # Maps with related images come behind those of a single round, which are the run's where it has no others.
            scores[f"{score.title}, {score.name}" if score.what == "segmentation" else score.title] = score
    title = f"{name} in {workspace.root}" if is_shared else name
    experiment = read_experiment(folder.config)
    values = experiment.names | experiment.values
    configuration = {key: str(value) for key, value in values.items() if value is not None}
    return Run(title, workspace, folder, outputs, scores, configuration)


def _check_classes(runs: Sequence[Run]) -> None:
    scored = [(run.name, list(score.iou)) for run in runs for score in list(run.scores.values())[:1]]
    for name, labels in scored[1:]:
        first, of_first = scored[0]
        if labels != of_first:
            raise UserError(
                f"run {first!r} has the classes {', '.join(of_first[1:])}, run {name!r} {', '.join(labels[1:])}",
                "runs of the same classes in the same order",
                "compare runs of one data set",
            )


def _case(runs: Sequence[Run]) -> Case:
    """The case of some runs; UserError where they differ in another key than their seed, or not in that."""
    if len(runs) == 1:
        return Case(runs[0].name, tuple(runs))
    names = ", ".join(run.name for run in runs)
    remedy = "name runs of one configuration and several seeds with commas, and others apart"
    differing = differing_keys([Case(run.name, (run,)) for run in runs])
    other = [key for key in differing if not key.startswith(_OF_A_SEED)]
    if other:
        raise UserError(f"{names} differ in {shown(other)}", "runs of one case that differ in their seed alone", remedy)
    if len({run.seed for run in runs}) < len(runs):
        seeds = ", ".join(f"{run.name!r} has seed {run.seed}" for run in runs)
        raise UserError(f"runs of one seed in one case: {seeds}", "another seed for each run of a case", remedy)
    if len({read_result(run.outputs["index"], IndexResult).identity for run in runs}) > 1:
        raise UserError(f"{names} are of other images or tags", "runs that differ in their seed alone", remedy)
    ordered = sorted(runs, key=lambda run: (len(run.seed), run.seed))
    stem, seeds = ordered[0].name.removesuffix(ordered[0].seed), ",".join(run.seed for run in ordered)
    alike = all(run.name == stem + run.seed for run in ordered)
    return Case(f"{stem}{{{seeds}}}" if alike else names, tuple(ordered))
