"""Figures of studies: which scores they are, what columns mean, and differences over the same seeds."""

from dataclasses import replace
from typing import Any

from mcis.platform.runs.scores import Score
from mcis.tuning.definition import Case
from mcis.tuning.figures import (
    Figures,
    PairedDifference,
    caption,
    figures_of,
    meaning_of_columns,
    paired_differences,
    scores_by_column,
)


def score(what: str, miou: float, **meaning: Any) -> Score:
    of_all: dict[str, Any] = {"name": "any", "split": "train", "images": 9, "iou": {}}
    of_all |= {"figures": {}, "confusion": ()}
    origin: dict[str, Any] = {"seed": 0, "recipe": "scratch", "weights": "none", "git": "abc"}
    return Score(what=what, miou=miou, **of_all | origin | meaning)


def test_a_column_of_a_study_says_what_it_means() -> None:
    masks: dict[str, Any] = {"background_cue": "saliency", "map_scale": "range"}
    alone = [score("localization_maps", 40.0, related=0), score("pseudo_masks", 50.0, related=0, **masks)]
    of_val: dict[str, Any] = {"split": "val", "images": 4, "scales": (1.0,), "hflip": True}
    several = [
        score("localization_maps", 40.0, related=0),
        score("localization_maps", 45.0, related=3, method="paper"),
        score("pseudo_masks", 60.0, related=3, method="paper", **masks),
        score("segmentation", 70.0, crf=True, **of_val),
    ]
    trials = [scores_by_column(alone, 0), scores_by_column(several, 3)]
    assert [{column: of.miou for column, of in trial.items()} for trial in trials] == [
        {"localization maps": 40.0, "pseudo masks": 50.0},
        {"localization maps": 45.0, "pseudo masks": 60.0, "segmentation, CRF": 70.0},
    ]
    means = meaning_of_columns([{k: v for k, v in trial.items() if k != "localization maps"} for trial in trials])
    assert means["pseudo masks"]["git"] == "abc"
    assert caption(means) == (
        "pseudo masks: split train, images 9, background cue saliency, map scale range, method paper; "
        "segmentation, CRF: split val, images 4, scales 1, horizontal flip yes, CRF yes"
    )


def test_a_caption_leaves_methods_to_the_rows_where_they_differ() -> None:
    trials = [scores_by_column([score("pseudo_masks", 60.0, related=3, method=how)], 3) for how in ("one", "other")]
    means = meaning_of_columns(trials)
    assert means["pseudo masks"]["method"] == "one or other"
    assert caption(means) == "pseudo masks: split train, images 9"


def case(name: str) -> Case:
    return Case(name=name, group="co", sources="voc", inference="co-attention", related=3, until="evaluate")


def test_a_cases_figures_are_of_the_seeds_that_ended_well() -> None:
    scores = {seed: scores_by_column([score("pseudo_masks", m, related=3)], 3) for seed, m in ((7, 60.0), (9, 62.0))}
    expected = Figures(case=case("a"), seeds=[7, 9], miou={"pseudo masks": [60.0, 62.0]})
    assert figures_of(case("a"), scores, {7: None}) == expected
    precise = replace(expected, shares={"mAP": [90.0, 91.0]})
    assert figures_of(case("a"), scores, {7: 90.0, 8: 1.0, 9: 91.0}) == precise


def against(control: str) -> Case:
    return case("a").model_copy(update={"against": control})


def test_differences_are_of_the_same_seeds_and_columns() -> None:
    """What is missing on one side is left out; a control that has no figures leaves its difference out."""
    maps, masks = "localization maps", "pseudo masks"
    figures = [
        Figures(case=against("b"), seeds=[0, 1, 2], miou={maps: [10.0, 20.0, 30.0], masks: [1.0, 1.0, 1.0]}),
        Figures(case=case("b"), seeds=[2, 0], miou={maps: [25.0, 9.0]}),
        Figures(case=against("c"), seeds=[0], miou={maps: [25.0]}),
        Figures(case=case("c"), seeds=[3], miou={maps: [25.0]}),
        Figures(case=against("d"), seeds=[0], miou={maps: [25.0]}),
    ]
    expected = PairedDifference(of=against("b"), seeds=[0, 2], miou={maps: [1.0, 5.0]})
    assert list(paired_differences(figures)) == [expected]
