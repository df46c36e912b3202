"""Plots on the pages: correct also with gaps in the data and odd names."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from mcis.platform.reporting.error_breakdown import ScoredStep
from mcis.platform.reporting.plots import (
    THEME,
    Bars,
    Plot,
    TrainingLog,
    error_chart,
    iou_chart,
    log_columns,
    loss_terms,
    threshold_chart,
    training_chart,
)
from mcis.platform.runs.scores import Curve

IOU: dict[str, float | None] = {"circle": 80.0, "square": 40.0, "star": None}
NAN = float("nan")
BARS = Bars("Segmentation", IOU, 40.0, 1)


def training(*args: Any, **more: Any) -> TrainingLog:
    """The log of `records`."""
    return log_columns(records(*args, **more))


def pixels(png: bytes) -> NDArray[np.int64]:
    """Colors of a picture, (H, W, 3)."""
    return np.asarray(Image.open(BytesIO(png)).convert("RGB")).astype(np.int64)


def records(count: int = 12, **more: Any) -> list[dict[str, Any]]:
    """A training of 3 epochs whose loss falls."""
    return [
        {"step": 10 * i, "epoch": 3 * i / count, "loss": 3 / i, "basic": 1 / i, "contrastive": 2 / i}
        | {"learning_rate": 0.1 / i, "images_per_second": 50.0, "waiting": 0.25, "time": 1.7e9 + i}
        | more
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    "plot",
    [
        iou_chart(["circle", "square", "star"], [BARS._replace(color=0), BARS]),
        threshold_chart({"R = 3": Curve([0.1, 0.2], [40.0, 42.0])}),
        error_chart([ScoredStep("pseudo_masks", "masks", "train, 6 images", 40.0, [30.0, 20.0, 10.0], None, [], [])]),
        training_chart(training()),
    ],
    ids=["iou", "thresholds", "errors", "training"],
)
def test_plots_have_two_pixels_per_css_pixel(plot: Plot) -> None:
    shown = pixels(plot.png)
    assert shown.shape == (2 * plot.height, 2 * plot.width, 3)
    for color in (THEME.paper, THEME.ink):
        assert (shown == ImageColor.getrgb(color)).all(axis=2).any()
    assert np.median(shown.reshape(-1, 3), axis=0).tolist() == list(ImageColor.getrgb(THEME.paper))


def test_stacked_bars_of_errors_sum_to_100() -> None:
    step = ScoredStep("segmentation", "with CRF", "val, 6 images", 40.0, [30.0, 20.0, 10.0], None, [], [])
    shown = pixels(error_chart([step, step]).png)
    colors = [ImageColor.getrgb(color) for color in (THEME.series[1], *THEME.series[3:6])]
    widths = np.array([(shown == color).all(axis=2).sum(axis=1).max() for color in colors])
    np.testing.assert_allclose(widths / widths.sum(), [0.4, 0.3, 0.2, 0.1], atol=0.01)


def test_names_that_begin_with_an_underscore_are_in_legends() -> None:
    """matplotlib hides such labels by default."""
    curve = Curve([0.1, 0.2], [40.0, 41.0])
    for named, unnamed in (
        (threshold_chart({"_R": curve}), threshold_chart({"": curve})),
        (iou_chart(["circle"], [BARS._replace(label="_run")]), iou_chart(["circle"], [BARS._replace(label="")])),
    ):
        assert ((pixels(named.png) < 100).sum() - (pixels(unnamed.png) < 100).sum()) > 100


def test_unknown_columns_of_a_log_are_terms_of_the_loss() -> None:
    assert loss_terms(training()) == ["basic", "contrastive"]
    assert not loss_terms(log_columns([{"step": 1, "epoch": 0.1, "loss": 1.0, "val_map": 50.0}]))
    without_time = [{key: value for key, value in record.items() if key != "time"} for record in records()]
    assert training_chart(training()).png == training_chart(log_columns(without_time)).png


@pytest.mark.filterwarnings("error")
def test_gaps_in_the_records_are_gaps_in_the_curves() -> None:
    gaps = records(200, loss=1.0)
    for i in range(50, 150):
        gaps[i] |= {"loss": NAN, "basic": NAN}
        del gaps[i]["waiting"], gaps[i]["learning_rate"]
    ink = (pixels(training_chart(log_columns(gaps)).png)[:500] == ImageColor.getrgb(THEME.ink)).all(axis=2)
    drawn = np.flatnonzero(ink.any(axis=0))
    assert 300 < np.diff(drawn).max() < 600  # half of 960 pixels less the margins
