"""Logits that other programs saved: labels at the size of the image, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.datasets.formats.logit_files import read_logit_labels

CLASSES = 2


def saved(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "a.npy"
    np.save(path, content)  # type: ignore[arg-type]
    return str(path)


def logits_of(labels: list[list[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.moveaxis(np.eye(CLASSES + 1, dtype=np.float32)[np.array(labels)], 2, 0) * 8 - 4


@pytest.mark.parametrize("key", ["msc_seg", "msc_segs", "seg", "segs"])
@pytest.mark.parametrize("batch", [True, False])
def test_each_pixel_has_the_label_of_the_largest_logit(key: str, batch: bool, tmp_path: Path) -> None:
    expected = [[0, 1, 2], [2, 2, 0]]
    logits = logits_of(expected)
    labels = read_logit_labels(saved(tmp_path, {key: logits[None] if batch else logits}), (2, 3), CLASSES)
    assert labels.dtype == np.uint8
    assert labels.tolist() == expected


def test_logits_of_several_scales_are_preferred(tmp_path: Path) -> None:
    content = {"segs": logits_of([[1]]), "msc_segs": logits_of([[2]])}
    assert read_logit_labels(saved(tmp_path, content), (1, 1), CLASSES).tolist() == [[2]]


def test_logits_of_another_size_are_interpolated_with_aligned_areas(tmp_path: Path) -> None:
    """Between the centers of two pixels, at 2 and 6 of 8, the two logits change places at 4."""
    labels = read_logit_labels(saved(tmp_path, {"seg": logits_of([[0, 2]])}), (3, 8), CLASSES)
    assert labels.tolist() == [[0, 0, 0, 0, 2, 2, 2, 2]] * 3


def test_logits_are_interpolated_one_class_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes at the size of a photograph may not fit into memory."""
    logits = np.random.default_rng(0).normal(size=(9, 6, 7)).astype(np.float32)
    interpolate = functional.interpolate
    expected = interpolate(torch.from_numpy(logits)[None], size=(61, 83), mode="bilinear")[0].argmax(dim=0)
    sizes = []

    def record_size(values: torch.Tensor, **options: Any) -> torch.Tensor:
        result = interpolate(values, **options)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(functional, "interpolate", record_size)
    labels = read_logit_labels(saved(tmp_path, {"seg": logits}), (61, 83), 8)

    np.testing.assert_array_equal(labels, expected)
    assert set(sizes) == {61 * 83}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"cam": np.zeros((3, 2, 2), np.float32)}, "the keys cam"),
        ({"seg": np.zeros((2, 2, 2), np.float32)}, r"seg has the shape \(2, 2, 2\)"),
        ({"seg": np.zeros((2, 3, 2, 2), np.float32)}, r"seg has the shape \(2, 3, 2, 2\)"),
        ({"seg": np.zeros((3, 0, 2), np.float32)}, r"seg has the shape \(3, 0, 2\)"),
        ({"seg": np.full((3, 2, 2), np.nan, np.float32)}, "not a finite number"),
        ({"seg": np.full((3, 2, 2), 1e300)}, "not a finite number of 32 bits"),
        ({"seg": np.zeros((3, 2, 2), np.int64)}, "no array of floating-point numbers"),
        ({"seg": "text"}, "no array of floating-point numbers"),
    ],
)
def test_other_files_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_logit_labels(saved(tmp_path, content), (2, 2), CLASSES)
    assert "a.npy" in caught.value.found
    assert "logits (3, H, W)" in caught.value.expected


def test_a_file_that_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2, 2)))
    with pytest.raises(UserError, match="expected a pickled dictionary"):
        read_logit_labels(str(tmp_path / "a.npy"), (2, 2), CLASSES)
