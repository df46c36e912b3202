"""Compared runs: differences with their intervals, the settings of scores, runs that cannot be compared, images."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import confusion
from mcis.models.metrics import iou, mean
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, Comparison, Difference, compare
from mcis.platform.reporting.comparison_page import Gallery, GalleryCell, GalleryImage, choose_images, compared_images
from mcis.platform.reporting.comparison_tables import footnotes, page_tables
from mcis.platform.reporting.panels import CELL_HEIGHT, Panel, cells
from mcis.platform.runs.results import StageResult, write_result
from mcis.platform.runs.workspace import Workspace

NAN = float("nan")
CLASSES = ("cat", "dog")
TITLES = ["pseudo masks", "segmentation", "segmentation + CRF"]


@pytest.fixture(scope="module")
def root(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of two configurations with different errors, and runs that cannot be compared with them."""
    folder = tmp_path_factory.mktemp("comparison")
    root = folder / "workspace"
    data = folder / "data"
    for seed in range(3):
        scored(root, f"a-s{seed}", f"seed={seed}", data=data)
        scored(root, f"b-s{seed}", f"seed={seed}", "segmenter.min_steps=7", data=data, error=0.4)
    scored(root, "fewer", data=data, images=6)
    scored(root, "train", data=data, split="train")
    scored(root, "repainted", data=data, truths=1)
    return root


def compared(root: Path, *arguments: str, **settings: float) -> Comparison:
    groups = open_run_groups(root, arguments)
    return compare(groups, BootstrapSettings(**{"resamples": 300} | settings))  # type: ignore[arg-type]


def test_differences_agree_with_the_scores_and_have_an_interval(root: Path) -> None:
    comparison = compared(root, "a-s0", "b-s0", "a-s1")
    assert [score.title for score in comparison.scores] == TITLES

    for score in comparison.scores:
        assert [(row.group, row.measure) for row in score.differences] == [
            (group, measure) for group in ("b-s0", "a-s1") for measure in ("miou", "boundary_miou")
        ]
        scores = {group.label: group.runs[0].scores[score.title] for group in comparison.groups}
        for row in score.differences:
            assert row.baseline == pytest.approx(getattr(scores["a-s0"], row.measure), abs=0.00501)
            assert row.compared == pytest.approx(getattr(scores[row.group], row.measure), abs=0.00501)
            assert row.low < row.high
            assert (row.split, row.images) == ("val", 8)

    verdicts = {row.group: row.verdict for row in comparison.differences if row.measure == "miou"}
    assert verdicts["b-s0"] == "lower"
    assert dict(footnotes(comparison))["95 % interval"].endswith("300 resamples, the same for all runs (seed 0)")


def test_confidence_and_seed_change_the_intervals_alone(root: Path) -> None:
    wide = compared(root, "a-s0", "b-s0", confidence=0.95).differences
    narrow = compared(root, "a-s0", "b-s0", confidence=0.5).differences
    for outer, inner in zip(wide, narrow, strict=True):
        assert outer.low < inner.low < inner.high < outer.high

    other_seed = compared(root, "a-s0", "b-s0", seed=1).differences
    for first, second in zip(wide, other_seed, strict=True):
        assert first._replace(low=0, high=0) == second._replace(low=0, high=0)
        assert first.low != second.low


@pytest.mark.parametrize(
    ("verdict", "intervals"),
    [
        ("no difference", [(-1.0, 1.0), (0.0, 0.0), (0.0, 2.0)]),
        ("higher", [(0.1, 2.0)]),
        ("lower", [(-2.0, -0.1)]),
        ("unknown", [(NAN, NAN)]),
    ],
)
def test_the_verdict_follows_from_the_interval(verdict: str, intervals: list[tuple[float, float]]) -> None:
    for low, high in intervals:
        assert Difference("x", "miou", "b", "val", 8, 50.0, 51.0, low, high).verdict == verdict


