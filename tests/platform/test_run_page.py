"""The page of a run: well formed, self-contained, correct, also with hostile names and with missing data."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mcis.models.grids import pixel_grids
from mcis.platform.outputs.tables import ImageMaps
from mcis.platform.reporting.panels import Panel
from mcis.platform.reporting.plots import log_columns
from mcis.platform.reporting.run_page import ReportData, write_report
from mcis.platform.reporting.worst_images import WorstImages
from mcis.platform.runs.scores import Curve, Score
from mcis.platform.runs.workspace import RunFolder

CLASSES = ("circle", "square", "star")
HOSTILE = "$\\frac$<script>alert('\"{&amp;</title>\x00\udcff\u202e"
Parsed = Callable[..., Any]


def score(output: str, miou: float, **meaning: Any) -> Score:
    origin: dict[str, Any] = {"seed": 0, "recipe": "scratch", "weights": "none", "git": None}
    images: dict[str, Any] = {"name": "any", "split": "val", "images": 6, "iou": {}}
    images |= {"label_scores": {}, "confusion": ()}
    return Score(output=output, miou=miou, **origin | images | meaning)


def panel(image_id: str = "a", **changes: Any) -> Panel:
    """A square on noise, with a correct pseudo mask and prediction."""
    square = np.zeros((48, 64), np.uint8)
    square[10:30, 10:38] = 2
    given: dict[str, Any] = {"image_id": image_id, "split": "train", "tags": ("square",)}
    given |= {"truth": square, "pseudo_mask": square, "prediction": square}
    given["image"] = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    given["maps"] = ImageMaps(np.array([1]), (square[None] * 0.45).astype(np.float32), pixel_grids(48, 64))
    return Panel(**given | changes)


@pytest.fixture(scope="module")
def data() -> ReportData:
    iou = {"background": 90.125, "circle": 30.5, "square": 61.375, "star": None}
    records = [
        {"step": 10 * i, "epoch": (i + 1) / 4, "loss": 3 / (i + 1), "basic": 1 / (i + 1), "contrastive": 2 / (i + 1)}
        | {"learning_rate": 0.1 / (i + 1), "images_per_second": 50.0, "waiting": 0.25}
        for i in range(12)
    ]
    masks: dict[str, Any] = {"ignored_share": 0.125, "background_cue": "saliency", "map_scale": "logarithm"}
    return ReportData(
        name="first",
        sources="voc",
        recipe="scratch",
        created="2025-03-01T12:00:00+00:00",
        git="0123456789abcdef0123456789abcdef01234567",
        classes=CLASSES,
        scores=[
            score("segmentation", 71.25, name="on its own images", split="train", images=480, iou=iou),
            score("segmentation", 51.75, name="plain", images=120, crf=False, hflip=True, scales=(0.5, 1.0), iou=iou),
            score("localization_maps", 43.512345, name="R = 3", split="train", threshold=0.26, related=3, iou=iou),
            score("pseudo_masks", 64.0625, name="saliency", split="train", **masks),
            score("baseline", 56.0, name="random tag", split="train", background_cue="saliency"),
        ],
        counts={
            "index": {"tags": {"square": 12, "circle": 3}},
            "images": {"train": 10582, "val": 120},
            "ignored": {"pseudo masks": {"pixels": 7}},
        },
        rejected=1,
        notes=["No saliency maps: the background comes from the dense CRF."],
        seconds={"index": 1.5, "train_classifier": 190.0},
        computed={"index": False, "train_classifier": True},
        training=dict.fromkeys(("classifier", "segmenter"), log_columns(records)),
        curves={"single round": Curve([0.1, 0.2, 0.3], [40.0, 42.5, 41.0])},
        config=[("classifier.epochs", "8", "recipe scratch"), ("seed", "0", "default")],
        environment={"python": "3.11"},
        panels=[panel("a"), panel("b", split="val", maps=None, pseudo_mask=None)],
    )


@pytest.fixture(scope="module")
def folder(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the report of `data`."""
    return write_report(data, RunFolder(tmp_path_factory.mktemp("report"))).parent


@pytest.fixture(scope="module")
def page(folder: Path, parsed: Parsed) -> Any:
    return parsed(folder / "report.html")


def bare(**changes: Any) -> ReportData:
    """A run without anything to show."""
    words: dict[str, Any] = {"name": "bare", "sources": "voc", "recipe": "scratch", "git": None, "classes": CLASSES}
    words["created"] = "2025-03-01T12:00:00+00:00"
    lists: dict[str, Any] = {key: [] for key in ("scores", "notes", "config", "panels")}
    tables: dict[str, Any] = {key: {} for key in ("counts", "seconds", "computed", "training", "curves", "environment")}
    return ReportData(**words | lists | tables | {"rejected": 0} | changes)


