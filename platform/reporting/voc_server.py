"""Predictions -> the archive that PASCAL VOC's evaluation server takes, and what is wrong with such an archive.

An archive comes from anywhere: none of its members becomes a file, and what is no mask by its name is a problem.
"""

import gzip
import io
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.images.decode import MOST_PIXELS, RejectedImage, decode_labels
from mcis.datasets.images.squares import read_picture
from mcis.datasets.index import shown
from mcis.platform.outputs.read_index import open_index
from mcis.platform.reporting.files import names_of, rows_of, table_of
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.progress import bar
from mcis.platform.runs.results import PredictResult, read_result
from mcis.platform.runs.workspace import Workspace

COUNTS = {"test": 1456, "val": 1449, "train": 1464}
"""Images of VOC 2012's lists of segmentation; the server takes those of test."""
_FOLDER = "results/VOC2012/Segmentation/comp6_{split}_cls"
_MASK = re.compile(_FOLDER.format(split=f"({'|'.join(COUNTS)})") + r"/([\w.-]+)\.png")
_MOST_BYTES, _MOST_OF_A_MASK = 2**27, 2**20
"""Largest archive, unpacked, and what is read of a mask, bytes: those of VOC take a tenth and a hundredth of it."""
_MOST_PIXELS = 2**20
"""Most pixels of a mask; VOC's images have a quarter."""


def export_submission(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the predictions of a run as a .tar.gz; returns what it wrote, in words.

    Its members are `results/VOC2012/Segmentation/comp6_<split>_cls/<id>.png`, palette PNGs, after the CRF where there
    is one; comp6 is the competition that allows images beside VOC's, such as those that pretrained weights come from.

    Raises:
        UserError: the run has no predictions, its classes are not VOC's, or its ids are no names.
    """
    classes, table = open_index(workspace, name).classes, table_of(workspace, name, "predict", "predictions")
    if classes != VOC_CLASSES:
        raise UserError(
            f"a run of the classes {shown(classes)}", "VOC's 20 classes in their order", "export predictions instead"
        )
    split = read_result(table.parent, PredictResult).split
    names = names_of((row["image_id"] for row in rows_of(table, ["image_id"])), out)
    folder = _FOLDER.format(split=split)
    with (
        written_aside(out) as aside,
        tarfile.open(aside, "w:gz") as archive,
        bar("export voc-server", len(names), "images") as progress,
    ):
        for done, row in enumerate(rows_of(table), 1):
            png = row["crf"] or row["plain"]
            member = tarfile.TarInfo(f"{folder}/{names[row['image_id']]}.png")
            member.size = len(png)
            archive.addfile(member, io.BytesIO(png))
            progress.update(done)
    for_server = "" if split == "test" else "; the server takes split test alone (data.test_list, predict.split=test)"
    return f"{len(names)} predictions of split {split} in {out}{for_server}"


def submission_problems(
    file: Path, *, ids: Collection[str] | None = None, images: Path | None = None
) -> tuple[int, list[str]]:
    """How many masks an archive has, and what the server would refuse of it, a line each.

    Args:
        ids: names of the images, one mask of each; None = as many as VOC 2012 has.
        images: folder of <id>.jpg, whose sizes the masks must have; None = sizes are not compared.

    Raises:
        UserError: an image of the folder is missing; or the file cannot be read as `_members` does.
    """
    problems: list[str] = []
    found: dict[str, str] = {}
    with bar("check", len(ids) if ids is not None else COUNTS["test"], "masks") as progress:
        for member, content in _members(file):
            named = _MASK.fullmatch(member)
            if named is None or content is None:
                problems.append(f"stray member {member!r}")
                continue
            split, image_id = named.groups()
            if image_id in found:
                problems.append(f"{member} is there twice")
            found[image_id] = split
            known = images if ids is None or image_id in ids else None
            shape = _shape(known / f"{image_id}.jpg") if known else None
            problems += [f"{member}: {problem}" for problem in _mask_problems(content, shape)]
            progress.update(len(found))
    return len(found), [*_set_problems(found, ids), *problems]


def _set_problems(found: Mapping[str, str], ids: Collection[str] | None) -> Iterator[str]:
    """What is wrong with the set of masks: `found` is the split of each id."""
    splits = sorted(set(found.values()))
    if len(splits) > 1:
        yield f"masks of several splits: {', '.join(splits)}"
    if ids is None:
        expected = COUNTS[splits[0] if splits else "test"]
        if len(found) != expected:
            yield f"{len(found)} masks; expected {expected}, as many as VOC 2012 has images in that split"
        return
    missing, others = sorted(set(ids) - set(found)), sorted(set(found) - set(ids))
    if missing:
        yield f"no mask of {len(missing)} image(s): {shown(missing)}"
    if others:
        yield f"masks of {len(others)} other image(s): {shown(others)}"


def _mask_problems(content: bytes, shape: tuple[int, int] | None) -> Iterator[str]:
    """What is wrong with a mask, whose image has the height and width `shape` where that is known."""
    try:
        labels = decode_labels(content, max_pixels=_MOST_PIXELS)
    except RejectedImage as error:
        yield error.reason
        return
    if Image.open(io.BytesIO(content), formats=("PNG",)).mode != "P":
        yield "no palette"
    if shape is not None and labels.shape != shape:
        yield f"{labels.shape[1]}x{labels.shape[0]} pixels; its image has {shape[1]}x{shape[0]}"
    above = np.unique(labels[labels > len(VOC_CLASSES)]).tolist()
    if above:
        yield f"labels {', '.join(map(str, above[:5]))}; expected 0..{len(VOC_CLASSES)}"


def _shape(image: Path) -> tuple[int, int]:
    """Height and width of an image, pixels."""
    try:
        return read_picture(str(image), max_pixels=MOST_PIXELS)[1:]
    except RejectedImage as error:
        raise UserError(f"the image {image} cannot be read ({error})", "<id>.jpg of each mask", "add it") from None


def _members(file: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of each member of an archive but folders; None for what is no file.

    It is unpacked in memory and within bounds: whatever a header says, no more is read than there is.

    Raises:
        UserError: it is no .tar.gz, is damaged, or is larger than masks are.
    """
    try:
        with gzip.open(file) as stream:
            unpacked = stream.read(_MOST_BYTES + 1)
        if len(unpacked) > _MOST_BYTES:
            raise tarfile.ReadError(f"more than {_MOST_BYTES} bytes, unpacked")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if not member.isdir():
                    yield member.name, content.read(_MOST_OF_A_MASK) if content else None
    except Exception as error:  # whatever damaged bytes make gzip and tarfile raise
        raise UserError(
            f"{file}: cannot be read ({type(error).__name__}: {unquoted(error)[:200]})",
            f"a .tar.gz of {_FOLDER.format(split='test')}/<id>.png",
            "make it again by `mcis export voc-server`",
        ) from None