def test_a_copy_of_a_run_has_no_difference(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copied")
    comparison = compared(root, "a-s0", str(tmp_path / "copied" / "runs" / "a-s0"))
    assert page_tables(comparison)[0].rows == []
    values = {(row.difference, row.low, row.high, row.verdict) for row in comparison.differences}
    assert values == {(0, 0, 0, "no difference")}


def test_the_table_of_scores_has_their_settings(root: Path) -> None:
    comparison = compared(root, "a-s0", "b-s1")
    _, scores, _ = page_tables(comparison)
    rows = [dict(zip(scores.columns, row, strict=True)) for row in scores.rows]

    for first, second, score in zip(rows[::2], rows[1::2], comparison.scores, strict=True):
        run_score = comparison.groups[1].runs[0].scores[score.title]
        assert (first["run"], second["run"], second["split"]) == ("a-s0", "b-s1", "val")
        assert second["mIoU %"] == f"{run_score.miou:.2f}"
        assert second["boundary mIoU %"] == f"{run_score.boundary_miou:.2f}"
        assert second["settings"].endswith("seed 1")
        for heading, text in run_score.output_settings().items():
            assert f"{heading} {text}" in second["settings"]


def test_trained_classifiers_have_a_table(root: Path, scored: Callable[..., Path]) -> None:
    for seed, counts in enumerate(({"val mAP": 80.0}, {"val mAP": 90.0})):
        workspace = Workspace(scored(root, f"c-s{seed}", f"seed={seed}", data=root / "data").parent.parent)
        trained = workspace.output("train_classifier", f"c{seed}")
        write_result(trained, StageResult(counts=counts), key="c")
        workspace.record_outputs(f"c-s{seed}", workspace.outputs(f"c-s{seed}") | {"train_classifier": trained})

    table = page_tables(compared(root, "b-s1", "c-s0,c-s1"))[2]
    assert (table.title, table.columns[1:]) == ("Classifiers", ("val mAP %",))
    assert table.rows == [("b-s1", "-"), ("c-s{0,1}", "85.00 ± 7.07")]


def test_what_all_scores_share_is_shown_once(root: Path, scored: Callable[..., Path]) -> None:
    shared = dict(footnotes(compared(root, "a-s0", "b-s0")))["all scores"]
    assert shared.startswith("seed 0, recipe scratch, weights ")

    scored(root, "paper", data=root.parent / "data", recipe="paper")
    assert not any("recipe" in text for _, text in footnotes(compared(root, "a-s1", "paper")))


def test_groups_of_seeds_have_means_deviations_and_intervals_over_images_and_seeds(root: Path) -> None:
    comparison = compared(root, "a-s0,a-s1,a-s2", "b-s1,b-s0,b-s2")
    assert [group.label for group in comparison.groups] == ["a-s{0,1,2}", "b-s{0,1,2}"]

    rows = iter(page_tables(comparison)[1].rows)
    for score in comparison.scores:
        for group in comparison.groups:
            mious = [run.scores[score.title].miou for run in group.runs]
            row = next(rows)
            assert row[5] == f"{fmean(mious):.2f} ± {stdev(mious):.2f}"
            assert "seed 0, 1, 2" in row[4]

    first = comparison.differences[0]
    baseline = [run.scores["pseudo masks"].miou for run in comparison.groups[0].runs]
    assert first.baseline == pytest.approx(fmean(baseline), abs=0.006)
    assert first.verdict == "lower"
    interval = dict(footnotes(comparison))["95 % interval"]
    assert "the same for all runs (seed 0), and over seeds by Student's t" in interval


def test_runs_that_share_an_output_are_one_training(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "workspace")
    workspace = Workspace(tmp_path / "workspace")
    for stage in ("predict", "evaluate"):
        for seed in (1, 2):
            outputs = workspace.outputs(f"a-s{seed}")
            workspace.record_outputs(f"a-s{seed}", outputs | {stage: workspace.output(stage, "a-s0")})

    copies = compared(workspace.root, "a-s0,a-s1,a-s2", "b-s0")
    single = compared(workspace.root, "a-s0", "b-s0")
    of_predictions = [row._replace(group="") for row in copies.differences if row.title != "pseudo masks"]
    assert of_predictions == [row._replace(group="") for row in single.differences if row.title != "pseudo masks"]
    scores = {(row[0], row[1]): row[5] for row in page_tables(copies)[1].rows}
    assert "±" in scores["pseudo masks", "a-s{0,1,2}"]
    assert "±" not in scores["segmentation", "a-s{0,1,2}"]

    notes = footnotes(copies)
    shared = "of a-s{0,1,2}: 3 runs share one output and count as one (a-s0, a-s1, a-s2)"
    assert ("one training", f"segmentation, segmentation + CRF {shared}") in notes
    assert "single runs" in dict(notes)
    assert "one training" not in dict(footnotes(compared(root, "a-s0,a-s1,a-s2", "b-s0")))


def test_other_images_are_not_compared(root: Path) -> None:
    comparison = compared(root, "a-s0", "fewer", "train", "b-s0")
    assert {row.group for row in comparison.differences} == {"b-s0"}
    for score in comparison.scores:
        assert [group.label for group in score.groups] == ["a-s0", "b-s0"]
        assert score.left_out == {
            "fewer": "scored on 6 images of val, a-s0 on 8: 2 only in a-s0 (val6, val7)",
            "train": "scored on split train, a-s0 on val",
        }

    note = dict(footnotes(compared(root, "a-s0", "fewer")))["not compared"]
    assert f"{', '.join(TITLES)} of fewer: scored on 6 images of val" in note


def test_masks_made_from_other_tags_are_not_compared_but_predictions_are(
    root: Path, scored: Callable[..., Path]
) -> None:
    scored(root, "wrong", data=root.parent / "data", wrong_tags=3)
    comparison = compared(root, "a-s0", "wrong", "b-s0")
    left_out = {score.title: score.left_out for score in comparison.scores}
    reason = "3 of 8 scored images have other tags than in a-s0"
    assert left_out == {TITLES[0]: {"wrong": reason}, TITLES[1]: {}, TITLES[2]: {}}

    notes = footnotes(comparison)
    assert ("not compared", f"pseudo masks of wrong: {reason}") in notes
    tag_notes = [text for term, text in notes if term == "other tags"]
    assert tag_notes == ["3 images have other tags in wrong than in a-s0; networks may be trained with them"]
    assert not any(term == "other tags" for term, _ in footnotes(compared(root, "a-s0", "b-s0")))


def test_a_score_that_a_run_lacks_is_not_compared(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "workspace")
    scores = tmp_path / "workspace" / "store" / "evaluate-a-s0" / "scores.json"
    scores.write_text(json.dumps([score for score in json.loads(scores.read_text()) if score["name"] != "with CRF"]))
    assert [score.title for score in compared(tmp_path / "workspace", "a-s0", "b-s0").scores] == TITLES[:2]

    for arguments, label in ((("b-s0", "a-s0"), "a-s0"), (("b-s0", "a-s0,a-s1"), "a-s{0,1}")):
        last = compared(tmp_path / "workspace", *arguments).scores[-1]
        assert (last.title, last.left_out, last.differences) == (TITLES[2], {label: "a-s0 has none"}, [])

    scores.write_text("[]")
    with pytest.raises(UserError, match="a-s0 has no score"):
        compared(tmp_path / "workspace", "a-s0", "b-s0")


def keep_scores(workspace: Path, run: str, output: str) -> None:
    """Removes the scores of a run that are not of this output."""
    file = workspace / "store" / f"evaluate-{run}" / "scores.json"
    scores = json.loads(file.read_text())
    file.write_text(json.dumps([score for score in scores if score["output"] == output]))


def test_runs_without_a_common_score_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "workspace")
    keep_scores(tmp_path / "workspace", "a-s0", "pseudo_masks")
    for run in ("b-s0", "b-s1"):
        keep_scores(tmp_path / "workspace", run, "segmentation")

    with pytest.raises(UserError) as caught:
        compared(tmp_path / "workspace", "a-s0", "b-s0", "b-s1")
    segmentation = "segmentation, segmentation + CRF"
    assert caught.value.found.startswith(
        f"a-s0 has scores of pseudo masks; b-s0 has scores of {segmentation}; b-s1 has scores of {segmentation}"
    )

    notes = footnotes(compared(tmp_path / "workspace", "a-s0", "b-s0", "a-s1", "b-s1"))
    assert ("not compared", f"{segmentation} of b-s0, a-s1, b-s1: a-s0 has none") in notes
    notes = footnotes(compared(tmp_path / "workspace", "a-s0", "a-s1"))
    assert not any(term == "not compared" for term, _ in notes), "no other run has these scores"


