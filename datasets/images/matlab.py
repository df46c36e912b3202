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
_BYTES, _MATRIX, _COMPRESSED = 2, 14, 15
"""Data types of MATLAB elements (MAT-File Level 5 File Format, table 1-1)."""


def decode_mat_labels(data: bytes) -> np.ndarray:
    """Bytes of SBD's cls/<id>.mat -> (H, W) uint8 labels: GTcls.Segmentation, in VOC's numbering. RejectedImage where
    they are no MATLAB 5 file, damaged, lack that variable, or have values that are no bytes, as SBD's are."""
    with rejecting():
        if not data.startswith(MAT_START):
            raise RejectedImage("not an image: expected a MATLAB 5.0 file")
        allowed = _MAX_MAT
        for data_type, content in _elements(memoryview(data)[128:]):
            if data_type == _COMPRESSED:
                content = memoryview(zlib.decompressobj().decompress(content, allowed + 1))
            allowed -= len(content)
            if allowed < 0:
                raise RejectedImage(f"too large: a MATLAB file of more than {_MAX_MAT} bytes")
            if data_type == _COMPRESSED:
                data_type, content = next(_elements(content))
            if data_type == _MATRIX:
                _, _, (_, name), *parts = _elements(content)
                if name == b"GTcls":
                    return _segmentation(parts)
        raise RejectedImage("unsupported: a MATLAB file without a variable GTcls")


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The data elements that follow each other in a MATLAB file or matrix: type and content."""
    offset = 0
    while offset < len(data):
        data_type, size = struct.unpack_from("<II", data, offset)
        if data_type >> 16:  # the small format: size, type and up to 4 bytes of content in 8
            data_type, size, start, offset = data_type & 0xFFFF, data_type >> 16, offset + 4, offset + 8
        else:
            start = offset + 8
            offset = start + size + (0 if data_type == _COMPRESSED else -size % 8)
        if start + size > len(data):
            raise RejectedImage("truncated: a MATLAB file ends within an element")
        yield data_type, data[start : start + size]


def _segmentation(parts: list[tuple[int, memoryview]]) -> np.ndarray:
    """The elements behind the name of a struct of 1x1 -> its field Segmentation, (H, W) uint8."""
    (_, length), (_, names), *values = parts
    (step,) = struct.unpack_from("<i", length)
    fields = [bytes(names[at : at + step]).partition(b"\0")[0] for at in range(0, len(names), step)]
    if b"Segmentation" not in fields:
        raise RejectedImage("unsupported: a MATLAB file without GTcls.Segmentation")
    _, matrix = values[fields.index(b"Segmentation")]
    (_, flags), (_, sizes), _, (data_type, numbers), *imaginary = _elements(matrix)
    shape = np.frombuffer(sizes, "<i4")
    if not 6 <= flags[0] <= 15 or data_type != _BYTES or imaginary:
        raise RejectedImage("unsupported: GTcls.Segmentation is no matrix of bytes")
    if len(shape) != 2 or shape.min() < 1:
        raise RejectedImage(f"unsupported: GTcls.Segmentation has the shape {shape.tolist()}")
    return np.ascontiguousarray(np.frombuffer(numbers, np.uint8).reshape(tuple(shape), order="F"))
