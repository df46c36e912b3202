"""mIoU of pseudo masks by the mask rules `segments` and `detections`, next to the rule of the run, on the same maps.

With --workspace and --runs, the maps are those of these runs, one per seed; their stages are not computed again.
Otherwise the synthetic scenes of `mcis demo` are localized first. Segments are superpixels. Detections are the regions
of the ground truth with a random score, damaged: a third is missing, a third has the class of another, and borders are
dilated by 2 % of the image's diagonal. They are used with tags and without, alone and fused with the maps.
"""

import argparse
import json
import statistics
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_masks
from scipy import ndimage

from mcis.datasets.formats.regions import Region, connected_regions
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.synthetic import devkit
from mcis.models.counts import boundary_width
from mcis.platform import api
from mcis.platform.commands.run import DEMO_SETTINGS
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.outputs.read_index import OpenedIndex, open_index, rows_in_split
from mcis.platform.runs.workspace import Workspace

DRAWN_SETTINGS = tuple(f"{key}={value}" for key, value in DEMO_SETTINGS.items())
"""Settings for the small scenes, those of `mcis demo`."""
MIN_AREA = 16
"""Smallest region of the ground truth that is a detection, pixels."""
CONTROL = "the run's rule"
TARGETS = {
    "superpixels, relative to the run's rule": 0.9,
    "detections with tags, relative to detections without": 1.0,
    "detections with tags fused with maps, relative to maps": 1.0,
}
"""Minimum ratios of mIoU."""


class MaskScore(NamedTuple):
    """Scores of the masks of a run, percent."""

    miou: float
    boundary_miou: float


class Runs:
    """Runs in one workspace that differ in their masks only.

    Args:
        workspace: The workspace.
        base: The run whose maps are used.
        seed: Seed of the damage to detections.
        overrides: Values that are set in all runs.
    """

    def __init__(self, workspace: Path, base: str, seed: int, overrides: list[str]):
        self.workspace = workspace
        self.base = base
        self.overrides = overrides
        self.experiment = workspace / "runs" / base / "config.toml"
        config = resolve(file=self.experiment, overrides=overrides).config
        self.random_walk = f"random_walk={json.dumps(config.uses_random_walk)}"
        self.detections = workspace / f"detections-{base}.json"
        content = damaged_detections(open_index(Workspace(workspace), base), seed)
        self.detections.write_text(json.dumps(content))

    def score(self, name: str, *values: str) -> MaskScore:
        """Makes the masks of the run `<base>-<name>` and returns their scores."""
        overrides = [*self.overrides, *values]
        run = f"{self.base}-{name}"
        result = api.run(
            config=self.experiment, name=run, overrides=overrides, workspace=self.workspace, until="pseudo_masks"
        )
        (score,) = (score for score in result.scores if score.output == "pseudo_masks")
        return MaskScore(score.miou, score.boundary_miou or 0.0)

    def segments(self, superpixels: int, *values: str) -> MaskScore:
        """Scores masks with one class in each superpixel."""
        name = "-".join(["segments", str(superpixels), *values]).replace("=", "")
        section = "pseudo_masks.segments"
        settings = (f"{section}.superpixels={superpixels}", f"{section}.{self.random_walk}")
        return self.score(name, "pseudo_masks.rule=segments", *settings, *values)

    def fused(self, weight: float, *, tagged_only: bool) -> MaskScore:
        """Scores masks of the damaged detections.

        Args:
            weight: Weight of the detections; 1 = alone.
            tagged_only: Whether tags are used.
        """
        section = "pseudo_masks.detections"
        settings = (
            f"{section}.file={self.detections}",
            f"{section}.weight={weight}",
            f"{section}.tagged_only={json.dumps(tagged_only)}",
            f"{section}.{self.random_walk}",
        )
        name = f"detections-{weight:g}{'' if tagged_only else '-untagged'}"
        return self.score(name, "pseudo_masks.rule=detections", *settings)

    def all_scores(self, options: argparse.Namespace) -> dict[str, MaskScore]:
        """Scores all variants."""
        measured = {CONTROL: self.score("control")}
        for superpixels in options.superpixels:
            measured[f"{superpixels} superpixels"] = self.segments(superpixels)
            no_crf = self.segments(superpixels, "pseudo_masks.crf.iterations=0")
            measured[f"{superpixels} superpixels, no CRF"] = no_crf
        for weight, way in ((1.0, "alone"), (options.weight, "fused")):
            measured[f"detections {way}"] = self.fused(weight, tagged_only=True)
            measured[f"detections {way}, no tags"] = self.fused(weight, tagged_only=False)
        return measured


