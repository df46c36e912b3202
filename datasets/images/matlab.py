"""The MATLAB files of SBD's masks -> labels. What it needs of "MAT-File Level 5 File Format", and no more.

`scipy.io.loadmat` ends the whole process, by a segmentation fault, on files with some wrong bits.
"""

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from mcis.datasets.images.decode import RejectedImage, rejecting

_MAX_MAT = 2**24
"""Most bytes of a MATLAB file, compressed and decompressed: 16 MiB; the largest of SBD have a few hundredths of it."""
MAT_START = b"MATLAB 5.0"
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Data type of a MATLAB element, by its number (MAT-File Level 5 File Format, table 1-1) -> numpy's name."""


def decode_mat_labels(data: bytes) -> np.ndarray:
    """Bytes of SBD's cls/<id>.mat -> (H, W) uint8 labels: GTcls.Segmentation, in VOC's numbering.

    Raises:
        RejectedImage: no MATLAB 5 file, damaged, without that variable, or with values that are no labels.
    """
    with rejecting():
        if not data.startswith(MAT_START):
            raise RejectedImage("not an image: expected a MATLAB 5.0 file")
        order, allowed = "<" if data[126:128] == b"IM" else ">", _MAX_MAT
        for data_type, content in _elements(memoryview(data)[128:], order):
            if data_type == _COMPRESSED:
                content = memoryview(zlib.decompressobj().decompress(content, allowed + 1))
            allowed -= len(content)
            if allowed < 0:
                raise RejectedImage(f"too large: a MATLAB file of more than {_MAX_MAT} bytes")
            if data_type == _COMPRESSED:
                data_type, content = next(_elements(content, order))
            if data_type == _MATRIX:
                _, _, (_, name), *parts = _elements(content, order)
                if name == b"GTcls":
                    return _segmentation(parts, order)
        raise RejectedImage("unsupported: a MATLAB file without a variable GTcls")


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The data elements that follow each other in a MATLAB file or matrix: type and content."""
    offset = 0
    while offset < len(data):
        data_type, size = struct.unpack_from(f"{order}II", data, offset)
        if data_type >> 16:  # the small format: size, type and up to 4 bytes of content in 8
            data_type, size, start, offset = data_type & 0xFFFF, data_type >> 16, offset + 4, offset + 8
        else:
            start = offset + 8
            offset = start + size + (0 if data_type == _COMPRESSED else -size % 8)
        if start + size > len(data):
            raise RejectedImage("truncated: a MATLAB file ends within an element")
        yield data_type, data[start : start + size]


def _segmentation(parts: list[tuple[int, memoryview]], order: str) -> np.ndarray:
    """The elements behind the name of a struct of 1x1 -> its field Segmentation, (H, W) uint8."""
    (_, length), (_, names), *values = parts
    (step,) = struct.unpack_from(f"{order}i", length)
    fields = [bytes(names[at : at + step]).partition(b"\0")[0] for at in range(0, len(names), step)]
    if b"Segmentation" not in fields:
        raise RejectedImage("unsupported: a MATLAB file without GTcls.Segmentation")
    _, matrix = values[fields.index(b"Segmentation")]
    (_, flags), (_, sizes), _, (data_type, numbers), *imaginary = _elements(matrix, order)
    shape = np.frombuffer(sizes, f"{order}i4")
    if not 6 <= flags[0 if order == "<" else 3] <= 15 or data_type not in _NUMBERS or imaginary:
        raise RejectedImage("unsupported: GTcls.Segmentation is no matrix of plain numbers")
    if len(shape) != 2 or shape.min() < 1:
        raise RejectedImage(f"unsupported: GTcls.Segmentation has the shape {shape.tolist()}")
    matrix_values = np.frombuffer(numbers, f"{order}{_NUMBERS[data_type]}").reshape(tuple(shape), order="F")
    with np.errstate(invalid="ignore"):
        labels = np.ascontiguousarray(matrix_values, np.uint8)
    if (labels != matrix_values).any():
        raise RejectedImage("unsupported: GTcls.Segmentation holds values other than 0..255")
    return labels
