"""Map files of other programs: each format is read to the value, and nothing in a file runs."""

import contextlib
import io
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.formats.map_files import MAP_FORMATS, find_map_files, read_map_files
from mcis.datasets.formats.pickled_arrays import RejectedPickle, read_pickled_arrays

CLASSES = [1, 4]
MAPS = np.random.default_rng(0).random((2, 5, 7)).astype(np.float32)
BACKGROUND = np.concatenate([np.ones((1, 5, 7), np.float32), MAPS])


def saved(value: Any, file: Path) -> Path:
    """Writes a dictionary as the programs do."""
    np.save(file, value)
    return file


DICTIONARIES: dict[str, dict[Any, Any]] = {
    "irn": {"keys": torch.tensor(CLASSES), "cam": torch.rand(2, 2, 2), "high_res": MAPS},
    "amn": {"keys": np.array(CLASSES), "cam": BACKGROUND[:, ::4, ::4], "high_res": BACKGROUND},
    "clip-es": {"keys": np.array(CLASSES, np.uint8), "attn_highres": MAPS.astype(np.float16)},
    "toco": {"keys": np.array(CLASSES), "high_res": MAPS},
    "excel": {"keys_gt": np.array(CLASSES), "valid_lam": torch.from_numpy(MAPS)},
    "psa": {np.int64(1): MAPS[0], 4: MAPS[1].astype(np.float64)},
}


@pytest.mark.parametrize("format", DICTIONARIES)
def test_a_dictionary_is_read_to_the_value(format: str, tmp_path: Path) -> None:
    saved(DICTIONARIES[format], tmp_path / "a.npy")
    found = find_map_files(tmp_path, format)
    assert found == {"a": [str(tmp_path / "a.npy")]}
    read = read_map_files(found["a"], format, 20)
    assert read.classes.tolist() == CLASSES
    assert read.maps.dtype == np.float32
    np.testing.assert_array_equal(read.maps, MAPS.astype(np.float16) if format == "clip-es" else MAPS)


def test_every_format_is_tested() -> None:
    assert {*DICTIONARIES, "png"} == set(MAP_FORMATS)


def test_pictures_are_read_with_their_class_from_the_name(tmp_path: Path) -> None:
    gray = (MAPS * 255).astype(np.uint8)
    for number, picture in zip((10, 2), gray, strict=True):
        Image.fromarray(picture).save(tmp_path / f"2007_000032_{number}.png")
    found = find_map_files(tmp_path, "png")
    assert list(found) == ["2007_000032"]
    read = read_map_files(found["2007_000032"], "png", 20)
    assert read.classes.tolist() == [2, 10]
    np.testing.assert_allclose(read.maps, gray[::-1] / 255, atol=1e-7)


def test_irn_files_without_high_res_have_smaller_maps(tmp_path: Path) -> None:
    file = saved({"keys": np.array([3]), "cam": torch.full((1, 2, 3), 0.5)}, tmp_path / "a.npy")
    read = read_map_files([str(file)], "irn", 20)
    np.testing.assert_array_equal(read.maps, np.full((1, 2, 3), 0.5))


def test_an_image_without_maps_is_read(tmp_path: Path) -> None:
    file = saved({}, tmp_path / "a.npy")
    assert read_map_files([str(file)], "psa", 20).classes.tolist() == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6)[1:3, ::2],
        torch.rand(3, 2).T,
        torch.rand(3).half(),
        torch.arange(4, dtype=torch.int32),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(2.0),
    ],
    ids=["part", "transposed", "half", "int32", "bool", "empty", "scalar"],
)
def test_tensors_are_read_without_torch(tensor: torch.Tensor, tmp_path: Path) -> None:
    read = read_pickled_arrays(saved({"t": tensor}, tmp_path / "a.npy").read_bytes())
    np.testing.assert_array_equal(read["t"], tensor.numpy())
    assert read["t"].dtype == tensor.numpy().dtype


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_files_of_earlier_numpy_versions_are_read(protocol: int) -> None:
    content = np.empty((), object)
    content[()] = {"keys": np.array(CLASSES), "maps": np.asfortranarray(MAPS), "name": "a", "n": np.float32(0.5)}
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
    pickle.dump(content, stream, protocol=protocol)
    read = read_pickled_arrays(stream.getvalue())
    np.testing.assert_array_equal(read["maps"], MAPS)
    assert (read["name"], read["n"]) == ("a", 0.5)


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    command = f"touch {target}"
    attacks: list[Any] = [
        {"keys": Calls(os.system, command), "high_res": MAPS},
        Calls(os.system, command),
        {"keys": Calls(eval, f"open({str(target)!r}, 'w')")},
        {"keys": Calls(torch.load, str(target))},
        {"keys": Calls(getattr, "a", "upper")},
        {Calls(os.system, command): 1},
        {"keys": np.array([Calls(os.system, command)], object)},
        {"keys": [Calls(os.system, command)]},
    ]
    in_storage = pickle.dumps(Calls(os.system, command))
    attacks.append({"keys": Calls(torch.storage._load_from_bytes, in_storage)})
    for attack in attacks:
        file = saved(attack, tmp_path / "a.npy")
        with pytest.raises(UserError, match="cannot be read"):
            read_map_files([str(file)], "irn", 20)
        assert not target.exists()
    with pytest.raises(RejectedPickle, match=r"calls posix\.system, which could run code; nothing was run"):
        read_pickled_arrays(saved(attacks[0], tmp_path / "a.npy").read_bytes())