def damaged_detections(opened: OpenedIndex, seed: int) -> list[dict[str, Any]]:
    """Makes detections of the tagged training images from their ground truth, and damages them.

    Args:
        opened: Index of the run.
        seed: Seed of the damage.
    """
    detections = []
    for row in rows_in_split(opened.index, "train", tagged=True).to_pylist():
        if not row["mask_uri"]:
            continue
        rng = np.random.default_rng([seed, zlib.crc32(row["image_id"].encode())])
        truth = decode_mask(Path(row["mask_uri"]).read_bytes())
        for region in connected_regions(truth, MIN_AREA):
            damage = rng.integers(3)
            if damage == 0:
                continue
            name = opened.classes[region.label - 1]
            if damage == 1:
                name = str(rng.choice([other for other in opened.classes if other != name]))
            score = rng.uniform(0.5, 1)
            item = {"image_id": row["image_id"], "category_name": name, "score": score}
            detections.append(item | {"segmentation": run_lengths(dilated(whole_mask(region, truth)))})
    return detections


def whole_mask(region: Region, labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns the pixels of a region of a label mask, (H, W)."""
    whole = np.zeros(labels.shape, bool)
    height, width = region.pixels.shape
    whole[region.top : region.top + height, region.left : region.left + width] = region.pixels
    return whole


def dilated(region: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns a region that is larger by 2 % of the image's diagonal on all sides."""
    side = 2 * boundary_width(*region.shape) + 1
    return np.asarray(ndimage.maximum_filter(region, side), bool)


def run_lengths(region: NDArray[np.bool_]) -> dict[str, Any]:
    """Returns a region in COCO's compressed run lengths."""
    encoded = coco_masks.encode(np.asfortranarray(region, np.uint8))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def localize_scenes(options: argparse.Namespace, workspace: Path) -> list[str]:
    """Localizes synthetic scenes with each seed; returns the names of the runs."""
    root = workspace / "VOC2012"
    devkit.draw(root, train=options.images)
    names = []
    for seed in range(options.seeds):
        names.append(f"scenes-s{seed}")
        overrides = [f"data.classes={root / 'classes.txt'}", f"seed={seed}", *DRAWN_SETTINGS, *options.overrides]
        api.run(
            "voc", name=names[-1], overrides=overrides, recipe="photos", workspace=workspace, until="localize", voc=root
        )
    return names


def describe(measured: list[MaskScore]) -> str:
    """Returns means and standard deviations over seeds of mIoU and boundary mIoU."""
    return "".join(harness.mean_text(values, 8) for values in zip(*measured, strict=True))


def measure(options: argparse.Namespace, workspace: Path) -> None:
    """Scores all variants with the maps of each run, and prints the table and the ratios."""
    names = options.runs or localize_scenes(options, workspace)
    seed_scores: list[dict[str, MaskScore]] = []
    for seed, name in enumerate(names):
        runs = Runs(workspace, name, seed, options.overrides)
        seed_scores.append(runs.all_scores(options))
        mious = {variant: score.miou for variant, score in seed_scores[-1].items()}
        print(f"{name}: {mious}", flush=True)

    print(harness.describe_machine())
    print(f"{'masks':32}    mIoU          boundary mIoU")
    means = {}
    for variant in seed_scores[0]:
        measured = [scores[variant] for scores in seed_scores]
        means[variant] = statistics.mean(score.miou for score in measured)
        print(f"{variant:32}{describe(measured)}")

    most = max(options.superpixels)
    ratios = (
        means[f"{most} superpixels"] / means[CONTROL],
        means["detections fused"] / means["detections fused, no tags"],
        means["detections fused"] / means[CONTROL],
    )
    for ratio, (subject, target) in zip(ratios, TARGETS.items(), strict=True):
        print(f"ratio {ratio:.3f} target {target:g}: mIoU of pseudo masks by {subject}")


def main() -> None:
    """Measures in a given workspace, or in a temporary one."""
    parser = harness.option_parser(__doc__, images=480, seeds=1)
    parser.add_argument("--workspace", type=Path, help="folder that keeps the runs [a temporary one]")
    parser.add_argument(
        "--runs", nargs="+", default=[], help="runs of the workspace with maps, one per seed [synthetic scenes]"
    )
    parser.add_argument("--superpixels", type=int, nargs="+", default=[100, 300], help="numbers of superpixels")
    parser.add_argument("--weight", type=float, default=0.5, help="weight of fused detections")
    harness.add_overrides(parser)
    options = parser.parse_args()
    if options.runs and not options.workspace:
        parser.error("--runs needs --workspace")
    with harness.working_folder(options.workspace) as workspace, ray_session(ComputeConfig()):
        measure(options, workspace)


if __name__ == "__main__":
    main()
