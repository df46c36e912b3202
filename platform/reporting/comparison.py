"""Compares runs image by image: differences of mIoU, with intervals of a paired bootstrap over images and seeds."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from mcis.datasets.errors import UserError, join_shortened
from mcis.models.bootstrap import bootstrap_differences, bootstrap_score_differences, percentile_interval
from mcis.models.counts import Overlaps, overlaps
from mcis.models.metrics import LABEL_SCORES, iou_of, mean
from mcis.platform.outputs.counts import ImageCounts, read_counts
from mcis.platform.outputs.read_index import ids_with_other_tags
from mcis.platform.reporting.compared_runs import Run, RunGroup
from mcis.platform.runs.files import read_json
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.scores import CURVES, MEASURES, SCORED_OUTPUTS, Score


class BootstrapSettings(NamedTuple):
    """Settings of the bootstrap.

    Attributes:
        resamples: Number of resamples.
        seed: Seed of the resamples.
        confidence: Share of the resamples that an interval contains, in (0, 1).
    """

    resamples: int = 2000
    seed: int = 0
    confidence: float = 0.95


class Interval(NamedTuple):
    """The interval of a difference to the baseline, in percentage points; NaN for fewer than two images."""

    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`higher`, `lower`, `no difference` if the interval contains 0, or `unknown` without an interval."""
        if np.isnan(self.low) or np.isnan(self.high):
            return "unknown"
        if self.low > 0:
            return "higher"
        if self.high < 0:
            return "lower"
        return "no difference"


class Difference(NamedTuple):
    """The difference between a group of runs and the baseline in one measure of one score.

    Attributes:
        title: What is scored, a `Variant.title`.
        measure: One of `MEASURES`.
        group: Label of the compared group.
        split: The split of the images.
        images: Number of images on which both are scored.
        baseline: Value of the baseline in percent, mean over its seeds.
        compared: Value of the compared group in percent, mean over its seeds.
        low: Lower end of the interval of `compared - baseline`; NaN for fewer than two images.
        high: Upper end of the interval; NaN for fewer than two images.
    """

    title: str
    measure: str
    group: str
    split: str
    images: int
    baseline: float
    compared: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """`compared - baseline`, in percentage points."""
        return self.compared - self.baseline

    @property
    def verdict(self) -> str:
        """See `Interval.verdict`."""
        return Interval(self.low, self.high).verdict


@dataclass(frozen=True, kw_only=True)
class ComparedScore:
    """One score of the baseline and of the groups that can be compared with it.

    Attributes:
        output: The scored output, a key of `SCORED_OUTPUTS`.
        title: Its `Variant.title`.
        groups: The baseline and the groups that can be compared with it, in the order given.
        left_out: Why other groups cannot be compared, by their labels.
        differences: Differences to the baseline, by group, then by measure.
        label_score_intervals: Intervals of the differences in the means of `LABEL_SCORES`, by the label of the group
            and the name of the measure, `mean_<name of the score>`.
        image_mious: mIoU in percent by the name of a run and the id of an image; NaN if no pixel of it is scored.
    """

    output: str
    title: str
    groups: Sequence[RunGroup]
    left_out: Mapping[str, str]
    differences: Sequence[Difference]
    label_score_intervals: Mapping[tuple[str, str], Interval]
    image_mious: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Groups of runs compared with the first of them, the baseline.

    Attributes:
        groups: The groups, in the order given.
        scores: The scores of the baseline, each compared.
        other_tags: Number of images that have other tags than in the baseline, by the label of a group.
        bootstrap: Settings of the intervals.
    """

    groups: Sequence[RunGroup]
    scores: Sequence[ComparedScore]
    other_tags: Mapping[str, int]
    bootstrap: BootstrapSettings

    @property
    def differences(self) -> list[Difference]:
        """The differences in all scores."""
        return list(itertools.chain.from_iterable(score.differences for score in self.scores))

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, which all runs share."""
        score = self.groups[0].runs[0].scores[self.scores[0].title]
        return tuple(score.iou)[1:]


