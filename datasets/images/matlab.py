"""Reads labels from the MATLAB files of SBD.

Implements the small part of "MAT-File Level 5 File Format" that these files need. `scipy.io.loadmat` is not used: some
corrupt files make it end the whole process with a segmentation fault.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mcis.datasets.images.decode import RejectedImage, rejecting

MAT_START = b"MATLAB 5.0"
"""First bytes of a MATLAB 5 file."""
_HEADER_BYTES = 128
"""Size of the header before the first data element, bytes."""
_MAX_MAT = 2**24
"""Largest MATLAB file, compressed and decompressed bytes together: 16 MiB. SBD's largest have a few percent of it."""

# Data types of MATLAB elements (MAT-File Level 5 File Format, table 1-1)
_BYTES = 2
_MATRIX = 14
_COMPRESSED = 15

# Classes of arrays that hold real numbers, double to uint64 (table 1-3)
_FIRST_NUMERIC = 6
_LAST_NUMERIC = 15


class _Element(NamedTuple):
    """A data element of a MATLAB file: its data type and its content."""

    data_type: int
    content: memoryview


def decode_mat_labels(data: bytes) -> np.ndarray:
    """Decodes SBD's cls/<id>.mat to (H, W) uint8 labels: the variable GTcls.Segmentation, in VOC's numbering.

    Raises:
        RejectedImage: The data is no MATLAB 5 file, is damaged, lacks that variable, or its values are not bytes.
    """
    with rejecting():
        if not data.startswith(MAT_START):
            raise RejectedImage("not an image: expected a MATLAB 5.0 file")

        bytes_left = _MAX_MAT
        for element in _elements(memoryview(data)[_HEADER_BYTES:]):
            content = element.content
            compressed = element.data_type == _COMPRESSED
            if compressed:
                content = memoryview(zlib.decompressobj().decompress(content, bytes_left + 1))

            bytes_left -= len(content)
            if bytes_left < 0:
                raise RejectedImage(f"too large: a MATLAB file of more than {_MAX_MAT} bytes")

            variable = next(_elements(content)) if compressed else element
            if variable.data_type == _MATRIX:
                _flags, _shape, name, *parts = _elements(variable.content)
                if name.content == b"GTcls":
                    return _segmentation(parts)

        raise RejectedImage("unsupported: a MATLAB file without a variable GTcls")


def _elements(data: memoryview) -> Iterator[_Element]:
    """Yields the data elements that follow each other in a MATLAB file or matrix."""
    offset = 0
    while offset < len(data):
        data_type, size = struct.unpack_from("<II", data, offset)

        if data_type >> 16:  # small format: size, type and up to 4 bytes of content in 8 bytes
            size = data_type >> 16
            data_type &= 0xFFFF
            start = offset + 4
            offset += 8
        else:
            start = offset + 8
            padding = 0 if data_type == _COMPRESSED else -size % 8
            offset = start + size + padding

        if start + size > len(data):
            raise RejectedImage("truncated: a MATLAB file ends within an element")
        yield _Element(data_type, data[start : start + size])


def _segmentation(parts: list[_Element]) -> np.ndarray:
    """Returns the field Segmentation of a 1x1 struct, (H, W) uint8, from the elements that follow the struct's name."""
    name_length, names, *values = parts
    (step,) = struct.unpack_from("<i", name_length.content)
    starts = range(0, len(names.content), step)
    fields = [bytes(names.content[start : start + step]).partition(b"\0")[0] for start in starts]
    if b"Segmentation" not in fields:
        raise RejectedImage("unsupported: a MATLAB file without GTcls.Segmentation")

    matrix = values[fields.index(b"Segmentation")].content
    flags, sizes, _name, numbers, *imaginary = _elements(matrix)
    array_class = flags.content[0]
    numeric = _FIRST_NUMERIC <= array_class <= _LAST_NUMERIC
    if not numeric or numbers.data_type != _BYTES or imaginary:
        raise RejectedImage("unsupported: GTcls.Segmentation is no matrix of bytes")

    shape = np.frombuffer(sizes.content, "<i4")
    if len(shape) != 2 or shape.min() < 1:
        raise RejectedImage(f"unsupported: GTcls.Segmentation has the shape {shape.tolist()}")
    return np.ascontiguousarray(np.frombuffer(numbers.content, np.uint8).reshape(tuple(shape), order="F"))
