"""Tests of MXNet's format: files of each version, the names of ResNet-38, and damaged files."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone, resnet38
from mcis.models.mxnet_weights import MxnetFormatError, read_arrays
from mcis.models.pretrained import load_pretrained

TYPES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
NORM_PARTS = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_var"}


def array_bytes(array: np.ndarray, version: int = 2) -> bytes:
    """An array as `NDArray::Save` of MXNet writes it; 2 is the version of MXNet 1, 0 that of the first releases."""
    if version == 2:
        head = struct.pack(f"<IiI{array.ndim}q", 0xF993FAC9, 0, array.ndim, *array.shape)
    elif version == 1:
        head = struct.pack(f"<II{array.ndim}q", 0xF993FAC8, array.ndim, *array.shape)
    else:
        head = struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape)
    context = struct.pack("<iii", 1, 0, TYPES[array.dtype.name])
    return head + context + array.astype(array.dtype.newbyteorder("<")).tobytes()


def file_bytes(arrays: Mapping[str, np.ndarray], version: int = 2) -> bytes:
    """Arrays and their names as `mxnet.nd.save` writes them."""
    names = [struct.pack("<Q", len(name)) + name.encode() for name in arrays]
    count = struct.pack("<Q", len(arrays))
    content = [array_bytes(array, version) for array in arrays.values()]
    return b"".join([struct.pack("<QQ", 0x112, 0), count, *content, count, *names])


def mxnet_name(name: str) -> str:
    """The name in MXNet's network of a tensor of the public torch code: `arg:res3b1_branch2a_weight`."""
    *layers, part = name.split(".")
    if layers == ["conv1a"]:
        return "arg:conv1a_weight"

    part = NORM_PARTS[part] if layers[-1].startswith("bn") else part
    prefix = "aux" if part.startswith("moving") else "arg"
    if layers == ["bn7"]:
        return f"{prefix}:bn7_{part}"
    block, layer = layers
    stage, _, number = block.removeprefix("b").partition("_")
    kind, _, branch = layer.partition("_")
    unit = f"b{number}" if number else "a"
    return f"{prefix}:{'res' if kind == 'conv' else 'bn'}{stage}{unit}_{branch}_{part}"


def small_arrays() -> dict[str, np.ndarray]:
    return {
        "arg:a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "aux:b": np.array([1.5], np.float64),
        "c": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    }


@pytest.mark.parametrize("version", [0, 1, 2])
def test_arrays_of_each_version_are_read(version: int) -> None:
    arrays = small_arrays()
    read = read_arrays(file_bytes(arrays, version))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(read[name].numpy(), array)


@pytest.mark.parametrize("dtype", TYPES)
def test_all_types_of_numbers_are_read(dtype: str) -> None:
    array = np.arange(5).astype(dtype)
    np.testing.assert_array_equal(read_arrays(file_bytes({"a": array}))["a"].numpy(), array)


def test_names_are_those_of_the_released_file() -> None:
    names = {
        "conv1a.weight": "arg:conv1a_weight",
        "b2.conv_branch1.weight": "arg:res2a_branch1_weight",
        "b4_5.bn_branch2b1.running_var": "aux:bn4b5_branch2b1_moving_var",
        "b6.conv_branch2b2.weight": "arg:res6a_branch2b2_weight",
        "bn7.running_mean": "aux:bn7_moving_mean",
    }
    assert {name: mxnet_name(name) for name in names} == names


def test_resnet_38_computes_the_same_with_mxnets_file(tmp_path: Path) -> None:
    original = random_network(seed=1)
    state: Mapping[str, Tensor] = original.body.state_dict()
    arrays = {mxnet_name(name): tensor.numpy() for name, tensor in state.items()}
    assert len(arrays) == len(state)
    arrays["arg:linear1000_weight"] = np.zeros((2, 3), np.float32)
    arrays["arg:linear1000_bias"] = np.zeros(2, np.float32)
    path = tmp_path / "ilsvrc-cls_rna-a1_cls1000_ep-0001.params"
    path.write_bytes(file_bytes(arrays))
    pictures = torch.randn(1, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = original(pictures)
    del original, state, arrays

    loaded = random_network(seed=2)
    with torch.inference_mode():
        assert not torch.equal(loaded(pictures), expected)
        load_pretrained(loaded, path)
        assert torch.equal(loaded(pictures), expected)


def random_network(seed: int) -> Backbone:
    """A network whose norms change values."""
    torch.manual_seed(seed)
    network = resnet38().eval()
    with torch.inference_mode():
        for name, tensor in network.body.state_dict().items():
            if "running" in name or ".bn" in name or name.startswith("bn7"):
                tensor.uniform_(0.4, 0.8)
    return network


GOOD = file_bytes(small_arrays())
LARGE = struct.pack("<QQQ", 0x112, 0, 1) + struct.pack("<IiI4q", 0xF993FAC9, 0, 4, 2**31, 2**31, 2**31, 2**31)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it ends at byte 0"),
        (b"\x80\x02}q\x00." * 9, "does not begin like a file of MXNet"),
        (GOOD[:-1], "it ends at byte"),
        (GOOD + b"\x00", "1 bytes after them"),
        (struct.pack("<QQQ", 0x112, 0, 2**60) + bytes(64), "a list of 1152921504606846976 entries"),
        (LARGE + struct.pack("<iii", 1, 0, 0), "it ends at byte"),
        (file_bytes({"a": np.zeros(2, np.float32)}).replace(b"\x01\x00\x00\x00\x00\x00\x00\x00a", b""), "it"),
        (struct.pack("<QQQIi", 0x112, 0, 1, 0xF993FAC9, 1) + bytes(64), "a sparse array"),
        (struct.pack("<QQQII", 0x112, 0, 1, 0xF993FAC8, 0) + bytes(64), "an array of 0 dimensions"),
        (struct.pack("<QQQII", 0x112, 0, 1, 0xF993FAC8, 2**31) + bytes(64), "an array of 2147483648 dimensions"),
        (struct.pack("<QQQIIqiii", 0x112, 0, 1, 0xF993FAC8, 1, -4, 1, 0, 0) + bytes(64), r"of shape \(-4,\)"),
        (struct.pack("<QQQIIqiii", 0x112, 0, 1, 0xF993FAC8, 1, 4, 1, 0, 9) + bytes(64), "and type 9"),
        (file_bytes({"a": np.zeros(2, np.float32)})[:-17] + struct.pack("<Q", 0), "1 arrays, 0 different names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(MxnetFormatError, match=message):
        read_arrays(content)
    path = tmp_path / "damaged.params"
    path.write_bytes(content)
    with torch.device("meta"):
        backbone = resnet38()
    with pytest.raises(UserError, match=f"damaged.params cannot be read as weights: .*{message}"):
        load_pretrained(backbone, path)


def test_a_file_of_another_network_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "other.params"
    path.write_bytes(GOOD)
    with torch.device("meta"):
        backbone = resnet38()
    with pytest.raises(UserError, match="does not fit the backbone"):
        load_pretrained(backbone, path)


def test_no_damage_ends_in_another_error() -> None:
    generator = np.random.default_rng(0)
    for _ in range(2000):
        content = bytearray(GOOD)
        for position in generator.integers(0, len(content), 3):
            content[position] = generator.integers(0, 256)
        try:
            read_arrays(bytes(content))
        except MxnetFormatError:
            continue