class _ImageOverlaps(NamedTuple):
    """The overlaps that were counted for a score of a run, for N images.

    Attributes:
        image_ids: Ids of the images.
        truth_crc: Checksums of their ground truth, (N,).
        overlaps: By measure, the overlaps of their labels, (N, K + 1).
        confusions: Their flattened confusion matrices, (N, (K + 1)^2).
    """

    image_ids: Sequence[str]
    truth_crc: NDArray[np.uint32]
    overlaps: Mapping[str, Overlaps]
    confusions: sparse.csr_array


class _GroupOverlaps(NamedTuple):
    """What was counted for a score of a group with S trainings, for N images.

    Attributes:
        group: The group.
        overlaps: By measure, the overlaps of the labels, (S, N, K + 1).
        confusions: For each training, the flattened confusion matrices of the images, (N, (K + 1)^2).
    """

    group: RunGroup
    overlaps: Mapping[str, Overlaps]
    confusions: Sequence[sparse.csr_array]


def compare(groups: Sequence[RunGroup], bootstrap: BootstrapSettings) -> Comparison:
    """Compares the scores of groups with those of the first one.

    Raises:
        UserError: The first group has no score, or none that another group has, or its runs are scored on different
            images; or two runs are scored against different ground truth for the same image.
    """
    baseline = groups[0]
    titles = list(baseline.runs[0].scores)
    if not titles:
        raise UserError(
            f"{baseline.label} has no score",
            "a baseline with scores",
            "add masks in the column mask, or name another run first",
        )
    _check_common_scores(groups)

    other_tags = {group.label: _ids_with_other_tags(baseline, group) for group in groups}
    scores = [_compare_score(groups, title, other_tags, bootstrap) for title in titles]
    numbers = {label: len(image_ids) for label, image_ids in other_tags.items() if len(image_ids)}
    return Comparison(groups=groups, scores=scores, other_tags=numbers, bootstrap=bootstrap)


def _check_common_scores(groups: Sequence[RunGroup]) -> None:
    """Raises UserError if there are other groups than the first, and none of them has a score of the first."""
    baseline, *others = groups
    titles = set(baseline.titles())
    if not others or any(titles.intersection(other.titles()) for other in others):
        return
    scores_of_groups = [f"{group.label} has scores of {', '.join(group.titles()) or 'nothing'}" for group in groups]
    raise UserError(
        "; ".join(scores_of_groups),
        "at least one score that both the first run and another run have",
        "compare runs that have the same output: maps with maps, pseudo masks with pseudo masks, predictions with "
        "predictions",
    )


def _ids_with_other_tags(baseline: RunGroup, group: RunGroup) -> pa.ChunkedArray:
    """The ids of the images that have other tags in a group than in the baseline.

    Only the first run of a group is read, because its runs have the same images and tags.
    """
    folder = baseline.runs[0].outputs["index"]
    other_folder = group.runs[0].outputs["index"]
    if read_result(folder, IndexResult).identity == read_result(other_folder, IndexResult).identity:
        return pa.chunked_array([], pa.string())
    return ids_with_other_tags(folder / "index.parquet", other_folder / "index.parquet")


def _compare_score(
    groups: Sequence[RunGroup], title: str, other_tags: Mapping[str, pa.ChunkedArray], bootstrap: BootstrapSettings
) -> ComparedScore:
    """Compares one score of all groups with the score of the first group.

    Args:
        groups: The groups.
        title: The score.
        other_tags: Ids of the images that have other tags than in the first group, by the label of a group.
        bootstrap: Settings of the intervals.
    """
    reference = groups[0].runs[0]
    by_run = {}
    for group in groups:
        for run in group.runs:
            if title in run.scores:
                by_run[run.name] = _read_overlaps(run, title)

    compared: list[_GroupOverlaps] = []
    left_out: dict[str, str] = {}
    for group in groups:
        reason = _why_incomparable(reference, group, title, by_run)
        if reason is None and SCORED_OUTPUTS[reference.scores[title].output].is_made_from_tags:
            reason = _why_tags_differ(reference, by_run[reference.name].image_ids, other_tags[group.label])
        if reason is None:
            compared.append(_stack_overlaps(group, title, by_run))
        elif group is not groups[0]:
            left_out[group.label] = reason
        else:
            raise UserError(
                f"{title}: the runs of {group.label} cannot be compared with one another: {reason}",
                "runs of a group that are scored on the same images",
                "repeat the commands of these runs",
            )

    image_mious = {}
    for entry in compared:
        for run in entry.group.runs:
            ious = iou_of(*by_run[run.name].overlaps["miou"])
            image_mious[run.name] = dict(zip(by_run[run.name].image_ids, map(mean, ious), strict=True))

    return ComparedScore(
        output=reference.scores[title].output,
        title=title,
        groups=[entry.group for entry in compared],
        left_out=left_out,
        differences=list(_differences(compared, title, bootstrap)),
        label_score_intervals=_label_score_intervals(compared, title, bootstrap),
        image_mious=image_mious,
    )


