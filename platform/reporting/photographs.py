"""Photographs -> finished predictions in a folder: masks, overlays, and tables of class shares and of rejects."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.images.decode import Picture, RejectedImage, encode_labels, resize_labels
from mcis.datasets.images.squares import read_picture
from mcis.datasets.sources.photographs import Photograph
from mcis.platform.networks.predictor import MOST_SIDE, Prediction, Predictor
from mcis.platform.reporting.files import csv_table, labels_table, write_bytes
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import overlay_picture
from mcis.platform.runs.progress import bar


class Rejected(NamedTuple):
    """A file that gives no photograph, and why."""

    uri: str
    reason: str


class _Read(NamedTuple):
    """A photograph as its overlay shows it, (h, w, 3)."""

    photograph: Photograph
    shown: NDArray[np.uint8]


class _Written(NamedTuple):
    """A photograph whose mask is written: its size, pixels, and the share of each label, (K + 1,)."""

    photograph: Photograph
    height: int
    width: int
    shares: NDArray[np.float64]


def predict_photographs(predictor: Predictor, photographs: Sequence[Photograph], out: Path) -> list[Rejected]:
    """Writes what is predicted of photographs below `out`; what lies there under the same names is replaced.

        masks/<name>.png      palette PNG at the photograph's size
        overlays/<name>.jpg   the labels' colors over the photograph, at most MOST_SIDE pixels a side
        shares.csv            a row for each photograph: its file, mask and size, and the share of each label's pixels
        labels.csv            which label is which class, and its color
        rejects.csv           the files that give no photograph, and why

    Returns:
        What is in rejects.csv.
    """
    rejected: list[Rejected] = []
    written: list[_Written] = []
    classes = predictor.classes
    write_bytes(out / "labels.csv", labels_table(classes))

    def write(read: _Read, prediction: Prediction) -> _Written:
        return _write(read, prediction, len(classes), out)

    with bar("predict", len(photographs), "images") as progress:
        for image in predictor.map(_read(predictor, photographs, rejected), write):
            written.append(image)
            progress.update(len(written) + len(rejected))
        progress.update(len(photographs))
    rows = ([w.photograph.uri, _mask(w.photograph), w.height, w.width, *map(_share, w.shares)] for w in written)
    names = ["image", "mask", "height", "width", "background", *classes]
    write_bytes(out / "shares.csv", csv_table(names, rows))
    write_bytes(out / "rejects.csv", csv_table(["image", "reason"], rejected))
    return rejected


def _read(
    predictor: Predictor, photographs: Iterable[Photograph], rejected: list[Rejected]
) -> Iterator[tuple[_Read, Picture]]:
    """The photographs that can be read, as they are shown and as they are predicted; the others join `rejected`."""
    for photograph in photographs:
        try:
            picture = predictor.read(photograph.uri)
            shown = read_picture(photograph.uri, max_pixels=predictor.max_pixels, max_side=MOST_SIDE)
        except RejectedImage as error:
            rejected.append(Rejected(photograph.uri, error.reason))
            continue
        yield _Read(photograph, shown.rgb), picture


def _mask(photograph: Photograph) -> str:
    return f"masks/{photograph.name}.png"


def _write(read: _Read, prediction: Prediction, classes: int, out: Path) -> _Written:
    photograph, labels = read.photograph, prediction.labels()
    write_bytes(out / _mask(photograph), encode_labels(labels))
    overlay = overlay_picture(read.shown, resize_labels(labels, *read.shown.shape[:2]))
    write_bytes(out / "overlays" / f"{photograph.name}.jpg", encode(overlay, "JPEG"))
    height, width = labels.shape
    shares = np.bincount(labels.ravel(), minlength=classes + 1) / labels.size
    return _Written(photograph, height, width, shares)


def _share(share: float) -> str:
    return f"{share:.6f}"
