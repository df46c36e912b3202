"""Reads localization maps that other programs wrote as files: a file per image, or for PNG a file per map.

Names of files are the ids of the images, with or without the suffix of an image file.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.classes import MAX_CLASSES
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.formats.pickled_arrays import read_pickled_arrays
from mcis.datasets.images.decode import PILLOW_MAX_PIXELS
from mcis.datasets.images.saliency_maps import decode_saliency
from mcis.datasets.sources.lists import LeftOut, files_below, left_out_notes, source_folder
from mcis.datasets.storage.faults import error_text
from mcis.datasets.storage.files import read_bytes

_MAX_BYTES = 2**30
"""Maximum size of a file, 1 GiB."""
_MAX_VALUES = 2**28
"""Maximum number of values in the maps of an image, 1 GiB as float32."""
_TOLERANCE = 1e-3
"""How far a value may be outside of [0, 1] by rounding. It is then clipped."""


class FileMaps(NamedTuple):
    """The maps of an image, as its files have them.

    Attributes:
        classes: Class indices, (T,).
        maps: Scores in [0, 1], (T, H, W) float32, for any H and W.
    """

    classes: NDArray[np.int64]
    maps: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class MapFormat:
    """A format of map files, an entry of `MAP_FORMATS`.

    Attributes:
        content: What a file contains, for messages.
        read: Returns class indices and maps (T, H, W) of the files of an image.
        suffix: Suffix of the files.
        is_per_map: Whether each map has a file of its own, `<id>_<class index><suffix>`.
    """

    content: str
    read: Callable[[Sequence[str]], tuple[Any, Any]]
    suffix: str = ".npy"
    is_per_map: bool = False


def find_map_files(folder: Path, format: str) -> dict[str, list[str]]:
    """Finds the map files below a folder.

    Returns:
        Paths by the name of their image: the relative path without suffix, in the Unicode form NFC.

    Raises:
        UserError: The folder is missing or has no such file, something in it would be left out, or an image has two
            files in a format with one.
    """
    map_format = MAP_FORMATS[format]
    names = f"<image id>{'_<class index>' if map_format.is_per_map else ''}{map_format.suffix}"
    expected = f"maps in the format {format}: files {names}, {map_format.content}"
    remedy = "correct localize.maps (--maps), or choose another format by localize.maps_format (--maps-format)"
    root = source_folder(folder, expected, remedy)
    left_out = LeftOut()
    found: dict[str, list[str]] = {}
    for file in files_below(root, left_out):
        if not file.lower().endswith(map_format.suffix):
            continue
        name = unicodedata.normalize("NFC", file[: -len(map_format.suffix)])
        if map_format.is_per_map:
            name, _, number = name.rpartition("_")
            if not number.isdecimal():
                continue
        elif name in found:
            raise UserError(f"two map files of {name}: {found[name][0]} and {root}/{file}", "one", "remove one")
        found.setdefault(name, []).append(f"{root}/{file}")

    if left_out.total():
        raise UserError("; ".join(left_out_notes(str(root), left_out)), expected, "copy the files, or remove the links")
    if not found:
        raise UserError(f"no file {names} in {folder}", expected, remedy)
    return found


def read_map_files(files: Sequence[str], format: str, classes: int) -> FileMaps:
    """Reads the maps of an image.

    Args:
        files: Its files, one unless the format has a file per map.
        format: Name of the format.
        classes: K, number of classes.

    Raises:
        UserError: A file cannot be read, is in another format, or contains anything but arrays; a class index is not in
            0..K - 1 or occurs twice; a value is not a number in [0, 1]; or there are more than _MAX_VALUES values.
    """
    try:
        class_indices, maps = MAP_FORMATS[format].read(files)
        return _checked(class_indices, maps, classes)
    except (OSError, ValueError) as error:  # RejectedPickle and RejectedImage are ValueErrors
        raise UserError(
            f"the maps {join_shortened(list(files))} cannot be read: {error_text(error)}",
            f"maps in the format {format}: {MAP_FORMATS[format].content}; class indices from 0 to {classes - 1} and "
            "scores in [0, 1]",
            "write the file again, for scores with each map divided by its maximum; or choose another format by "
            "localize.maps_format (--maps-format)",
        ) from None


def _checked(class_indices: Any, maps: Any, num_classes: int) -> FileMaps:
    """Checks classes and maps. Raises ValueError if they are no maps of these classes with scores in [0, 1]."""
    indices = np.asarray(class_indices)
    scores = np.asarray(maps)
    if indices.size == 0 and scores.size == 0:
        return FileMaps(np.zeros(0, np.int64), np.zeros((0, 1, 1), np.float32))
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ValueError(f"class indices of type {indices.dtype} with the shape {indices.shape}")
    if scores.ndim != 3 or scores.dtype.kind not in "fiub" or len(scores) != len(indices) or not scores.size:
        raise ValueError(f"{len(indices)} class indices and maps of type {scores.dtype} with the shape {scores.shape}")
    _check_count(scores.size)
    if len(np.unique(indices)) < len(indices):
        raise ValueError("a class index occurs twice")
    if indices.min() < 0 or indices.max() >= num_classes:
        raise ValueError(f"class indices {indices.min()} to {indices.max()}")

    scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
        raise ValueError("a value that is not a finite number")
    if scores.min() < -_TOLERANCE or scores.max() > 1 + _TOLERANCE:
        raise ValueError(f"values from {scores.min():g} to {scores.max():g}")
    return FileMaps(indices.astype(np.int64), scores.clip(0, 1))


def _check_count(values: int) -> None:
    """Raises ValueError if the maps of an image have too many values."""
    if values > _MAX_VALUES:
        raise ValueError(f"{values} values, more than {_MAX_VALUES}")


def _record(files: Sequence[str]) -> Mapping[str | int, Any]:
    """Reads the pickled dictionary of an image."""
    (file,) = files
    return read_pickled_arrays(read_bytes(file, _MAX_BYTES))


def _value(record: Mapping[str | int, Any], names: Sequence[str]) -> Any:
    """Returns the first of several keys that a dictionary has."""
    for name in names:
        if name in record:
            return record[name]
    raise ValueError(f"the keys {join_shortened([str(key) for key in record])}, without {' or '.join(names)}")


def _keyed(
    files: Sequence[str], *, keys: str = "keys", maps: Sequence[str], has_background: bool = False
) -> tuple[Any, Any]:
    """Reads a dictionary with an array of class indices and an array of maps.

    Args:
        keys: Key of the class indices.
        maps: Keys of the maps; the first that exists is read.
        has_background: Whether the first map is that of the background, which has no class index.
    """
    record = _record(files)
    indices = _value(record, [keys])
    scores = _value(record, maps)
    if isinstance(indices, list) and all(isinstance(index, int | np.integer) for index in indices):
        indices = _index_array(indices)
    if not isinstance(indices, np.ndarray) or not isinstance(scores, np.ndarray) or scores.ndim == 0:
        raise ValueError(f"the values of {keys} or {maps[0]} are no arrays")
    return indices, scores[1:] if has_background else scores


def _index_array(indices: Sequence[int | np.integer[Any]]) -> NDArray[np.int64]:
    """Converts class indices, which may be too large for an array. Raises ValueError if they are no class indices."""
    others = [str(index) for index in indices if not 0 <= index < MAX_CLASSES]
    if others:
        raise ValueError(f"class indices {join_shortened(others)}")
    return np.array(indices, np.int64)


def _by_class(files: Sequence[str]) -> tuple[Any, Any]:
    """Reads a dictionary from class indices to maps."""
    record = _record(files)
    indices = [key for key in record if isinstance(key, int)]
    if len(indices) < len(record):
        raise ValueError(f"the keys {join_shortened([str(key) for key in record])}, which are no class indices")
    maps = list(record.values())
    if any(not isinstance(class_map, np.ndarray) or class_map.ndim != 2 for class_map in maps):
        raise ValueError("values that are no maps (H, W)")
    if len({class_map.shape for class_map in maps}) > 1:
        raise ValueError("maps of different sizes")
    _check_count(sum(class_map.size for class_map in maps))  # a short file can have the same map many times
    return _index_array(indices), np.stack(maps) if maps else np.zeros((0, 1, 1))


def _gray(files: Sequence[str]) -> tuple[Any, Any]:
    """Reads gray pictures `<id>_<class index>.png`."""
    indices = _index_array([int(Path(file).stem.rpartition("_")[2]) for file in files])
    max_pixels = min(PILLOW_MAX_PIXELS, _MAX_VALUES // len(files))
    maps = [decode_saliency(read_bytes(file), max_pixels=max_pixels) for file in files]
    if len({class_map.shape for class_map in maps}) > 1:
        raise ValueError("maps of different sizes")
    order = np.argsort(indices)
    return indices[order], np.stack(maps)[order].astype(np.float32) / 255


def _irn(files: Sequence[str]) -> tuple[Any, Any]:
    return _keyed(files, maps=("high_res", "cam"))


def _amn(files: Sequence[str]) -> tuple[Any, Any]:
    return _keyed(files, maps=("high_res", "cam"), has_background=True)


def _clip_es(files: Sequence[str]) -> tuple[Any, Any]:
    return _keyed(files, maps=("attn_highres",))


def _toco(files: Sequence[str]) -> tuple[Any, Any]:
    return _keyed(files, maps=("high_res",))


def _excel(files: Sequence[str]) -> tuple[Any, Any]:
    return _keyed(files, keys="keys_gt", maps=("valid_lam",))


_DICTIONARY = "a dictionary of `numpy.save`"
MAP_FORMATS: Mapping[str, MapFormat] = {
    "irn": MapFormat(content=f"{_DICTIONARY} with keys (C,) and high_res (C, H, W), or else cam (C, h, w)", read=_irn),
    "amn": MapFormat(content=f"{_DICTIONARY} as for irn, with C + 1 maps, the background first", read=_amn),
    "clip-es": MapFormat(content=f"{_DICTIONARY} with keys (C,) and attn_highres (C, H, W)", read=_clip_es),
    "toco": MapFormat(content=f"{_DICTIONARY} with keys (C,) and high_res (C, H, W)", read=_toco),
    "excel": MapFormat(content=f"{_DICTIONARY} with keys_gt (C,) and valid_lam (C, H, W)", read=_excel),
    "psa": MapFormat(content=f"{_DICTIONARY} from class indices to maps (H, W)", read=_by_class),
    "png": MapFormat(content="gray, 0 to 255", read=_gray, suffix=".png", is_per_map=True),
}
"""The formats, by the names of the programs that write them."""


def check_map_format(name: str) -> str:
    """Checks the name of a format; a validator of the configuration.

    Raises:
        ValueError: There is no such format.
    """
    if name not in MAP_FORMATS:
        raise ValueError(f"Input should be one of {', '.join(MAP_FORMATS)}")
    return name
