"""The upper bound of a run: another run of the workspace that trained the same network on the ground truth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import read_experiment
from mcis.platform.outputs.counts import read_counts
from mcis.platform.reporting.losses import Bound
from mcis.platform.runs.files import read_json
from mcis.platform.runs.scores import SCORES, Score, read_scores
from mcis.platform.runs.workspace import RunFolder, Workspace


def upper_bound(workspace: Workspace, name: str, scores: Sequence[Score]) -> tuple[Bound | None, list[str]]:
    """The bound of a run, where the workspace has one, and notes on runs that may be one but cannot be read.

    Its network and inference are configured as the run's but for where the backbone begins, as there is no classifier
    to take it from; it is scored on the same images and the same truth. Of several, one of the same seed is taken, and
    then the first by name.

    Args:
        name: of the run.
        scores: of the run.
    """
    own = [score for score in scores if score.what == "segmentation"]
    if not own or own[0].trained_on is not None:
        return None, []
    wanted = _network(workspace.run(name, create=False))
    bounds, notes = [], []
    for path in workspace.in_runs():
        folder = RunFolder(path)
        try:
            if not _is_full(folder) or _network(folder) != wanted:
                continue
            output = workspace.outputs(path.name)["evaluate"]
            found = [score for score in read_scores(output / SCORES) if score.what == "segmentation"]
            if _same_images(output, found[0], workspace.outputs(name)["evaluate"], own[0]):
                bounds.append(Bound(path.name, found))
        except UserError as error:
            notes.append(f"run {path.name} may be an upper bound but is left out: {error}")
    bounds.sort(key=lambda bound: bound.scores[0].seed != own[0].seed)
    return (bounds[0] if bounds else None), notes


def _is_full(folder: RunFolder) -> bool:
    """Whether a run was scored with a network trained on ground truth; of no other one the files are looked at."""
    scores = read_json(folder.scores).get("scores", []) if folder.scores.exists() else []
    return any(score.get("trained_on") for score in scores)


def _network(folder: RunFolder) -> Mapping[str, Any]:
    values = read_experiment(folder.config).values
    parts = {key: value for key, value in values.items() if key.startswith(("segmenter.", "predict."))}
    return {key: value for key, value in parts.items() if value is not None and key != "segmenter.init"}


def _same_images(output: Path, score: Score, own_output: Path, own: Score) -> bool:
    counts, own_counts = read_counts(output, score), read_counts(own_output, own)
    return (
        list(score.iou) == list(own.iou)
        and counts.image_ids == own_counts.image_ids
        and np.array_equal(counts.truth_crc, own_counts.truth_crc)
    )
