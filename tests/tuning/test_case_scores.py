"""Scores of the cases of a study: columns, what they mean, and differences over the same seeds."""

from dataclasses import replace
from typing import Any

from mcis.platform.runs.scores import Score
from mcis.tuning.case_scores import (
    CaseScores,
    PairedDifference,
    column_descriptions,
    meaning_of_columns,
    paired_differences,
    score_case,
    scores_by_column,
)
from mcis.tuning.definition import StudyCase

MAPS = "localization maps"
MASKS = "pseudo masks"


def make_score(output: str, miou: float, **settings: Any) -> Score:
    values: dict[str, Any] = {
        "name": "any",
        "split": "train",
        "images": 9,
        "iou": {},
        "label_scores": {},
        "confusion": (),
        "seed": 0,
        "recipe": "scratch",
        "weights": "none",
        "git": "abc",
    }
    return Score(output=output, miou=miou, **(values | settings))


def trial_scores(related: int) -> dict[str, Score]:
    """Scores of a trial with all outputs; maps are also scored without related images."""
    mask_settings: dict[str, Any] = {"background_cue": "saliency", "map_scale": "range", "method": "paper"}
    segmentation_settings: dict[str, Any] = {"split": "val", "images": 4, "scales": (1.0,), "hflip": True}
    scores = [
        make_score("localization_maps", 40.0, related=0),
        make_score("localization_maps", 45.0, related=3, method="paper"),
        make_score("pseudo_masks", 60.0, related=3, **mask_settings),
        make_score("segmentation", 70.0, crf=True, **segmentation_settings),
    ]
    return scores_by_column(scores, related)


def test_scores_have_a_column_each_and_maps_are_those_of_the_trials_related_images() -> None:
    with_related = {column: score.miou for column, score in trial_scores(related=3).items()}
    without_related = {column: score.miou for column, score in trial_scores(related=0).items()}
    assert with_related == {MAPS: 45.0, MASKS: 60.0, "segmentation, CRF": 70.0}
    assert without_related == {MAPS: 40.0, MASKS: 60.0, "segmentation, CRF": 70.0}


def test_columns_are_described_without_the_origin_of_the_scores() -> None:
    meanings = meaning_of_columns([trial_scores(related=3)])
    assert meanings[MASKS]["git"] == "abc"
    del meanings[MAPS]
    assert column_descriptions(meanings) == {
        MASKS: "split train, images 9, background cue saliency, map scale range, method paper",
        "segmentation, CRF": "split val, images 4, scales 1, horizontal flip yes, CRF yes",
    }


def test_descriptions_of_columns_leave_out_methods_that_differ_by_row() -> None:
    trials = []
    for method in ("one", "other"):
        trials.append(scores_by_column([make_score("pseudo_masks", 60.0, related=3, method=method)], 3))
    meanings = meaning_of_columns(trials)
    assert meanings[MASKS]["method"] == "one or other"
    assert column_descriptions(meanings) == {MASKS: "split train, images 9"}


def make_case(name: str, baseline: str | None = None) -> StudyCase:
    return StudyCase(
        name=name,
        group="co",
        sources="voc",
        recipe="paper",
        inference="co-attention",
        related=3,
        until="evaluate",
        baseline=baseline,
    )


def test_a_case_has_the_scores_of_its_finished_seeds() -> None:
    scores = {
        7: scores_by_column([make_score("pseudo_masks", 60.0, related=3)], 3),
        9: scores_by_column([make_score("pseudo_masks", 62.0, related=3)], 3),
    }
    case = make_case("a")
    expected = CaseScores(case=case, seeds=[7, 9], miou={MASKS: [60.0, 62.0]})
    assert score_case(case, scores, {7: None}) == expected
    assert score_case(case, scores, {9: 91.0}) == expected, "not every seed has one"
    with_precision = replace(expected, shares={"mAP": [90.0, 91.0]})
    assert score_case(case, scores, {7: 90.0, 8: 1.0, 9: 91.0}) == with_precision


def test_differences_are_of_the_same_seeds_and_columns() -> None:
    case = make_case("a", baseline="b")
    scores = CaseScores(case=case, seeds=[0, 1, 2], miou={MAPS: [10.0, 20.0, 30.0], MASKS: [1.0, 1.0, 1.0]})
    baseline = CaseScores(case=make_case("b"), seeds=[2, 0], miou={MAPS: [25.0, 9.0]})
    expected = PairedDifference(case=case, seeds=[0, 2], miou={MAPS: [1.0, 5.0]})
    assert list(paired_differences([scores, baseline])) == [expected]


def test_there_is_no_difference_without_a_common_seed_or_a_baseline() -> None:
    baseline = CaseScores(case=make_case("c"), seeds=[3], miou={MAPS: [25.0]})
    other_seed = CaseScores(case=make_case("a", baseline="c"), seeds=[0], miou={MAPS: [25.0]})
    no_baseline = CaseScores(case=make_case("b", baseline="d"), seeds=[0], miou={MAPS: [25.0]})
    assert list(paired_differences([baseline, other_seed, no_baseline])) == []
