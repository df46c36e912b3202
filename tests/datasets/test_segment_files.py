"""Segments of images: arrays of numbers, and masks as SAM's automatic mask generator writes them."""

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from mcis.datasets.errors import UserError
from mcis.datasets.formats.segment_files import find_segment_files, read_segments


def run_lengths(pixels: np.ndarray) -> dict[str, Any]:
    """A mask in compressed run lengths."""
    encoded = coco_masks.encode(np.asfortranarray(pixels, np.uint8))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64, np.uint64])
def test_arrays_of_any_integers_are_read(tmp_path: Path, dtype: type) -> None:
    numbers = np.random.default_rng(0).integers(0, 5, (6, 9)) * 40
    np.save(tmp_path / "a.npy", np.asfortranarray(numbers.astype(dtype)))
    segments = read_segments(str(tmp_path / "a.npy"), 6, 9)
    np.testing.assert_array_equal(segments, numbers // 40)
    assert segments.dtype == np.int32


def test_negative_numbers_and_large_ones_are_no_segment_and_segments(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[-5, -1], [2**40, 7]]))
    segments = read_segments(str(tmp_path / "a.npy"), 2, 2)
    assert segments[0].tolist() == [-1, -1]
    assert min(segments[1]) >= 0
    assert segments[1, 0] != segments[1, 1]

    np.save(tmp_path / "b.npy", np.array([[2**63 + 5, 7]], np.uint64))
    segments = read_segments(str(tmp_path / "b.npy"), 1, 2)
    assert segments.tolist() == [[1, 0]]


@pytest.mark.parametrize("is_sa1b", [False, True])
def test_smaller_masks_are_on_top_of_larger_ones(tmp_path: Path, is_sa1b: bool) -> None:
    whole = np.zeros((8, 10), bool)
    whole[1:7, 1:9] = True
    part = np.zeros((8, 10), bool)
    part[3:5, 3:5] = True
    masks = [{"segmentation": run_lengths(pixels), "area": int(pixels.sum())} for pixels in (part, whole)]
    (tmp_path / "a.json").write_text(json.dumps({"annotations": masks} if is_sa1b else masks))

    expected = np.full((8, 10), -1)
    expected[whole] = 0
    expected[part] = 1
    np.testing.assert_array_equal(read_segments(str(tmp_path / "a.json"), 8, 10), expected)


def test_of_equal_areas_the_later_mask_is_on_top(tmp_path: Path) -> None:
    masks = np.zeros((3, 4, 6), bool)
    masks[0, :2, :2] = True
    masks[1, :2, 1:3] = True
    masks[2, :1, 2:3] = True
    (tmp_path / "a.json").write_text(json.dumps([{"segmentation": run_lengths(pixels)} for pixels in masks]))
    expected = np.full((4, 6), -1)
    for number, pixels in enumerate(masks):
        expected[pixels] = number
    np.testing.assert_array_equal(read_segments(str(tmp_path / "a.json"), 4, 6), expected)


def test_one_mask_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Mask n of 200 has all columns but the last n."""
    masks = [{"size": [200, 300], "counts": [0, 200 * (300 - n), 200 * n]} for n in range(200)]
    (tmp_path / "a.json").write_text(json.dumps([{"segmentation": mask} for mask in masks]))
    read_segments(str(tmp_path / "a.json"), 200, 300)

    tracemalloc.start()
    segments = read_segments(str(tmp_path / "a.json"), 200, 300)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert segments[7].tolist() == [199] * 100 + list(range(199, -1, -1))
    assert peak < 2_000_000  # all masks at once take 12 MB


def test_a_lack_of_memory_is_no_damage_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(MemoryError):
        read_segments(str(tmp_path / "a.json"), 2**30, 2**28)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this runs",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        pickle.dumps(Hostile()),
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (9, 9), }",
        b'[{"segmentation": {"size": [6, 9], "counts": "~~~"}}]',
        b'{"annotations": 3}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_damaged_files_are_refused(
    tmp_path: Path, content: bytes, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"the segments .* cannot be read"):
        read_segments(str(file), 6, 9)
    assert "this runs" not in capsys.readouterr().out


@pytest.mark.parametrize("array", [np.zeros((6, 8), int), np.zeros((6, 9)), np.array([[Hostile()] * 9] * 6)])
def test_arrays_that_are_no_segments_of_the_image_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=r"(?s)the segments .* cannot be read .*of 6x9 pixels"):
        read_segments(str(tmp_path / "a.npy"), 6, 9)


def test_files_are_named_after_images(tmp_path: Path) -> None:
    for name in ("photos/one.npy", "two.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert set(find_segment_files(tmp_path)) == {"photos/one", "two"}

    (tmp_path / "two.npy").touch()
    with pytest.raises(UserError, match="two files of segments of two"):
        find_segment_files(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no segments in"):
        find_segment_files(tmp_path / "empty")
