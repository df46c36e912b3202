"""Detects salient objects in images, on all nodes, and writes a saliency map for each image."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.images.decode import RejectedImage
from mcis.datasets.images.squares import read_picture
from mcis.datasets.storage.files import stamps
from mcis.platform.config.data import DataConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.errors import fewer_processes
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import ray_session
from mcis.platform.networks.saliency_detector import Detector, DetectorSettings
from mcis.platform.reporting.files import csv_table, write_bytes
from mcis.platform.reporting.html import encode
from mcis.platform.runs.files import read_record_of, read_table, write_json
from mcis.platform.runs.progress import console

RECORD = "saliency.json"
"""File next to the maps: the settings of the detector that made them."""
REJECTS = "rejects.csv"
"""File next to the maps: the images that cannot be read, and the reasons."""
_SHARD_ROWS = 16
"""Number of images in a shard, a few seconds of work for one core."""
_REASONS = pa.schema([("name", pa.string()), ("uri", pa.string()), ("reason", pa.string())])


class WrittenMaps(NamedTuple):
    """Result of `write_saliency_maps`.

    Attributes:
        new: Number of maps that the call made.
        kept: Number of maps that an earlier call made.
        rejected: Name of each image that cannot be read -> the reason.
    """

    new: int
    kept: int
    rejected: dict[str, str]


class MapSaliency:
    """Writes the saliency maps of rows with the columns `name` and `uri`; returns the reasons of rejections.

    Args:
        make_detector: Makes the detector.
        settings: The detector that is expected.
        out: Folder of the maps.
        limits: Limits of images.
    """

    def __init__(
        self, make_detector: Callable[[], Detector], settings: DetectorSettings, out: Path, limits: DataConfig
    ):
        self.detector = make_detector()
        self.out = out
        self.limits = limits
        if self.detector.settings != settings:
            raise UserError(
                f"{self.detector.file} is another file on one of the nodes",
                "the same network on all nodes",
                "copy the file to all nodes, or name one that all of them reach by --model",
            )

    def __call__(self, rows: pa.Table) -> pa.Table:
        reasons = [self._write(row["uri"], _map_file(self.out, row["name"])) for row in rows.to_pylist()]
        return pa.table({"name": rows["name"], "uri": rows["uri"], "reason": reasons}, _REASONS)

    def _write(self, uri: str, file: Path) -> str | None:
        """Writes the map of an image. Returns the reason if the image cannot be read."""
        try:
            picture = read_picture(
                uri,
                min_side=self.limits.min_side,
                max_pixels=self.limits.max_pixels,
                value_range=self.limits.value_range,
            )
        except RejectedImage as error:
            return error.reason
        write_bytes(file, encode(Image.fromarray(self.detector(picture.rgb)), "PNG"))
        return None


def write_saliency_maps(
    make_detector: Callable[[], Detector], images: pa.Table, out: Path, config: Config, *, verbose: bool = False
) -> WrittenMaps:
    """Writes the saliency map of each image, on the cluster that RAY_ADDRESS names or on a local Ray.

        <name>.png       8-bit gray of the image's size: 0 is background, 255 is certainly an object
        saliency.json    the detector that made the maps
        rejects.csv      the images that cannot be read, and the reasons

    Maps that are newer than their images are kept, so a call continues an interrupted one.

    Args:
        make_detector: Makes the detector, in each process.
        images: Columns `name`, a relative path without suffix, and `uri`.
        out: Absolute path of the folder of maps, which all nodes reach.
        config: Limits of images, and the section `compute`.
        verbose: Whether to print the workers' output.

    Raises:
        UserError: The detector cannot be used, or `out` has maps of another detector or files of other origin.
    """
    detector = make_detector()
    detector(np.full((64, 64, 3), 127, np.uint8))  # raises an error if the network cannot be used

    files = [str(_map_file(out, name)) for name in images["name"].to_pylist()]
    map_stamps = stamps(files)
    _check_out(out, detector.settings, [file for file, found in zip(files, map_stamps, strict=True) if found])
    _check_images_are_kept(images["uri"].to_pylist(), files)
    write_json(out / RECORD, dataclasses.asdict(detector.settings))

    is_missing: list[bool] = []
    for map_stamp, image_stamp in zip(map_stamps, stamps(images["uri"].to_pylist()), strict=True):
        is_missing.append(map_stamp is None or image_stamp is None or map_stamp.changed < image_stamp.changed)
    missing = images.filter(pa.array(is_missing, pa.bool_()))
    if len(missing) < len(images):
        console.print(f"{len(images) - len(missing)} of {len(images)} maps are newer than their images and are kept")

    make_worker = functools.partial(MapSaliency, make_detector, detector.settings, out, config.data)
    rejected = _map(missing, make_worker, out, config, verbose=verbose) if len(missing) else []
    write_bytes(out / REJECTS, csv_table(["image", "reason"], [[row["uri"], row["reason"]] for row in rejected]))
    return WrittenMaps(
        new=len(missing) - len(rejected),
        kept=len(images) - len(missing),
        rejected={row["name"]: row["reason"] for row in rejected},
    )


def _map_file(out: Path, name: str) -> Path:
    """Returns the file of a map."""
    return out / f"{name}.png"


def _map(
    images: pa.Table, make_worker: Callable[[], MapSaliency], out: Path, config: Config, *, verbose: bool
) -> list[dict[str, str]]:
    """Writes maps on all nodes. Returns the name and URI of each image that cannot be read, and the reason."""
    # All nodes reach a folder in `out`. It is removed after Ray has ended, when no task can write to it any more.
    with tempfile.TemporaryDirectory(dir=out, prefix=".", ignore_cleanup_errors=True) as folder:
        with ray_session(config.compute, verbose=verbose):
            map_table(
                images,
                Path(folder),
                make_worker=make_worker,
                label="saliency",
                compute=config.compute,
                shard_rows=min(config.compute.shard_rows, _SHARD_ROWS),
                memory_hint=f"lower data.max_pixels, or {fewer_processes()}",
            )
        rows = read_table(Path(folder)).to_pylist()
    return [row for row in rows if row["reason"] is not None]


def _check_out(out: Path, settings: DetectorSettings, present: list[str]) -> None:
    """Checks that a folder has only maps that the detector made.

    Args:
        out: The folder.
        settings: The detector.
        present: The maps, among those to be written, that exist.
    """
    expected = f"a new folder, or one with maps that `mcis saliency` made with {settings.name}"
    remedy = "remove the folder, or choose another --out"
    try:
        earlier = read_record_of(out / RECORD, DetectorSettings, expected, remedy)
    except FileNotFoundError:
        if present:
            found = f"{len(present)} files in {out} that `mcis saliency` did not write: {join_shortened(present)}"
            raise UserError(found, expected, "choose another --out") from None
        return

    if earlier != settings:
        before = dataclasses.asdict(earlier)
        after = dataclasses.asdict(settings)
        differences = [f"{key} {before[key]}, not {after[key]}" for key in before if before[key] != after[key]]
        raise UserError(
            f"{out} has maps of another network or preprocessing: {'; '.join(differences)}", expected, remedy
        )


def _check_images_are_kept(uris: list[str], files: list[str]) -> None:
    """Checks that no map would overwrite an image."""
    overwritten = sorted(set(uris) & set(files))
    if overwritten:
        raise UserError(
            f"{len(overwritten)} saliency maps would overwrite images: {join_shortened(overwritten)}",
            "a folder without images",
            "choose another --out",
        )