def test_plots_are_written_next_to_the_page(page: Any, folder: Path) -> None:
    assert len(page.pictures) == 5 + 3 + 4  # cells of the two panels, four plots
    files = sorted(path.name for path in (folder / "pictures").iterdir())
    assert files == ["iou.png", "thresholds.png", "training-classifier.png", "training-segmenter.png"]
    for name in files:
        Image.open(folder / "pictures" / name).load()


def test_the_score_table_has_each_score_with_its_settings(page: Any, data: ReportData) -> None:
    headings, *rows = page.rows["scores"]
    table = {row[0]: dict(zip(headings, row, strict=True)) for row in rows if len(row) == len(headings)}

    assert table["R = 3"]["mIoU"] == "43.5"
    assert table["R = 3"]["threshold"] == "0.26"
    assert table["R = 3"]["related images"] == "3"
    assert table["R = 3"]["ignored share"] == "–"

    assert table["plain"]["mIoU"] == "51.8"
    assert table["plain"]["split"] == "val"
    assert table["plain"]["images"] == "120"
    assert table["plain"]["scales"] == "0.5, 1"
    assert (table["plain"]["horizontal flip"], table["plain"]["CRF"]) == ("yes", "no")

    assert table["saliency"]["background cue"] == "saliency"
    assert [table[name]["map scale"] for name in ("saliency", "plain")] == ["logarithm", "–"]
    assert table["saliency"]["ignored share"] == "12.5\N{NARROW NO-BREAK SPACE}%"
    assert len(table) == len(data.scores)
    assert sorted(page.values["scores"]) == sorted(entry.miou for entry in data.scores)  # with all digits


def test_the_iou_table_is_sorted_by_the_last_stage(page: Any) -> None:
    assert page.rows["classes"] == [
        ["class", "images", "localization maps", "segmentation"],
        ["background", "", "90.1", "90.1"],
        ["square", "12", "61.4", "61.4"],
        ["circle", "3", "30.5", "30.5"],
        ["star", "", "–", "–"],
        ["mean", "", "43.5", "51.8"],
    ]


def test_errors_are_shown_for_each_step(tmp_path: Path, parsed: Parsed) -> None:
    """Squares predicted as background, background predicted as squares, and stars predicted as squares."""
    confusion = ((80, 0, 10, 0), (0, 0, 0, 0), (5, 0, 45, 0), (0, 0, 20, 30))
    hits = {"background": 80 / 95, "square": 45 / 80, "star": 30 / 50}
    iou = {"background": 100 * hits["background"], "circle": None, "square": 56.25, "star": 60.0}
    miou = 100 * sum(hits.values()) / 3
    label_scores = {"precision": iou, "recall": iou}
    fields: dict[str, Any] = {"iou": iou, "label_scores": label_scores, "confusion": confusion}
    edges: dict[str, Any] = {"boundary_miou": 40.0, "boundary_iou": iou}

    scores = [
        score("localization_maps", miou - 5, name="R = 3", split="train", images=480, **fields),
        score("pseudo_masks", miou, name="R = 3", split="train", images=480, **fields | edges),
        score("baseline", 50.0, name="a random tag", split="train", images=480, **fields | edges),
        score("segmentation", miou, name="plain", **fields | edges),
    ]
    page = parsed(write_report(bare(scores=scores), RunFolder(tmp_path)))
    rows = page.rows["errors"]

    starts = [number for number, row in enumerate(rows) if row[0] == "label"]
    shares = ((5 / 95, 5 / 80), (10 / 95, 10 / 80), (1 / 4, 2 / 5))  # of the unions of background, square and star
    points_lost = [f"{100 / 3 * (one + other):.1f}" for one, other in shares]
    shown_miou = f"{miou:.1f}"
    assert rows[1 : starts[0]] == [
        ["localization maps, R = 3", "train, 480 images", f"{miou - 5:.1f}", "–", *points_lost],
        ["pseudo masks", "train, 480 images", shown_miou, "5.0", *points_lost],
        ["segmentation, plain", "val, 6 images", shown_miou, "–", *points_lost],
    ]

    assert len(starts) == 3
    assert rows[starts[1] + 3] == ["square", "56.2", "56.2", "56.2", "56.2", "6.2", "12.5", "25.0"]
    assert rows[starts[0] + 2] == ["circle", *["–"] * 7]
    assert (tmp_path / "pictures" / "errors.png").exists()


def test_the_headline_of_segmentation_is_not_a_score_on_training_images(page: Any) -> None:
    assert "The best of" not in page.text  # there is one score on val, and the one on train does not count
    # 56 is the baseline in the pseudo masks' tile; 71.25 is on train
    assert page.values[""] == [43.512345, 64.0625, 56.0, 51.75]