def test_a_storage_contains_plain_values_only() -> None:
    """Storages in storages could multiply the time that a short file takes."""
    file = io.BytesIO()
    nested = pickle.dumps(Calls(torch.storage._load_from_bytes, b""))
    np.save(file, np.array({"keys": Calls(torch.storage._load_from_bytes, nested)}, object))
    with pytest.raises(RejectedPickle, match=r"calls torch\.storage\._load_from_bytes"):
        read_pickled_arrays(file.getvalue())

    file = io.BytesIO()
    np.save(file, np.array({"keys": Calls(torch.storage._load_from_bytes, pickle.dumps([0] * 1000))}, object))
    with pytest.raises(RejectedPickle, match="more than 100 operations"):
        read_pickled_arrays(file.getvalue())


def doubled(levels: int) -> bytes:
    """Operations of a pickle that make a tuple of two tuples of two tuples, and so on."""
    return b"K\x00" + b"q\x00h\x00\x86" * levels


def object_array(pickled: bytes) -> bytes:
    """A file of `numpy.save` with an array of objects."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
    return stream.getvalue() + pickled


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (doubled(60) + b"\x8c\x01a\x93.", "imports a name that is no text"),
        (b"\x8c\x01a" + doubled(60) + b"\x93.", "imports a name that is no text"),
        (b"\x8c\x01a\x8c\xff" + b"b" * 255 + b"\x93.", "imports a name of more than 200 characters"),
        (b"c" + b"a" * 100_000 + b"\nb\n.", "imports a name of more than 200 characters"),
    ],
    ids=["module", "name", "long text", "long line"],
)
def test_names_are_short_texts(pickled: bytes, message: str) -> None:
    """The text of a nested tuple doubles with each level: a file of 300 bytes would need exabytes."""
    with pytest.raises(RejectedPickle, match=message):
        read_pickled_arrays(object_array(b"\x80\x04" + pickled))


def test_keys_of_a_storage_are_one_text(tmp_path: Path) -> None:
    """The comparison of nested tuples takes twice as long with each level."""
    values: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {}]
    header = [pickle.dumps(value, 2) for value in values]
    description = b"\x80\x02(\x8c\x07storagectorch\nFloatStorage\n" + doubled(30) + b"\x8c\x03cpuK\x01t."
    keys = b"\x80\x02]" + doubled(30) + b"a."
    storage = b"".join([*header, description, keys])
    np.save(tmp_path / "a.npy", {"keys": Calls(torch.storage._load_from_bytes, storage)})  # type: ignore[arg-type]
    with pytest.raises(RejectedPickle, match="a tensor in an unknown format"):
        read_pickled_arrays((tmp_path / "a.npy").read_bytes())


def test_shapes_have_as_many_sides_as_numpy_allows() -> None:
    """The product of many large integers takes hours."""
    shape = b"(" + b"K\x02" * 65 + b"t"
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n)R"
    dtype = b"cnumpy\ndtype\n\x8c\x02f4\x85R"
    pickled = b"\x80\x04" + reconstruct + b"(K\x01" + shape + dtype + b"\x89C\x04\x00\x00\x00\x00tb."
    with pytest.raises(RejectedPickle, match="an array with an invalid shape"):
        read_pickled_arrays(object_array(pickled))


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    tensor = torch.zeros(1).expand(1000, 1000)
    file = saved({"keys": tensor}, tmp_path / "a.npy")
    with pytest.raises(UserError, match="larger than its storage"):
        read_map_files([str(file)], "irn", 20)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"high_res": np.full((2, 5, 7), np.nan)}, "not a finite number"),
        ({"high_res": MAPS * 12}, "values from"),
        ({"high_res": MAPS - 0.5}, "values from"),
        ({"high_res": MAPS[:1]}, "2 class indices and maps of type float32 with the shape \\(1, 5, 7\\)"),
        ({"high_res": np.array(["a", "b"])}, "another type than numbers"),
        ({"keys": np.array([1, 20])}, "class indices 1 to 20"),
        ({"keys": [1, 2**70]}, f"class indices {2**70}\n"),
        ({"keys": [1, -1]}, "class indices -1\n"),
        ({"keys": np.zeros(0, int)}, "0 class indices and maps of type float32 with the shape \\(2, 5, 7\\)"),
        ({"high_res": np.array(0.5)}, "the values of keys or high_res are no arrays"),
        ({"keys": np.array([4, 4])}, "occurs twice"),
        ({"keys": np.array([0.0, 1.0])}, "class indices of type float64"),
        ({"keys": "ab"}, "no arrays"),
    ],
)
def test_what_is_no_map_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = saved({"keys": np.array(CLASSES), "high_res": MAPS} | changed, tmp_path / "a.npy")
    with pytest.raises(UserError, match=message):
        read_map_files([str(file)], "irn", 20)


def test_what_is_no_map_is_refused_in_every_format(tmp_path: Path) -> None:
    file = saved({"keys": np.array(CLASSES), "high_res": np.array(0.5)}, tmp_path / "a.npy")
    with pytest.raises(UserError, match=r"a\.npy cannot be read: the values of keys or high_res are no arrays"):
        read_map_files([str(file)], "amn", 20)
    file = saved({1: MAPS[0], 2**70: MAPS[1]}, tmp_path / "a.npy")
    with pytest.raises(UserError, match=rf"a\.npy cannot be read: class indices {2**70}"):
        read_map_files([str(file)], "psa", 20)
    picture = tmp_path / f"a_{2**70}.png"
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(picture)
    with pytest.raises(UserError, match=rf"\.png cannot be read: class indices {2**70}"):
        read_map_files([str(picture)], "png", 20)


def test_large_maps_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    one_map = np.zeros((512, 1024), bool)
    file = saved(dict.fromkeys(range(600), one_map), tmp_path / "a.npy")  # the file has the map once
    assert file.stat().st_size < 600_000
    with pytest.raises(UserError, match=r"a\.npy cannot be read: 314572800 values, more than 268435456"):
        read_map_files([str(file)], "psa", 20)

    header = b"IHDR" + (12_000).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    picture = b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + zlib.crc32(header).to_bytes(4, "big")
    for number in range(2):
        (tmp_path / f"a_{number}.png").write_bytes(
            picture + bytes(4) + b"IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")
        )
    with pytest.raises(UserError, match="too large: 12000x12000 pixels, more than 134217728"):
        read_map_files([f"{tmp_path}/a_0.png", f"{tmp_path}/a_1.png"], "png", 20)


@pytest.mark.parametrize("names", [("x.npy", "x.NPY"), ("caf\u00e9.npy", "cafe\u0301.npy")])
def test_two_files_of_an_image_are_named(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        saved(DICTIONARIES["psa"], tmp_path / "a.npy").rename(tmp_path / name)
    with pytest.raises(UserError, match=rf"two map files of {names[0][:-4]}: ") as caught:
        find_map_files(tmp_path, "psa")
    for name in names:
        assert f"{tmp_path}/{name}" in caught.value.found


def test_another_format_is_named(tmp_path: Path) -> None:
    file = saved(DICTIONARIES["psa"], tmp_path / "a.npy")
    with pytest.raises(UserError, match="the keys 1, 4, without keys"):
        read_map_files([str(file)], "irn", 20)
    np.save(tmp_path / "b.npy", MAPS)
    with pytest.raises(UserError, match="an array of float32 with the shape"):
        read_map_files([str(tmp_path / "b.npy")], "irn", 20)
    with pytest.raises(UserError, match=r"no file <image id>_<class index>\.png"):
        find_map_files(tmp_path, "png")


_VALID = io.BytesIO()
np.save(_VALID, np.array({"keys": torch.tensor(CLASSES), "high_res": MAPS}, object))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_raise_only_rejections(data: st.DataObject) -> None:
    content = bytearray(_VALID.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    with contextlib.suppress(RejectedPickle):
        read_pickled_arrays(bytes(content[:end]))