def test_another_truth_is_refused(root: Path) -> None:
    message = "pseudo masks: 8 of 8 images have different ground truth in the runs 'repainted' and 'a-s0': val0, val1"
    with pytest.raises(UserError, match=message):
        compared(root, "a-s0", "repainted")


def test_seeds_of_a_group_have_the_same_images(root: Path, scored: Callable[..., Path]) -> None:
    scored(root, "a-s9", "seed=9", data=root.parent / "data", images=6)
    with pytest.raises(UserError, match=r"the runs of a-s\{0,9\} cannot be compared with one another: scored on 6"):
        compared(root, "a-s0,a-s9", "b-s0")
    assert compared(root, "b-s0", "a-s0,a-s9").scores[0].left_out.keys() == {"a-s{0,9}"}


def test_each_image_has_its_miou(root: Path) -> None:
    comparison = compared(root, "a-s0", "b-s0")
    image_mious = comparison.scores[-1].image_mious["b-s0"]
    table = Shards(comparison.groups[1].runs[0].outputs["predict"] / "predictions")
    assert list(image_mious) == [f"val{number}" for number in range(8)]

    for number in range(8):
        truth = np.array(Image.open(root.parent / "data" / f"0-val{number}.png"))
        rows = table.rows(f"val{number}")
        mask = decode_labels(rows["crf"][0].as_py())
        assert image_mious[f"val{number}"] == pytest.approx(mean(iou(confusion(truth, mask, 2))))