def _differences(compared: Sequence[_GroupOverlaps], title: str, bootstrap: BootstrapSettings) -> Iterator[Difference]:
    """Yields the difference of each group to the first group in every measure that both have."""
    baseline = compared[0]
    score = baseline.group.scores(title)[0]
    for other in compared[1:]:
        is_paired = baseline.group.seeds(title) == other.group.seeds(title)
        for measure in MEASURES:
            if measure not in baseline.overlaps or measure not in other.overlaps:
                continue
            resampled = bootstrap_differences(
                baseline.overlaps[measure],
                other.overlaps[measure],
                paired=is_paired,
                resamples=bootstrap.resamples,
                seed=bootstrap.seed,
            )
            low, high = percentile_interval(resampled, bootstrap.confidence)
            yield Difference(
                title=title,
                measure=measure,
                group=other.group.label,
                split=score.split,
                images=score.images,
                baseline=_mean_iou(baseline.overlaps[measure]),
                compared=_mean_iou(other.overlaps[measure]),
                low=low,
                high=high,
            )


def _label_score_intervals(
    compared: Sequence[_GroupOverlaps], title: str, bootstrap: BootstrapSettings
) -> dict[tuple[str, str], Interval]:
    """The intervals of the differences of all groups to the first, in the means of `LABEL_SCORES` that both have."""
    baseline = compared[0]
    score_of_baseline = baseline.group.scores(title)[0]
    intervals = {}
    for other in compared[1:]:
        score_of_other = other.group.scores(title)[0]
        for name, label_score in LABEL_SCORES.items():
            measure = f"mean_{name}"
            if measure not in score_of_baseline.measures() or measure not in score_of_other.measures():
                continue
            resampled = bootstrap_score_differences(
                baseline.confusions,
                other.confusions,
                label_score,
                paired=baseline.group.seeds(title) == other.group.seeds(title),
                resamples=bootstrap.resamples,
                seed=bootstrap.seed,
            )
            low, high = percentile_interval(resampled, bootstrap.confidence)
            intervals[other.group.label, measure] = Interval(low, high)
    return intervals


def _mean_iou(by_image: Overlaps) -> float:
    """Mean over S seeds of mIoU in percent, from the overlaps of labels in each image, (S, N, K + 1)."""
    totals = [part.sum(axis=1) for part in by_image]
    return fmean(mean(iou) for iou in iou_of(*totals))


def _stack_overlaps(group: RunGroup, title: str, by_run: Mapping[str, _ImageOverlaps]) -> _GroupOverlaps:
    """Stacks the overlaps of the trainings of a group."""
    trainings = group.trainings(title)
    run_overlaps = [by_run[run.name].overlaps for run in trainings]
    stacked = {}
    for measure in run_overlaps[0]:
        parts = zip(*(by_measure[measure] for by_measure in run_overlaps), strict=True)
        stacked[measure] = Overlaps(*map(np.stack, parts))
    confusions = [by_run[run.name].confusions for run in trainings]
    return _GroupOverlaps(group, stacked, confusions)


def _read_overlaps(run: Run, title: str) -> _ImageOverlaps:
    """Reads the overlaps of labels in the images of a score.

    Localization maps become label masks at the run's own best threshold; they have no boundaries.
    """
    score = run.scores[title]
    output = run.outputs["evaluate"]
    counted = read_counts(output, score)
    if score.output == "localization_maps":
        thresholds, _ = read_json(output / CURVES)[score.name]
        counted = _apply_threshold(counted, thresholds.index(score.threshold))

    by_measure = {"miou": _label_overlaps(counted, score, boundary=False)}
    if score.boundary_iou:
        by_measure["boundary_miou"] = _label_overlaps(counted, score, boundary=True)
    confusions = _confusions(counted, num_labels=len(score.iou))
    return _ImageOverlaps(counted.image_ids.to_pylist(), counted.truth_crc, by_measure, confusions)


