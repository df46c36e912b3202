"""Reads and writes data sets in the format of Ultralytics YOLO."""

import functools
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    ExportRequest,
    Format,
    ImportRequest,
    Photos,
    naming,
    photograph_files,
    visible_files,
    write_file,
)
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.formats.outlines import polygon_pixels
from mcis.datasets.formats.photographs import write_photograph
from mcis.datasets.formats.regions import connected_regions, region_outline
from mcis.datasets.sources.lists import LeftOut
from mcis.datasets.storage.files import existing_spelling

_DESCRIPTIONS = ("data.yaml", "dataset.yaml", "classes.txt")
"""Files that describe a data set, in the order in which they are tried."""
_MAX_COORDINATE = 2
"""Coordinates are fractions of the image's sides. Larger values than this are pixels."""

_PIXEL_QUARTER = 0.25
"""Offset of written corners into their pixel, so that rounding in a reader finds the same pixel."""


class _Description(NamedTuple):
    """Content of the file that describes a data set.

    Attributes:
        path: Path of the file.
        content: Content of the YAML file; only `names` for a file of class names.
        names: Class number -> class name.
    """

    path: Path
    content: dict[str, Any]
    names: dict[int, str]


def read_yolo(request: ImportRequest) -> DataSet:
    """Reads label files of lines `<class> <x> <y> <width> <height>` or `<class> <x> <y> <x> <y> ...`."""
    description = _read_description(request.source)
    folder, listed = _image_folder(description, request)
    above, _, below = f"{folder}/".rpartition("/images/")
    label_folder = Path(f"{above}/labels/{below}")  # tools replace the last folder `images` of a path by `labels`
    if not label_folder.is_dir() or not folder.is_dir():
        raise ValueError(f"no folders {folder} and {label_folder}")

    photos: Photos = {}
    label_files: set[Path] = set()
    for name in listed or photograph_files(visible_files(folder, request.left_out), folder, request):
        label_file = Path(existing_spelling(str((label_folder / name).with_suffix(".txt"))))
        if label_file.exists():
            label_files.add(label_file)
            with naming(label_file):
                photos[name] = _read_label_file(label_file, description)
        else:
            photos[name] = []
            request.left_out["missing label file(s), whose photographs show none of the classes"] += 1

    if not listed:  # label files of images that are not listed belong to other splits
        request.left_out["label file(s) without an image"] = _num_other_labels(label_folder, label_files)
    return DataSet(folder, photos)


def _num_other_labels(folder: Path, label_files: Collection[Path]) -> int:
    """Returns the number of label files below a folder that are not in `label_files`."""
    count = 0
    for name in visible_files(folder, LeftOut()):
        file = folder / name
        is_label_file = file.suffix.lower() == ".txt" and file.name not in _DESCRIPTIONS
        if is_label_file and file not in label_files:
            count += 1
    return count


def _read_description(source: Path) -> _Description:
    yaml = require_module("yaml")
    candidates = [source / name for name in _DESCRIPTIONS] if source.is_dir() else [source]
    path = next((candidate for candidate in candidates if candidate.exists()), None)
    if path is None:
        raise ValueError(f"no file {' or '.join(_DESCRIPTIONS)}")

    if path.suffix in (".yaml", ".yml"):
        content = yaml.load(path.read_text("utf-8"), yaml.BaseLoader)  # texts only: names may be yes, 0 or null
    else:
        content = {"names": _read_names(path)}
    return _Description(path, content, _numbered_names(content["names"]))


def _read_names(path: Path) -> list[str]:
    """Reads a file of class names: line i, counted from 0, is the name of class i."""
    names = [line.strip() for line in path.read_text("utf-8-sig").rstrip().splitlines()]
    if not names or "" in names:
        raise ValueError(f"{path} is empty, or a line before a class name is blank")
    return names


def _numbered_names(names: Any) -> dict[int, str]:
    """Returns class number -> class name, from a list of names or a dictionary with numbers.

    Raises:
        ValueError: It is neither, or a name is no text.
    """
    numbered = names if isinstance(names, dict) else dict(enumerate(names))
    if isinstance(names, str) or not all(isinstance(name, str) for name in numbered.values()):
        raise ValueError("`names` is not a list of class names")
    return {int(number): name for number, name in numbered.items()}