def shown(root: Path, *arguments: str, count: int = 4) -> list[Gallery]:
    return compared_images(compared(root, *arguments, resamples=100), count)


IDS = [f"i{number}" for number in range(6)]


def test_the_largest_differences_come_first_then_others_at_random() -> None:
    first = dict.fromkeys(IDS, 50.0) | {"i1": NAN}
    second = first | {"i2": 90.0, "i4": 5.0, "i5": 51.0}
    third = first | {"i4": 55.0, "i0": 49.5}
    del second["i3"]
    chosen = choose_images(IDS, [first, second, third], 4, seed=0)
    assert [image_id for image_id, _ in chosen[:2]] == ["i4", "i2"]
    assert [differs_most for _, differs_most in chosen] == [True, True, False, False]
    assert [image_id for image_id, _ in choose_images(IDS, [first, second, third], 6, seed=0)][:3] == ["i4", "i2", "i5"]


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 999), st.lists(st.sampled_from([0.0, 1.0, 2.0, NAN]), min_size=6, max_size=6))
def test_a_choice_is_reproducible_and_has_each_image_once(count: int, seed: int, values: list[float]) -> None:
    mious = [dict(zip(IDS, values, strict=True)), dict.fromkeys(IDS, 0.0)]
    chosen = choose_images(IDS, mious, count, seed=seed)
    assert len({image_id for image_id, _ in chosen}) == len(chosen) == min(count, 6)
    assert chosen == choose_images(IDS, mious[::-1], count, seed=seed)
    differing = {image_id for image_id, value in mious[0].items() if value > 0}
    assert {image_id for image_id, differs_most in chosen if differs_most} <= differing
    assert sum(differs_most for _, differs_most in chosen) == min((count + 1) // 2, len(differing))


def test_images_have_photograph_truth_and_the_mask_of_every_run(root: Path) -> None:
    predictions, masks = shown(root, "a-s0", "b-s0")
    titles = [(gallery.title, gallery.common, len(gallery.images)) for gallery in (predictions, masks)]
    assert titles == [("Segmentation", 8, 4), ("Pseudo masks", 8, 4)]
    for image in predictions.images:
        assert_gallery_image(root, image, "predict", "predictions", "crf")
        assert all(note.startswith("with CRF, mIoU here ") for _, _, note in image.cells[2:])
    for image in masks.images:
        assert_gallery_image(root, image, "pseudo_masks", "masks", "labels")
        assert all(note.startswith("mIoU here ") for _, _, note in image.cells[2:])


def assert_gallery_image(root: Path, image: GalleryImage, stage: str, table: str, column: str) -> None:
    """An image shows its photograph, its truth, and the masks of both runs in a column of a table."""
    photograph, truth, *run_cells = image.cells
    rgb = np.asarray(Image.open(root.parent / "data" / f"0-{image.id}.jpg"))
    labels = np.asarray(Image.open(root.parent / "data" / f"0-{image.id}.png"))
    panel = Panel(image_id=image.id, split="val", tags=(), image=rgb, truth=labels)
    assert_shows([photograph, truth], panel, ["image", "truth"])

    assert [run for run, _, _ in run_cells] == ["a-s0", "b-s0"]
    for cell in run_cells:
        rows = Shards(root / "store" / f"{stage}-{cell.title}" / table).rows(image.id)
        with_mask = replace(panel, prediction=decode_labels(rows[column][0].as_py()))
        assert_shows([cell], with_mask, ["prediction"])


def test_images_that_differ_most_are_sorted_by_their_difference(root: Path) -> None:
    for gallery in shown(root, "a-s0", "b-s0"):
        ranges = []
        for image in gallery.images:
            if image.why == "val, differs most":
                first, second = [float(note.split()[-1]) for _, _, note in image.cells[2:]]
                ranges.append(abs(first - second))
        assert len(ranges) == 2
        assert ranges == pytest.approx(sorted(ranges, reverse=True), abs=0.1)


def assert_shows(shown: list[GalleryCell], panel: Panel, columns: list[str]) -> None:
    """Cells show what a panel has in some columns."""
    expected = cells(panel, CLASSES, CELL_HEIGHT)
    for (_, cell, _), column in zip(shown, columns, strict=True):
        assert cell is not None
        np.testing.assert_array_equal(np.asarray(cell.picture), np.asarray(expected[column].picture))


def test_only_images_of_all_runs_are_shown_and_none_by_request(root: Path) -> None:
    predictions, _ = shown(root, "a-s0", "b-s0", "fewer", count=8)
    assert (predictions.common, len(predictions.images)) == (6, 6)
    assert shown(root, "a-s0", "b-s0", count=0) == []


def test_a_gallery_leaves_out_runs_without_predictions(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "workspace")
    workspace = Workspace(tmp_path / "workspace")
    workspace.record_outputs("b-s0", {s: path for s, path in workspace.outputs("b-s0").items() if s != "predict"})
    predictions, masks = shown(tmp_path / "workspace", "a-s0", "b-s0")
    assert (predictions.common, predictions.images, len(masks.images)) == (0, [], 4)
    predictions, _ = shown(tmp_path / "workspace", "a-s0", "b-s0", "a-s1")
    assert (predictions.common, predictions.without, len(predictions.images)) == (8, ["b-s0"], 4)
    assert [run for run, _, _ in predictions.images[0].cells] == ["image", "truth", "a-s0", "a-s1"]


def test_a_missing_photograph_is_named(root: Path) -> None:
    data = root.parent / "data"
    kept = root.parent / "kept"
    data.rename(kept)
    try:
        with pytest.raises(UserError, match=r"(?s)jpg cannot be read any more.* with --images 0"):
            shown(root, "a-s0", "b-s0", count=2)
    finally:
        kept.rename(data)
