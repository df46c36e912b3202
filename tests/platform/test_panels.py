"""Pictures of panels: cells in palette colors, their descriptions and the legend."""

from typing import Any

import numpy as np

from mcis.datasets.classes import palette
from mcis.models.grids import pixel_grids
from mcis.platform.outputs.tables import ImageMaps
from mcis.platform.reporting.panels import Panel, cells, labels, legend

CLASSES = ("circle", "square", "star")


def panel(image_id: str = "a", height: int = 48, width: int = 64, **changes: Any) -> Panel:
    """A square on noise: truth with an ignored rim, a map that is high on the square, a pseudo mask, a prediction."""
    rng = np.random.default_rng(0)
    truth = np.zeros((height, width), np.uint8)
    truth[8:32, 8:40] = 255
    truth[10:30, 10:38] = 2
    pseudo = truth.copy()
    pseudo[:, :4] = 255
    heat = np.where(truth == 2, 0.9, 0.05).astype(np.float32)[None]

    given: dict[str, Any] = {"image_id": image_id, "split": "train", "tags": ("square",)}
    given |= {"truth": truth, "pseudo_mask": pseudo, "prediction": np.where(truth == 2, 2, 0).astype(np.uint8)}
    given["image"] = rng.integers(0, 256, (height, width, 3), np.uint8)
    given["maps"] = ImageMaps(np.array([1]), heat, pixel_grids(height, width))
    return Panel(**given | changes)


def test_cells_are_in_palette_colors() -> None:
    row = cells(panel(), CLASSES, 96)
    assert list(row) == ["image", "truth", "localization map", "pseudo mask", "prediction"]
    assert {cell.picture.size for cell in row.values()} == {(128, 96)}
    image, truth, heat, pseudo, prediction = (np.asarray(cell.picture).astype(int) for cell in row.values())

    inside = (slice(30, 50), slice(30, 60))  # inside the square, at twice its size
    for mask in (truth, pseudo, prediction):
        assert (mask[inside] == palette()[2]).all()
        assert (mask[70:90, 90:120] == palette()[0]).all()

    assert (pseudo[:, :8].min(axis=(0, 1)) > 180).all()  # ignored pixels are light
    assert len(np.unique(pseudo[:, :8].reshape(-1, 3), axis=0)) == 2  # and have stripes of two colors
    assert (truth[:, :8] == palette()[0]).all()
    assert heat[inside][..., 1].mean() > heat[70:90, 90:120][..., 1].mean() + 60  # label 2 is green
    assert abs(image.mean() - 127) < 20


def test_missing_cells_are_left_out() -> None:
    assert list(cells(panel(maps=None, pseudo_mask=None), CLASSES, 48)) == ["image", "truth", "prediction"]


def test_the_width_of_cells_is_limited() -> None:
    pictures = [cell.picture for cell in cells(panel(width=480, maps=None), CLASSES, 100).values()]
    assert {picture.size for picture in pictures} == {(200, 20)}


def test_the_legend_has_the_labels_that_occur_with_their_colors() -> None:
    assert legend([panel()], CLASSES) == [("background", "#000000"), ("square", "#008000"), ("ignored", "#ecece6")]
    tagged = panel(tags=("star",), truth=None, maps=None, pseudo_mask=None, prediction=None)
    assert [label.name for label in legend([tagged], CLASSES)] == ["star"]


def test_every_label_has_a_name() -> None:
    assert {label: name for label, (name, _) in labels(CLASSES).items()} == {
        0: "background",
        1: "circle",
        2: "square",
        3: "star",
        255: "ignored",
    }


def test_cells_have_descriptions_and_notes() -> None:
    row = cells(panel(cue="crf"), CLASSES, 48)
    assert (row["image"].alt, row["image"].note) == ("image of a, tagged square", "")
    assert (row["truth"].alt, row["truth"].note) == ("truth of a, tagged square", "")

    ignored = (24 * 32 - 20 * 28 + 48 * 4) / 3072
    assert row["pseudo mask"].note == f"cue crf, {100 * ignored:.1f}\N{NARROW NO-BREAK SPACE}% ignored"
    assert row["prediction"].note == "mIoU here 100"  # correct wherever the truth is known


def test_the_note_of_a_prediction_has_its_miou() -> None:
    background = (3072 - 24 * 32) / (3072 - 24 * 32 + 20 * 28)
    wrong = panel(prediction=np.zeros((48, 64), np.uint8))
    assert cells(wrong, CLASSES, 48)["prediction"].note == f"mIoU here {100 * background / 2:.0f}"

    for truth in (None, np.full((48, 64), 255, np.uint8)):
        assert cells(panel(truth=truth), CLASSES, 48)["prediction"].note == ""
