"""Reads weights of ResNet-38 in MXNet's format, the format of the ImageNet weights that PSA (Ahn and Kwak, CVPR 2018)
starts from, ilsvrc-cls_rna-a1_cls1000_ep-0001.params of github.com/itijyou/ademxapp.

The format is that of `mxnet.nd.save`: little-endian, a list of arrays followed by a list of their names.
"""

import math
import re
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_LIST_MAGIC = 0x112
_ARRAY_MAGIC = 0xF993FAC8
"""First number of an array with dimensions of 64 bits."""
_TYPED_ARRAY_MAGIC = 0xF993FAC9
"""First number of an array that also states whether it is dense. Older files begin with the number of dimensions."""
_MAX_DIMENSIONS = 8
_TYPES = ("<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8")
"""Types of numbers by their code in a file."""
_NAME = re.compile(r"(?:arg|aux):(?:(conv1a|bn7)|(res|bn)(\d)(?:a|b(\d))_(branch\w+?))_(?:moving_)?([a-z]+)")
"""Names such as `arg:res3b1_branch2a_weight`, of the second block of stage 3."""
_NORM_PARTS = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}
_CLASS_LAYER = "arg:linear1000_"


class MxnetFormatError(ValueError):
    """A file is not in MXNet's format; the message says why."""


class _Reader:
    """Reads numbers from the start of a file's content. Raises MxnetFormatError at the end of the content."""

    def __init__(self, content: bytes):
        self.content = memoryview(content)
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.content) - self.position

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise MxnetFormatError(f"it ends at byte {len(self.content)}, within a value")
        start = self.position
        self.position += size
        return self.content[start : self.position]

    def numbers(self, code: str, count: int = 1) -> tuple[int, ...]:
        form = f"<{count}{code}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def length(self) -> int:
        """Reads the length of a list, each of whose entries takes at least 8 bytes."""
        (length,) = self.numbers("Q")
        if length > self.left // 8:
            raise MxnetFormatError(f"it has a list of {length} entries in {self.left} bytes")
        return length

    def name(self) -> str:
        (size,) = self.numbers("Q")
        return bytes(self.take(size)).decode(errors="replace")

    def array(self) -> Tensor:
        (magic,) = self.numbers("I")
        if magic == _TYPED_ARRAY_MAGIC and self.numbers("i") != (0,):
            raise MxnetFormatError("it has a sparse array")
        has_long_dimensions = magic in (_ARRAY_MAGIC, _TYPED_ARRAY_MAGIC)
        num_dimensions = self.numbers("I")[0] if has_long_dimensions else magic
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise MxnetFormatError(f"it has an array of {num_dimensions} dimensions")

        shape = self.numbers("q" if has_long_dimensions else "I", num_dimensions)
        _, _, type_code = self.numbers("i", 3)  # after the device and its number
        if min(shape) < 0 or not 0 <= type_code < len(_TYPES):
            raise MxnetFormatError(f"it has an array of shape {shape} and type {type_code}")
        dtype = np.dtype(_TYPES[type_code])
        values = np.frombuffer(self.take(math.prod(shape) * dtype.itemsize), dtype)
        return torch.from_numpy(values.reshape(shape).copy())


def read_arrays(content: bytes) -> dict[str, Tensor]:
    """Reads the arrays in the content of a file, by name.

    Raises:
        MxnetFormatError: The content is not that of a file written by `mxnet.nd.save` with names.
    """
    reader = _Reader(content)
    if reader.numbers("Q", 2)[0] != _LIST_MAGIC:
        raise MxnetFormatError("it does not begin like a file of MXNet")
    arrays = [reader.array() for _ in range(reader.length())]
    names = [reader.name() for _ in range(reader.length())]
    if len(names) != len(arrays) or len(set(names)) != len(arrays) or reader.left:
        counts = f"{len(arrays)} arrays, {len(set(names))} different names"
        raise MxnetFormatError(f"it has {counts} and {reader.left} bytes after them")
    return dict(zip(names, arrays, strict=True))


def read_resnet38(path: Path) -> dict[str, Tensor]:
    """Reads a file of ResNet-38 as a state_dict with the names of `ResNet38`, without the layer of the 1000 classes.

    Arrays with other names keep them.

    Raises:
        MxnetFormatError: See `read_arrays`.
    """
    state = {}
    for name, array in read_arrays(path.read_bytes()).items():
        if not name.startswith(_CLASS_LAYER):
            state[_torch_name(name)] = array
    return state


def _torch_name(name: str) -> str:
    """The name in `ResNet38`: `b3_1.conv_branch2a.weight` of `arg:res3b1_branch2a_weight`."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, kind, stage, block, branch, part = match.groups()
    part = _NORM_PARTS.get(part, part)
    if layer:
        return f"{layer}.{part}"
    block_name = f"b{stage}_{block}" if block else f"b{stage}"
    return f"{block_name}.{'conv' if kind == 'res' else 'bn'}_{branch}.{part}"
