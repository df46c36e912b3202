"""Recognizes annotations of other tools by their content, and knows how to import each of them."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from mcis.datasets.errors import UserError

_FOLDERS = (".", "Annotations", "annotations", "dataset/annotations")
"""Folders, relative to that of a data set, where tools write its annotations."""
_WITH_IMAGES = "--images DIR --out OUT"
"""Options of `mcis import` for annotations that do not say where their images are."""
_MAX_BYTES = 2**28
"""Maximum size of a file that is opened to recognize it."""


class Annotations(NamedTuple):
    """Annotations of another tool.

    Attributes:
        name: Name of what was found, such as "annotations of LabelMe".
        remedy: How to import it.
        format: Format of `mcis import` that reads it as it is. None: it must be converted first.
    """

    name: str
    remedy: str
    format: str | None = None


def recognize_annotations(path: Path) -> Annotations | None:
    """Recognizes a file, or a folder by its first JSON or XML file.

    Returns:
        What was recognized, or None.
    """
    try:
        if path.is_file():
            return _recognize_file(path, path)
        if (path / "data.yaml").is_file():
            return _importable("a data set of YOLO", "yolo", path)
        for file in _first_files(path):
            return _recognize_file(file, path)
    except (OSError, ValueError, RecursionError, ElementTree.ParseError):
        pass
    return None


def _importable(name: str, format: str, source: Path, options: str = "--out OUT") -> Annotations:
    """Returns annotations that `mcis import` reads as they are."""
    return Annotations(name, f"mcis import {format} {shlex.quote(str(source))} {options}", format)


def refuse_annotations(path: Path) -> None:
    """Raises a UserError for annotations of another tool that are given instead of a table of images and tags."""
    annotations = recognize_annotations(path)
    if annotations is not None:
        raise UserError(f"{path} holds {annotations.name}", "a table of images and tags", annotations.remedy)


def _first_files(folder: Path) -> Iterable[Path]:
    """Yields the first JSON and the first XML file of each folder in which annotations may be."""
    for subfolder in _FOLDERS:
        for pattern in ("*.json", "*.xml"):
            yield from sorted((folder / subfolder).glob(pattern))[:1]


def _recognize_file(file: Path, source: Path) -> Annotations | None:
    """Recognizes a file of a data set.

    Args:
        source: The data set: the file, or a folder that contains it.
    """
    if file.stat().st_size > _MAX_BYTES:
        return None
    content = file.read_bytes()
    if content.lstrip(b"\xef\xbb\xbf \n\r\t").startswith(b"<"):
        return _recognize_xml(ElementTree.fromstring(content), file, source)
    return _recognize_json(json.loads(content), file, source)


def _recognize_xml(root: ElementTree.Element, file: Path, source: Path) -> Annotations | None:
    folder = source if source.is_dir() else source.parent
    if root.tag == "annotation":
        return _importable("annotations of Pascal VOC", "vocxml", folder)
    if root.tag == "annotations" and root.find("track") is not None:
        return Annotations("annotations of a video by CVAT", "export them from CVAT as `CVAT for images`")
    if root.tag == "annotations":
        return _importable("annotations of CVAT", "cvat", file, _WITH_IMAGES)
    return None


def _recognize_json(content: Any, file: Path, source: Path) -> Annotations | None:
    folder = source if source.is_dir() else source.parent
    first = content[0] if isinstance(content, list) and content else content
    if not isinstance(first, dict):
        return None
    keys = set(first)
    values = [value for value in first.values() if isinstance(value, dict)]

    if isinstance(content, list) and {"image_id", "category_id"} <= keys:
        return Annotations(
            "a list of COCO's results, which name neither files nor classes",
            "import the file of annotations (instances_....json) for which the results were computed",
        )
    if isinstance(content, list) and "data" in keys:
        return _importable("tasks of Label Studio", "labelstudio", file, _WITH_IMAGES)
    if isinstance(content, list):
        return None
    if {"shapes", "imagePath"} <= keys:
        return _importable("annotations of LabelMe", "labelme", folder)
    if "_via_img_metadata" in keys or any({"regions", "filename"} <= set(value) for value in values):
        return Annotations(
            "annotations of VIA",
            "in VIA, choose `Annotation`, `Export Annotations (COCO format)`; then: mcis import coco FILE --images DIR "
            "--out OUT",
        )
    if {"items", "categories"} <= keys:
        return Annotations(
            "a data set of Datumaro",
            'pip install datumaro in another environment, there: python -c "import datumaro as d; '
            "d.Dataset.import_from('DIR', 'datumaro').export('made', 'coco_instances', save_media=True)\"; "
            "then: mcis import coco made/annotations/instances_train.json --images made/images/train --out OUT",
        )
    if "images" in keys:
        return _importable("annotations of COCO", "coco", file, _WITH_IMAGES)
    return None
