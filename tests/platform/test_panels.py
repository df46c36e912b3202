"""Pictures of panels: cells in palette colors, rows and galleries of the right shape, words that fit them."""

from typing import Any

import numpy as np
import pytest

from mcis.datasets.classes import palette
from mcis.platform.reporting.panels import Panel, cells, describe, gallery, labels, legend, panel_picture

CLASSES = ("circle", "square", "star")


def panel(image_id: str = "a", height: int = 48, width: int = 64, **changes: Any) -> Panel:
    """A square on noise: truth with an ignored rim, a map that glows on the square, a pseudo mask, a prediction."""
    rng = np.random.default_rng(0)
    truth = np.zeros((height, width), np.uint8)
    truth[8:32, 8:40] = 255
    truth[10:30, 10:38] = 2
    pseudo = truth.copy()
    pseudo[:, :4] = 255
    heat = np.where(truth == 2, 0.9, 0.05).astype(np.float32)
    given: dict[str, Any] = {
        "image_id": image_id,
        "split": "train",
        "tags": ("square",),
        "image": rng.integers(0, 256, (height, width, 3), np.uint8),
        "truth": truth,
        "maps": (("square", heat),),
        "pseudo_mask": pseudo,
        "prediction": np.where(truth == 2, 2, 0).astype(np.uint8),
    }
    return Panel(**given | changes)


def test_panel_picture_is_a_row_of_cells_in_palette_colors() -> None:
    picture = panel_picture(panel(), CLASSES, height=96)
    assert picture.size == (5 * 128 + 4 * 10, 96)
    pixels = np.asarray(picture)
    image, truth, heat, pseudo, prediction = (pixels[:, x : x + 128].astype(int) for x in range(0, 690, 138))
    inside = (slice(30, 50), slice(30, 60))  # of the square, at twice the size
    for mask in (truth, pseudo, prediction):
        assert (mask[inside] == palette()[2]).all()
        assert (mask[70:90, 90:120] == palette()[0]).all()
    assert (pseudo[:, :8].min(axis=(0, 1)) > 180).all()  # ignored: light over any image
    assert len(np.unique(pseudo[:, :8].reshape(-1, 3), axis=0)) == 2  # and striped
    assert (truth[:, :8] == palette()[0]).all()
    assert heat[inside][..., 1].mean() > heat[70:90, 90:120][..., 1].mean() + 60  # label 2 is green
    assert abs(image.mean() - 127) < 20


def test_panel_picture_leaves_out_what_there_is_not_and_limits_the_width() -> None:
    assert panel_picture(panel(maps=(), pseudo_mask=None), CLASSES, height=48).size == (3 * 64 + 2 * 10, 48)
    wide = panel(width=480, truth=None, maps=(), pseudo_mask=None, prediction=None)
    assert panel_picture(wide, CLASSES, height=100).size == (200, 20)


def test_gallery_stacks_rows_of_equal_columns() -> None:
    full, partly = panel("a"), panel("b", maps=(), pseudo_mask=None)
    single, double = gallery([full], CLASSES, height=96), gallery([full, partly], CLASSES, height=96)
    assert single.width == double.width == 2 * 20 + 5 * 128 + 4 * 10
    triple = gallery([full, partly, panel("c", height=64, width=48)], CLASSES, height=96)
    assert triple.height - double.height == double.height - single.height == 96 + 34  # a row and its caption
    assert gallery([partly], CLASSES, height=96).width == 2 * 20 + 3 * 128 + 2 * 10
    first = np.asarray(single)[:, 20 : 20 + 5 * 128 + 40]
    top = 20 + 28
    assert (first[top : top + 96] == np.asarray(panel_picture(full, CLASSES, height=96))).all()


def test_gallery_keeps_long_captions_and_many_labels_within_its_margins() -> None:
    classes = (*(f"a class of the name {k}" for k in range(30)), "W" * 300)
    every = np.arange(48 * 64, dtype=np.uint8).reshape(48, 64) % 32
    crowded = panel("i" * 500, tags=classes[:1], truth=every, maps=(), pseudo_mask=None, prediction=None)
    pixels = np.asarray(gallery([crowded], classes, height=96))
    assert (pixels[:, -20:] == 255).all()
    assert (pixels[:, :20] == 255).all()
    assert pixels.shape[0] > 20 + 28 + 96 + 34 + 10 * 24  # the legend takes a line for every few of its 32 labels


def test_legend_names_the_labels_that_occur_in_their_colors() -> None:
    assert legend([panel()], CLASSES) == [("background", "#000000"), ("square", "#008000"), ("ignored", "#ecece6")]
    tagged = panel(tags=("star",), truth=None, maps=(), pseudo_mask=None, prediction=None)
    assert [label.name for label in legend([tagged], CLASSES)] == ["star"]
    assert {label: name for label, (name, _) in labels(CLASSES).items()} == {
        0: "background", 1: "circle", 2: "square", 3: "star", 255: "ignored"
    }  # fmt: skip


def test_each_cell_is_described_with_what_it_shows() -> None:
    full = panel()
    assert list(cells(full, CLASSES, 48)) == ["image", "truth", "localization map", "pseudo mask", "prediction"]
    described = {column: describe(full, column, CLASSES) for column in cells(full, CLASSES, 48)}
    square, ignored, ignored_too = 20 * 28 / 3072, (24 * 32 - 20 * 28) / 3072, (24 * 32 - 20 * 28 + 48 * 4) / 3072
    as_shown = [f"{100 * part:.1f}\N{NARROW NO-BREAK SPACE}%" for part in (square, ignored, ignored_too, 1 - square)]
    assert described["image"] == ("image a, tagged square", "")
    assert described["localization map"][0].endswith(f"square above one half on {as_shown[0]} of the image")
    assert f"square {as_shown[0]}, ignored {as_shown[1]}" in described["truth"][0]
    assert described["truth"][1] == ""
    assert described["pseudo mask"][1] == f"{as_shown[2]} ignored"
    assert describe(panel(cue="crf"), "pseudo mask", CLASSES)[1] == f"cue crf, {as_shown[2]} ignored"
    assert described["prediction"][0] == f"prediction of a: background {as_shown[3]}, square {as_shown[0]}"
    assert described["prediction"][1] == "mIoU here 100"  # right wherever the truth is known
    wrong = panel(prediction=np.zeros((48, 64), np.uint8))
    background = (3072 - 24 * 32) / (3072 - 24 * 32 + 20 * 28)
    assert describe(wrong, "prediction", CLASSES)[1] == f"mIoU here {100 * background / 2:.0f}"
    for truth in (None, np.full((48, 64), 255, np.uint8)):
        assert describe(panel(truth=truth), "prediction", CLASSES)[1] == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"truth": np.zeros((47, 64), np.uint8)}, r"truth of a is \(47, 64\); expected its image's \(48, 64\)"),
        ({"prediction": np.full((48, 64), 4, np.uint8)}, "prediction of a has label 4; expected at most 3"),
        ({"maps": (("square", np.zeros((3, 4), np.float32)),)}, "map of square on a"),
        ({"tags": ("blob",)}, "unknown class 'blob'"),
    ],
)
def test_panels_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        panel_picture(panel(**changes), CLASSES)
