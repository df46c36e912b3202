"""Scores: their settings, their file, and the names of their metrics."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.runs.scores import HEADINGS, SCORES, VARIANTS, Score, read_scores

THIN = "\N{NARROW NO-BREAK SPACE}"
MASKS = Score(
    output="pseudo_masks",
    name="R = 3",
    split="train",
    images=10582,
    miou=61.25,
    iou={"background": 90.5, "cat": None},
    boundary_miou=40.5,
    boundary_iou={"background": 40.5, "cat": None},
    label_scores={"precision": {"background": 90.5, "cat": None}, "recall": {"background": 100.0, "cat": None}},
    confusion=((905, 0), (95, 0)),
    background_cue="saliency",
    map_scale="range",
    related=3,
    method="co-attention",
    ignored_share=0.125,
    seed=0,
    recipe="scratch",
    weights="none",
    git="0123456789ab+",
)
SEGMENTATION = Score(
    output="segmentation",
    name="with CRF",
    split="val",
    images=4,
    miou=70.5,
    iou={},
    label_scores={},
    confusion=(),
    scales=(0.5, 1.0),
    hflip=True,
    crf=False,
    seed=1,
    recipe="paper",
    weights="none",
    git=None,
)


def test_a_score_has_every_setting_that_applies_in_reading_order() -> None:
    assert MASKS.settings() == {
        "split": "train",
        "images": f"10{THIN}582",
        "background cue": "saliency",
        "map scale": "range",
        "related images": "3",
        "method": "co-attention",
        "ignored share": f"12.5{THIN}%",
        "seed": "0",
        "recipe": "scratch",
        "weights": "none",
        "git": "0123456789ab+",
    }
    assert SEGMENTATION.output_settings() == {"scales": "0.5, 1", "horizontal flip": "yes", "CRF": "no"}
    for score in (MASKS, SEGMENTATION):
        assert [heading for heading in HEADINGS if heading in score.settings()] == list(score.settings())


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / SCORES).write_text(json.dumps([asdict(score) for score in (MASKS, SEGMENTATION)]))
    assert read_scores({"evaluate": tmp_path}) == [MASKS, SEGMENTATION]
    assert read_scores({}) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"output": "mark"}, "output: Input should be one of localization_maps"),
        ({"related_images": 3}, "related_images: "),
        ({"miou": "high"}, "miou: Input should be a valid number"),
    ],
)
def test_a_file_with_other_fields_is_named_with_a_remedy(tmp_path: Path, damage: dict[str, Any], words: str) -> None:
    file = tmp_path / SCORES
    file.write_text(json.dumps([asdict(MASKS) | damage]))
    with pytest.raises(UserError, match=words) as caught:
        read_scores({"evaluate": tmp_path})
    assert str(file) in caught.value.found
    assert "--from evaluate" in caught.value.remedy
    file.write_text("[3]")
    with pytest.raises(UserError, match=r"is damaged \(0: "):
        read_scores({"evaluate": tmp_path})


def test_a_damaged_file_of_scores_gives_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / SCORES).write_text('[{"measured": 1}]')
    with pytest.raises(UserError, match=r"scores\.json is damaged") as caught:
        read_scores({"evaluate": tmp_path})
    assert "--from evaluate" in caught.value.remedy


def test_names_of_metrics_have_only_characters_that_mlflow_allows() -> None:
    assert MASKS.metrics() == {
        "pseudo_masks.R 3.miou": 61.25,
        "pseudo_masks.R 3.boundary_miou": 40.5,
        "pseudo_masks.R 3.mean_precision": 90.5,
        "pseudo_masks.R 3.mean_recall": 100.0,
    }
    assert SEGMENTATION.metrics() == {"segmentation.with CRF.miou": 70.5}


def test_variants_follow_from_the_scored_output_and_the_crf() -> None:
    assert [variant.title for variant in VARIANTS] == [
        "localization maps",
        "pseudo masks",
        "segmentation",
        "segmentation + CRF",
    ]
    assert MASKS.variant == VARIANTS[1]
    assert SEGMENTATION.variant == VARIANTS[2]
    assert replace(SEGMENTATION, crf=True).variant == VARIANTS[3]
    assert replace(MASKS, output="baseline").variant is None


def test_keys_of_variants_are_unique() -> None:
    for field in ("key", "title", "heading", "study_column", "objective"):
        assert len({getattr(variant, field) for variant in VARIANTS}) == len(VARIANTS)
