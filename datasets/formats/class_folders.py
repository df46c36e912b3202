"""Reads folders that are named after classes."""

import errno
import hashlib

from mcis.datasets.formats.data_set import (
    AnnotatedObject,
    DataSet,
    Format,
    ImportRequest,
    Photos,
    photograph_files,
    visible_files,
)
from mcis.datasets.sources.tagged import SPLITS
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import MAX_BYTES, read_bytes

_SPLIT_FOLDERS = {*SPLITS, "training", "valid", "validation", "dev", "testing"}
"""Names of folders of splits, in lower case."""


def read_class_folders(request: ImportRequest) -> DataSet:
    """Reads <class>/.../<image>. Files with equal content are one photograph with several tags."""
    source = request.source
    visible = visible_files(source, request.left_out)
    if {"Annotations", "JPEGImages"} <= {name.partition("/")[0] for name in visible}:
        raise ValueError("folders of Pascal VOC, not of classes")

    files = photograph_files(visible, source, request)
    folders = {name.partition("/")[0] for name in files if "/" in name}
    if not folders:
        raise ValueError(f"{len(files)} files are in no class folder")
    if {folder.casefold() for folder in folders} <= _SPLIT_FOLDERS:
        raise ValueError(
            "folders of splits, not of classes: import each of them by its own command, as train and as val"
        )

    photos: Photos = {}
    first_names: dict[str, str] = {}  # by content
    for name in files:
        folder, separator, _ = name.partition("/")
        if not separator:
            request.left_out["file(s) that are in no class folder"] += 1
            continue

        try:
            content = read_bytes(f"{source}/{name}")
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise ValueError(f"{name}: {error_text(error)}") from error
            request.left_out[f"file(s) of more than {MAX_BYTES // 2**20} MiB"] += 1
            continue

        content_hash = hashlib.sha256(content).hexdigest()
        first_name = first_names.setdefault(content_hash, name)
        if first_name != name:
            request.left_out["further copies of photographs"] += 1
        photos.setdefault(first_name, []).append(AnnotatedObject(folder))

    return DataSet(source, photos)


FOLDERS = Format(
    read_class_folders, "a folder of <class>/.../<image>; a photograph in several folders has several tags"
)
