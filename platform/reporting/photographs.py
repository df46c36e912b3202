"""Predicts photographs and writes masks, overlays, and tables of class shares and of rejected files."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UnreachableFile, join_shortened
from mcis.datasets.formats.data_set import LabeledImage
from mcis.datasets.images.decode import RejectedImage, almost_uniform
from mcis.datasets.images.label_masks import decode_labels, encode_labels, resize_labels
from mcis.datasets.images.squares import read_picture
from mcis.datasets.sources.photographs import Photograph
from mcis.datasets.storage.files import read_bytes
from mcis.platform.networks.predictor import Prediction, PredictionInput, Predictor
from mcis.platform.networks.trained_segmenter import DEFAULT_MAX_SIDE
from mcis.platform.reporting.export import export_objects
from mcis.platform.reporting.files import csv_table, labels_table, write_bytes
from mcis.platform.reporting.html import encode
from mcis.platform.reporting.panels import overlay_picture
from mcis.platform.runs.progress import bar, console, counted

_MAX_UNREACHABLE = 5
"""Number of files in a row that cannot be read at present and are left out. More of them are a fault of the storage."""


class Rejects:
    """Files that a command leaves out of its results.

    Args:
        total: Number of files that the command reads.

    Attributes:
        rows: The rows of rejects.csv: a file, and the reason.
    """

    def __init__(self, total: int):
        self.rows: list[tuple[str, str]] = []
        self._max_in_a_row = min(_MAX_UNREACHABLE, total - 1)
        self._unreachable_in_a_row = 0

    def add(self, uri: str, reason: str) -> None:
        """Leaves out a file that can be read but is no photograph, or that does not exist."""
        self._unreachable_in_a_row = 0
        self.rows.append((uri, reason))

    def add_unreachable(self, uri: str, error: UnreachableFile) -> None:
        """Leaves out a file that a later call may read. Raises the error if it probably concerns all files."""
        self._unreachable_in_a_row += 1
        self.rows.append((uri, f"cannot be read at present: {error.reason}"))
        if self._unreachable_in_a_row > self._max_in_a_row:
            raise error

    def note_readable(self) -> None:
        """Notes that a file has been read."""
        self._unreachable_in_a_row = 0


def predict_photographs(
    predictor: Predictor,
    photographs: Sequence[Photograph],
    out: Path,
    tags: Mapping[str, Sequence[int]],
    rejected_before: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Predicts photographs and writes the results. Existing files with the same names are overwritten.

    A note names the photographs that are almost black or white.

        masks/<name>.png      palette PNG at the photograph's size
        overlays/<name>.jpg   the labels' colors over the photograph, at most DEFAULT_MAX_SIDE pixels a side
        shares.csv            a row for each photograph: its file, mask and size, and the share of each label's pixels
        labels.csv            class and color of each label
        rejects.csv           files that could not be read, and the reasons

    Both tables are also written if an error ends the predictions.

    Args:
        predictor: The segmentation network.
        photographs: The photographs.
        out: The folder to write to.
        tags: Class indices of the known tags of photographs, by URI. Predictions are restricted to them.
        rejected_before: First rows of rejects.csv: files that the command has left out before.

    Returns:
        The rows of rejects.csv: a file and the reason.

    Raises:
        UnreachableFile: Several files in a row, or all of them, cannot be read at present.
    """
    classes = predictor.classes
    write_bytes(out / "labels.csv", labels_table(classes))
    reader = _PhotographReader(predictor, photographs)
    rows: list[list[Any]] = []

    try:
        with bar("predict", len(photographs), "images") as progress:
            for row in predictor.map(reader.inputs(tags), functools.partial(_write_prediction, out, len(classes))):
                rows.append(row)
                progress.update(len(rows) + len(reader.rejects.rows))
            progress.update(len(photographs))
    finally:
        rejected = [*rejected_before, *reader.rejects.rows]
        columns = ["image", "mask", "height", "width", "background", *classes]
        write_bytes(out / "shares.csv", csv_table(columns, rows))
        write_bytes(out / "rejects.csv", csv_table(["image", "reason"], rejected))

    if reader.uniform:
        console.print(
            f"note: {len(reader.uniform)} photograph(s) are almost black or white: {join_shortened(reader.uniform)}. "
            "For gray of more than 8 bits, set data.value_range"
        )
    return rejected


