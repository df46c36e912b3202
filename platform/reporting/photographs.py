"""Predicts photographs and writes masks, overlays, and tables of class shares and of rejected files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.images.decode import RejectedImage, encode_labels, resize_labels
from mcis.datasets.images.squares import read_picture
from mcis.datasets.sources.photographs import Photograph
from mcis.platform.networks.predictor import Photo, Prediction, Predictor
from mcis.platform.networks.trained_segmenter import DEFAULT_MAX_SIDE
from mcis.platform.reporting.files import csv_table, labels_table, write_bytes
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import overlay_picture
from mcis.platform.runs.progress import bar


def predict_photographs(
    predictor: Predictor, photographs: Sequence[Photograph], out: Path, tags: Mapping[str, Sequence[int]]
) -> list[tuple[str, str]]:
    """Predicts photographs and writes the results. Existing files with the same names are overwritten.

        masks/<name>.png      palette PNG at the photograph's size
        overlays/<name>.jpg   the labels' colors over the photograph, at most DEFAULT_MAX_SIDE pixels a side
        shares.csv            a row for each photograph: its file, mask and size, and the share of each label's pixels
        labels.csv            class and color of each label
        rejects.csv           files that could not be read, and the reasons

    Args:
        predictor: the segmentation network.
        photographs: the photographs.
        out: the folder to write to.
        tags: class indices of the known tags of photographs, by URI. Predictions are restricted to them.

    Returns:
        The rows of rejects.csv: a file and the reason.
    """
    rejected: list[tuple[str, str]] = []
    rows: list[list[Any]] = []
    classes = predictor.classes
    write_bytes(out / "labels.csv", labels_table(classes))

    def read() -> Iterator[Photo[tuple[Photograph, NDArray[np.uint8]]]]:
        """Yields the photographs that can be read, each with the image of its overlay."""
        for photograph in photographs:
            try:
                picture = predictor.read(photograph.uri)
                shown = read_picture(photograph.uri, max_pixels=predictor.max_pixels, max_side=DEFAULT_MAX_SIDE)
            except RejectedImage as error:
                rejected.append((photograph.uri, error.reason))
                continue
            yield Photo((photograph, shown.rgb), picture, tags.get(photograph.uri))

    def write(item: tuple[Photograph, NDArray[np.uint8]], prediction: Prediction) -> list[Any]:
        """Writes mask and overlay; returns the row of shares.csv."""
        photograph, shown = item
        labels = prediction.labels()
        mask_file = f"masks/{photograph.name}.png"
        write_bytes(out / mask_file, encode_labels(labels))

        overlay = overlay_picture(shown, resize_labels(labels, *shown.shape[:2]))
        write_bytes(out / "overlays" / f"{photograph.name}.jpg", encode(overlay, "JPEG"))

        shares = np.bincount(labels.ravel(), minlength=len(classes) + 1) / labels.size
        return [photograph.uri, mask_file, *labels.shape, *(f"{share:.6f}" for share in shares)]

    with bar("predict", len(photographs), "images") as progress:
        for row in predictor.map(read(), write):
            rows.append(row)
            progress.update(len(rows) + len(rejected))
        progress.update(len(photographs))

    columns = ["image", "mask", "height", "width", "background", *classes]
    write_bytes(out / "shares.csv", csv_table(columns, rows))
    write_bytes(out / "rejects.csv", csv_table(["image", "reason"], rejected))
    return rejected