def test_counts_rejects_times_and_configuration_are_shown(page: Any, data: ReportData) -> None:
    assert "10\N{NARROW NO-BREAK SPACE}582" in page.text
    assert "pseudo masks → pixels" in page.text
    assert "1 images rejected" in page.text
    assert "0:03:10" in page.text
    assert "reused" in page.text
    assert ["classifier.epochs", "8", "recipe scratch"] in page.rows["configuration"]
    assert ["python", "3.11"] in page.rows["configuration"]
    assert data.notes[0] in page.text


def test_hostile_names_are_shown_and_do_nothing(data: ReportData, tmp_path: Path, parsed: Parsed) -> None:
    classes = (HOSTILE, "square", "_hidden")
    iou = {HOSTILE: 10.0, "square": 20.0, "_hidden": 30.0}
    hostile = replace(
        data,
        name=HOSTILE,
        sources=HOSTILE,
        recipe=HOSTILE,
        git=HOSTILE,
        classes=classes,
        scores=[
            score("pseudo_masks", 20.0, name=HOSTILE, split=HOSTILE, weights=HOSTILE, iou=iou),
            score("baseline", 1.0, name=HOSTILE, background_cue=HOSTILE),
        ],
        counts={HOSTILE: {HOSTILE: 1}},
        notes=[HOSTILE],
        seconds={HOSTILE: 1.0},
        training={HOSTILE: log_columns([{"step": 1, "epoch": 0.5, "loss": 1.0, HOSTILE: 2.0}])},
        curves={HOSTILE: Curve([0.1], [1.0]), "_hidden": Curve([0.2], [2.0])},
        config=[(HOSTILE, HOSTILE, HOSTILE)],
        environment={HOSTILE: HOSTILE},
        panels=[panel(HOSTILE, tags=(HOSTILE,), split=HOSTILE)],
    )
    page = parsed(write_report(hostile, RunFolder(tmp_path)))
    assert len(page.of("title")) == 1
    shown = "$\\frac$<script>alert('\"{&amp;</title>\N{REPLACEMENT CHARACTER}\\udcff\u202e"
    assert page.rows["configuration"][1] == [shown] * 3
    assert shown in page.text.partition("mcis report")[2]
    for path in (tmp_path / "pictures").iterdir():
        assert re.fullmatch(r"[a-z0-9_-]+\.png", path.name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["no score in this run", "Nothing was trained in this run", "There are no images to show"]),
        ({"scores": [score("segmentation", float("nan"))]}, ["no mIoU: no pixel was scored"]),
        (
            {"training": {"classifier": log_columns([{"step": 1, "epoch": 0.5, "loss": float("nan")}])}},
            ["not a number at some steps"],
        ),
        ({"curves": {"single round": Curve([], [])}}, ["The thresholds of the localization maps were not swept"]),
        ({"seconds": {"index": 3.0}, "computed": {"index": True, "localize": False}}, ["localize"]),
    ],
)
def test_the_page_names_what_is_missing(
    changes: dict[str, Any], words: list[str], tmp_path: Path, parsed: Parsed
) -> None:
    page = parsed(write_report(bare(**changes), RunFolder(tmp_path)))
    for word in words:
        assert word in page.text


def test_a_report_removes_the_pictures_of_an_earlier_one(data: ReportData, tmp_path: Path) -> None:
    write_report(bare(curves=data.curves), RunFolder(tmp_path))
    kept = tmp_path / "pictures" / "mine.png"
    kept.write_bytes(b"kept")
    write_report(bare(), RunFolder(tmp_path))
    assert sorted(path.name for path in kept.parent.iterdir()) == ["mine.png"]
    assert not list(tmp_path.glob(".*"))


def test_the_gallery_shows_both_orders_and_filters_by_class(tmp_path: Path, parsed: Callable[..., Any]) -> None:
    worst = WorstImages(
        criterion="mIoU of the pseudo mask in the image",
        ranked=1464,
        panels=[panel("w1"), panel("w2", tags=("circle", "square"))],
        notes=["mIoU 1.5", "mIoU 20.0"],
        num_worst=1,
    )
    data = bare(panels=[panel("a"), panel("b", split="val")], worst={"train": worst})
    page = parsed(write_report(data, RunFolder(tmp_path)))  # which has no script
    assert "worst of 1\N{NARROW NO-BREAK SPACE}464 images, by mIoU of the pseudo mask in the image" in page.text
    assert "mIoU 1.5" in page.text
    articles = [(attrs["class"], attrs["data-labels"]) for attrs in page.of("article")]
    assert articles == [("panel card", "2"), ("panel card", "2"), ("panel card", "2"), ("panel card of-class", "1 2")]
    radios = [attrs["id"] for attrs in page.of("input")]
    assert radios == ["gallery-even", "gallery-worst", "gallery-all", "gallery-class-1", "gallery-class-2"]
    assert '#gallery:has(#gallery-class-2:checked) article:not([data-labels~="2"])' in page.source

    one_class = parsed(write_report(replace(data, worst={}), RunFolder(tmp_path)))
    assert one_class.of("input") == []