def _confusions(counted: ImageCounts, num_labels: int) -> sparse.csr_array:
    """The flattened confusion matrix of each image, (N, (K + 1)^2) for K + 1 labels."""
    counts = counted.counts
    cells = counts.truth.astype(np.int64) * num_labels + counts.predicted
    shape = (len(counted.image_ids), num_labels**2)
    return sparse.csr_array((counts.pixels.astype(np.float64), (counted.images, cells)), shape=shape)


def _apply_threshold(counted: ImageCounts, interval: int) -> ImageCounts:
    """Turns the predictions whose score is below the given interval into background."""
    is_foreground = counted.counts.part >= interval
    predicted = np.where(is_foreground, counted.counts.predicted, 0).astype(np.uint8)
    return counted._replace(counts=counted.counts._replace(predicted=predicted))


def _label_overlaps(counted: ImageCounts, score: Score, *, boundary: bool) -> Overlaps:
    num_images = len(counted.image_ids)
    num_classes = len(score.iou) - 1
    return overlaps(counted.counts, counted.images, num_images, num_classes, boundary=boundary)


def _why_incomparable(reference: Run, group: RunGroup, title: str, by_run: Mapping[str, _ImageOverlaps]) -> str | None:
    """Why a score of a group cannot be compared with the same score of a run; None if it can."""
    for run in group.runs:
        reason = _why_runs_differ(reference, run, title, by_run)
        if reason is not None:
            return reason
    return None


def _why_runs_differ(reference: Run, other: Run, title: str, by_run: Mapping[str, _ImageOverlaps]) -> str | None:
    """Why two runs cannot be compared: one lacks the score or is scored on other images.

    Raises:
        UserError: The two runs have different ground truth for the same image.
    """
    if title not in other.scores:
        return f"{other.name} has none"

    truths = _truths(by_run[reference.name])
    other_truths = _truths(by_run[other.name])
    common = truths.keys() & other_truths.keys()
    changed = sorted(image_id for image_id in common if truths[image_id] != other_truths[image_id])
    if changed:
        raise UserError(
            f"{title}: {len(changed)} of {len(common)} images have different ground truth in the runs {other.name!r} "
            f"and {reference.name!r}: {join_shortened(changed)}",
            "runs scored against the same ground truth",
            "repeat the command of the run that was scored with the older masks; it is then scored again",
        )

    split = reference.scores[title].split
    other_split = other.scores[title].split
    if split != other_split:
        return f"scored on split {other_split}, {reference.name} on {split}"
    if truths.keys() == other_truths.keys():
        return None

    only_in = []
    for run, own, others in ((reference, truths, other_truths), (other, other_truths, truths)):
        image_ids = sorted(own.keys() - others.keys())
        if image_ids:
            only_in.append(f"{len(image_ids)} only in {run.name} ({join_shortened(image_ids)})")
    numbers = f"scored on {len(other_truths)} images of {split}, {reference.name} on {len(truths)}"
    return f"{numbers}: {'; '.join(only_in)}"


def _why_tags_differ(reference: Run, image_ids: Sequence[str], other_tags: pa.ChunkedArray) -> str | None:
    """Why an output that is made from tags cannot be compared with that of a run; None if it can.

    Args:
        reference: The run.
        image_ids: Ids of the scored images.
        other_tags: Ids of the images that have other tags than in the run.
    """
    has_other_tags = pc.is_in(pa.array(image_ids, pa.string()), other_tags)
    num_images = np.count_nonzero(has_other_tags)
    if num_images == 0:
        return None
    return f"{num_images} of {len(image_ids)} scored images have other tags than in {reference.name}"


def _truths(images: _ImageOverlaps) -> dict[str, int]:
    """The checksum of the ground truth of each image, by its id."""
    return dict(zip(images.image_ids, images.truth_crc, strict=True))