def _image_folder(description: _Description, request: ImportRequest) -> tuple[Path, Sequence[str]]:
    """Returns the folder of a split's images, and their names in it if the description names a list of images.

    Tools write the folder relative to the description, to its key `path`, or to a folder `data`. A folder outside of
    the data set is not used.
    """
    source = description.path.parent
    location = description.content.get(request.split, f"images/{request.split}")
    if not location or not isinstance(location, str):
        raise ValueError(f"{request.split} of {description.path} does not name a folder or a list of images")

    listed: Sequence[str] = ()
    if location.endswith(".txt"):
        text = (source / location.lstrip("./")).read_text("utf-8-sig")
        paths = [line for line in text.replace("\\", "/").splitlines() if line.strip()]
        if paths:
            location = os.path.commonpath([os.path.dirname(path) for path in paths])
            listed = sorted({path.strip().partition(f"{location}/")[2] for path in paths})

    if request.images:
        return request.images.resolve(), listed

    base = str(description.content.get("path", ""))
    for relative in (location.lstrip("./"), Path(base, location), location.removeprefix("data/")):
        folder = (source / relative).resolve()
        if folder.is_dir() and folder.is_relative_to(source):
            return folder, listed
    return source / location.lstrip("./"), listed


def _read_label_file(path: Path, description: _Description) -> list[AnnotatedObject]:
    objects: list[AnnotatedObject] = []
    for line in path.read_text("utf-8-sig").splitlines():
        if line.strip():
            objects.append(_read_label(line, description))
    return objects


def _read_label(line: str, description: _Description) -> AnnotatedObject:
    """Reads a line of a label file: a class, the numbers of a box or polygon, and maybe a confidence."""
    values = np.array(line.split(), float)
    is_valid = len(values) >= 5 and np.isfinite(values).all() and values[0] in description.names
    if not is_valid or values[1:5].max() > _MAX_COORDINATE:
        last = len(description.names) - 1
        wanted = f"a class 0..{last} with a box or polygon in fractions of the image's sides"
        raise ValueError(f"a line that is not {wanted}")

    coordinates = values[1:]
    has_confidence = len(coordinates) % 2 == 1
    if has_confidence:
        coordinates = coordinates[:-1]
    corners = coordinates.reshape(-1, 2)
    is_polygon = len(corners) > 2 and "kpt_shape" not in description.content  # not a box with keypoints
    draw = functools.partial(polygon_pixels, corners) if is_polygon else None
    return AnnotatedObject(description.names[int(values[0])].strip(), draw)


def write_yolo(request: ExportRequest) -> int:
    """Writes `labels/<name>.txt` with polygons through the outermost pixels, `images/<name>.jpg` and `data.yaml`."""
    count = 0
    for image in request.images:
        # Readers replace the last folder `images` of a path by `labels`, so other folders get another name.
        name = re.sub(r"(?<![^/])(_*images)(?=/)", r"_\1", image.name)
        lines = _label_lines(image.labels, request.min_area)
        write_file(request.out / "labels" / f"{name}.txt", "".join(lines))
        path = request.out / "images" / f"{name}.jpg"
        write_photograph(image.uri, image.content_hash, path, image.value_range)
        count += len(lines)

    names = json.dumps(list(request.classes), ensure_ascii=False)  # JSON is YAML, but not its pairs of surrogates
    comment = "# the same images: name others for scores on unseen images"
    write_file(request.out / "data.yaml", f"train: images\nval: images  {comment}\nnames: {names}\n")
    return count


def _label_lines(labels: NDArray[np.uint8], min_area: int) -> list[str]:
    """Returns a line for each region of a label mask (H, W): its class and polygon."""
    height, width = labels.shape
    lines: list[str] = []
    for region in connected_regions(labels, min_area):
        outline = region_outline(region.pixels) + region.corner
        polygon = (outline + _PIXEL_QUARTER) / (width, height)
        coordinates = " ".join(f"{value:.6f}" for value in polygon.flat)
        lines.append(f"{region.label - 1} {coordinates}\n")
    return lines


YOLO = Format(
    read_yolo,
    "a folder with data.yaml or classes.txt, images/... and labels/...; --images is the folder of the split's images "
    "if data.yaml does not name it and it is not images/SPLIT",
    write_yolo,
    copies_images=True,
)
