"""Pictures of panels: cells in palette colors and words that fit them."""

from typing import Any

import numpy as np

from mcis.datasets.classes import palette
from mcis.models.grids import pixel_grids
from mcis.platform.outputs.tables import ImageMaps
from mcis.platform.reporting.panels import Panel, cells, labels, legend

CLASSES = ("circle", "square", "star")


def panel(image_id: str = "a", height: int = 48, width: int = 64, **changes: Any) -> Panel:
    """A square on noise: truth with an ignored rim, a map that glows on the square, a pseudo mask, a prediction."""
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
    inside = (slice(30, 50), slice(30, 60))  # of the square, at twice the size
    for mask in (truth, pseudo, prediction):
        assert (mask[inside] == palette()[2]).all()
        assert (mask[70:90, 90:120] == palette()[0]).all()
    assert (pseudo[:, :8].min(axis=(0, 1)) > 180).all()  # ignored: light over any image
    assert len(np.unique(pseudo[:, :8].reshape(-1, 3), axis=0)) == 2  # and striped
    assert (truth[:, :8] == palette()[0]).all()
    assert heat[inside][..., 1].mean() > heat[70:90, 90:120][..., 1].mean() + 60  # label 2 is green
    assert abs(image.mean() - 127) < 20


def test_cells_that_there_are_not_are_left_out_and_their_width_is_limited() -> None:
    assert list(cells(panel(maps=None, pseudo_mask=None), CLASSES, 48)) == ["image", "truth", "prediction"]
    pictures = [cell.picture for cell in cells(panel(width=480, maps=None), CLASSES, 100).values()]
    assert {picture.size for picture in pictures} == {(200, 20)}


def test_legend_names_the_labels_that_occur_in_their_colors() -> None:
    assert legend([panel()], CLASSES) == [("background", "#000000"), ("square", "#008000"), ("ignored", "#ecece6")]
    tagged = panel(tags=("star",), truth=None, maps=None, pseudo_mask=None, prediction=None)
    assert [label.name for label in legend([tagged], CLASSES)] == ["star"]
    assert {label: name for label, (name, _) in labels(CLASSES).items()} == {
        0: "background",
        1: "circle",
        2: "square",
        3: "star",
        255: "ignored",
    }


def test_each_cell_is_described_and_masks_have_notes() -> None:
    described = {column: (alt, note) for column, (_, alt, note, _) in cells(panel(cue="crf"), CLASSES, 48).items()}
    assert described["image"] == ("image of a, tagged square", "")
    assert described["truth"] == ("truth of a, tagged square", "")
    ignored = (24 * 32 - 20 * 28 + 48 * 4) / 3072
    assert described["pseudo mask"][1] == f"cue crf, {100 * ignored:.1f}\N{NARROW NO-BREAK SPACE}% ignored"
    assert described["prediction"][1] == "mIoU here 100"  # right wherever the truth is known
    background = (3072 - 24 * 32) / (3072 - 24 * 32 + 20 * 28)
    wrong = panel(prediction=np.zeros((48, 64), np.uint8))
    assert cells(wrong, CLASSES, 48)["prediction"].note == f"mIoU here {100 * background / 2:.0f}"
    for truth in (None, np.full((48, 64), 255, np.uint8)):
        assert cells(panel(truth=truth), CLASSES, 48)["prediction"].note == ""