class _ShownPhotograph(NamedTuple):
    """A photograph with the image of its overlay, (H, W, 3), at most DEFAULT_MAX_SIDE pixels a side."""

    photograph: Photograph
    image: NDArray[np.uint8]


class _PhotographReader:
    """Reads photographs for a predictor.

    Attributes:
        rejects: The photographs that cannot be read.
        uniform: Names of the photographs that are almost black or white.
    """

    def __init__(self, predictor: Predictor, photographs: Sequence[Photograph]):
        self.predictor = predictor
        self.photographs = photographs
        self.rejects = Rejects(len(photographs))
        self.uniform: list[str] = []

    def inputs(self, tags: Mapping[str, Sequence[int]]) -> Iterator[PredictionInput[_ShownPhotograph]]:
        """Yields the photographs that can be read.

        Args:
            tags: Class indices of the known tags of photographs, by URI.
        """
        for photograph in self.photographs:
            try:
                image = self.predictor.read(photograph.uri)
                shown = read_picture(
                    photograph.uri,
                    max_pixels=self.predictor.max_pixels,
                    max_side=DEFAULT_MAX_SIDE,
                    value_range=self.predictor.value_range,
                )
            except RejectedImage as error:
                self.rejects.add(photograph.uri, error.reason)
                continue
            except UnreachableFile as error:
                self.rejects.add_unreachable(photograph.uri, error)
                continue

            self.rejects.note_readable()
            if almost_uniform(shown.rgb):
                self.uniform.append(photograph.name)
            yield PredictionInput(_ShownPhotograph(photograph, shown.rgb), image, tags.get(photograph.uri))


def _write_prediction(out: Path, num_classes: int, shown: _ShownPhotograph, prediction: Prediction) -> list[Any]:
    """Writes the mask and the overlay of a photograph; returns its row of shares.csv."""
    photograph = shown.photograph
    labels = prediction.labels()
    write_bytes(out / mask_name(photograph), encode_labels(labels))

    overlay = overlay_picture(shown.image, resize_labels(labels, *shown.image.shape[:2]))
    write_bytes(out / "overlays" / f"{photograph.name}.jpg", encode(overlay, "JPEG"))

    shares = np.bincount(labels.ravel(), minlength=num_classes + 1) / labels.size
    return [photograph.uri, mask_name(photograph), *labels.shape, *(f"{share:.6f}" for share in shares)]


def mask_name(photograph: Photograph) -> str:
    """Path of the mask that `predict_photographs` writes, relative to its folder."""
    return f"masks/{photograph.name}.png"


def write_predicted_objects(
    format: str, predictor: Predictor, photographs: Sequence[Photograph], out: Path, min_area: int
) -> str:
    """Writes the masks of `predict_photographs` as objects for other tools, below `out / format`.

    Args:
        format: One of `EXPORT_FORMATS`.
        predictor: The segmentation network that predicted them.
        photographs: The photographs that were predicted.
        out: The folder of `predict_photographs`.
        min_area: Smallest number of pixels of an object; smaller regions are left out.

    Returns:
        A description of what was written.
    """

    def labeled_images() -> Iterator[LabeledImage]:
        for photograph in photographs:
            labels = decode_labels((out / mask_name(photograph)).read_bytes())
            content_hash = hashlib.sha256(read_bytes(photograph.uri)).hexdigest()
            yield LabeledImage(photograph.uri, content_hash, photograph.name, labels, predictor.value_range)

    images = counted(labeled_images(), f"write {format}", len(photographs))
    return export_objects(format, predictor.classes, images, out / format, min_area)
