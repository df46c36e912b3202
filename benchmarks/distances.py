"""How much of the objects localization maps find, and how exactly, by the distance from their most active position.

Of training images with a true mask, at the threshold at which a run's maps are scored: of the pixels of a tagged class
the share that the maps find (recall), and of the pixels that the maps give it those that are the class's (precision),
by how far they lie from where the class's map is highest, in sides of a square of the class's area. Tags whose class
the mask lacks are left out. Unlike a study's `found` and `exact`, which class it is counts. Runs that are joined by
commas are seeds of one case, shown by their mean; the first case is the control of the others.
"""

import argparse
import itertools
from pathlib import Path

import machine
import numpy as np
import torch
from numpy.typing import NDArray

from mcis.datasets.classes import IGNORE
from mcis.datasets.tables.shards import Shards
from mcis.models.localization import score_maps
from mcis.platform.config.resolve import resolve
from mcis.platform.outputs.read_index import of_split, open_index, truth_of_row
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.scores import read_scores
from mcis.platform.runs.workspace import Workspace

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0, np.inf)


def shares(workspace: Workspace, name: str) -> NDArray[np.float64]:
    """Recall and precision of a run's maps by distance, percent, (2, len(EDGES) - 1)."""
    config = resolve(file=workspace.run(name, create=False).path / "config.toml").config
    outputs, opened = workspace.outputs(name), open_index(workspace, name)
    score = [of for of in read_scores(outputs) if of.what == "localization_maps"][-1]
    maps, counts = Shards(outputs["localize"] / "maps"), np.zeros((3, len(EDGES) - 1))
    for row in of_split(opened.index, "train", tagged=True).to_pylist():
        if row["mask_uri"] is None:
            continue
        truth, found = truth_of_row(row, len(opened.classes)), image_maps(maps, row["image_id"])
        scores = score_maps(torch.from_numpy(found.maps), found.grids, config.maps.scale, *truth.shape).numpy()
        labels = np.where(scores.max(axis=0) >= score.threshold, 1 + found.classes[scores.argmax(axis=0)], 0)
        for k, of_class in zip(found.classes, scores, strict=True):
            true, ours = truth == k + 1, (labels == k + 1) & (truth != IGNORE)
            if true.any():
                top, left = np.unravel_index(of_class.argmax(), truth.shape)
                rows, columns = np.ogrid[: truth.shape[0], : truth.shape[1]]
                away = np.hypot(rows - top, columns - left) / true.sum() ** 0.5
                counts += [np.histogram(away[of], EDGES)[0] for of in (true & ours, true, ours)]
    return 100 * counts[0] / np.maximum(counts[1:], 1)


def main() -> None:
    """Prints both figures of each case, and what they have more than the control's, by the mean over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("runs", nargs="+", help="names; commas join the seeds of a case")
    arguments = parser.parse_args()
    workspace, control = Workspace(arguments.workspace, create=False), None
    print(machine.describe())
    print("sides of the object away:", ", ".join(f"{low:g} to {high:g}" for low, high in itertools.pairwise(EDGES)))
    for case in arguments.runs:
        of_seeds = np.stack([shares(workspace, name) for name in case.split(",")])
        control = of_seeds if control is None else control
        more = of_seeds.mean(axis=0) - control.mean(axis=0)
        for number, figure in enumerate(("recall", "precision")):
            both = zip(of_seeds[:, number].mean(axis=0), more[number], strict=True)
            print(f"{case}, {figure} %:", "  ".join(f"{share:.1f} ({difference:+.1f})" for share, difference in both))


if __name__ == "__main__":
    main()
