"""Labels of SBD's MATLAB files, compared with scipy's reader; hostile files are rejected."""

import resource
import struct
import time
import zlib
from io import BytesIO

import numpy as np
import pytest
import scipy.io

from mcis.datasets.images.decode import RejectedImage
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.images.masks import decode_mask
from mcis.datasets.images.matlab import decode_mat_labels

H = 40
W = 48
RAMP = np.stack(np.broadcast_arrays(np.arange(H)[:, None] * 5, np.arange(W) * 4, 77), -1).astype(np.uint8)


def mat(labels: np.ndarray | None, name: str = "GTcls", **options: object) -> bytes:
    """Builds a file like SBD's: sparse boundaries in a cell, the segmentation (unless None), its categories."""
    boundaries = np.empty((20, 1), object)
    for k in range(20):
        boundaries[k, 0] = scipy.sparse.csc_matrix(np.eye(3, dtype=bool))

    content: dict[str, object] = {"Boundaries": boundaries}
    if labels is not None:
        content["Segmentation"] = labels
    content["CategoriesPresent"] = np.array([[1.0], [7.0]])

    stream = BytesIO()
    scipy.io.savemat(stream, {"before": np.arange(5), name: content, "after": "text"}, **options)
    return stream.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_labels_equal_those_of_scipy(compressed: bool):
    labels = np.random.default_rng(0).integers(0, 21, (33, 21)).astype(np.uint8)
    data = mat(labels, do_compression=compressed)

    decoded = decode_mat_labels(data)

    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous
    np.testing.assert_array_equal(decoded, scipy.io.loadmat(BytesIO(data))["GTcls"]["Segmentation"].item())


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2), (5, 1)])
def test_smallest_matlab_labels(size: tuple[int, int]):
    labels = np.arange(size[0] * size[1], dtype=np.uint8).reshape(size)
    np.testing.assert_array_equal(decode_mat_labels(mat(labels)), labels)


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (mat(None), "unsupported", "without GTcls.Segmentation"),
        (mat(RAMP[..., 0], name="GTinst"), "unsupported", "without a variable GTcls"),
        (mat(RAMP), "unsupported", "shape [40, 48, 3]"),
        (mat(RAMP[..., 0] * 0.5), "unsupported", "no matrix of bytes"),
        (mat(RAMP[..., 0] * 1j), "unsupported", "no matrix of bytes"),
        (mat(np.array("text")), "unsupported", "no matrix of bytes"),
        (mat(scipy.sparse.csc_matrix(RAMP[..., 0])), "unsupported", "no matrix of bytes"),
        (mat(RAMP[..., 0])[:2000], "truncated", ""),
        (encode_labels(RAMP[..., 0]), "not an image", "expected a MATLAB 5.0 file"),
        (b"", "not an image", ""),
    ],
)
@pytest.mark.filterwarnings("error")
def test_matlab_file_without_labels_is_rejected(data: bytes, kind: str, detail: str):
    with pytest.raises(RejectedImage) as caught:
        decode_mat_labels(data)
    assert caught.value.reason.startswith(f"{kind}: ")
    assert detail in caught.value.reason


def test_decode_mask_recognizes_the_format_by_content():
    labels = RAMP[..., 0]
    np.testing.assert_array_equal(decode_mask(encode_labels(labels)), labels)
    np.testing.assert_array_equal(decode_mask(mat(labels)), labels)


def test_decode_mask_rejects_other_formats():
    with pytest.raises(RejectedImage, match="not an image"):
        decode_mask(b"<html>")


def element(data_type: int, content: bytes) -> bytes:
    """Returns a data element of a MATLAB file, padded to 8 bytes."""
    return struct.pack("<II", data_type, len(content)) + content + bytes(-len(content) % 8)


def matrix(array_class: int, name: bytes, content: bytes) -> bytes:
    """Returns a 1x1 matrix element."""
    flags = element(6, struct.pack("<II", array_class, 0)) + element(5, struct.pack("<ii", 1, 1))
    return element(14, flags + element(1, name) + content)


HEADER = mat(RAMP[..., 0])[:128]


def test_matlab_file_that_expands_without_end_is_rejected() -> None:
    bomb = zlib.compress(element(14, bytes(100 * 2**20)))
    data = HEADER + struct.pack("<II", 15, len(bomb)) + bomb
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

    with pytest.raises(RejectedImage, match=r"too large: .* bytes"):
        decode_mask(data)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 64 * 1024


def test_matlab_file_that_nests_deeply_is_rejected() -> None:
    nested = matrix(6, b"", element(9, bytes(8)))
    for _ in range(5000):
        nested = matrix(1, b"", nested)
    data = HEADER + matrix(1, b"GTcls", nested)
    started = time.monotonic()

    with pytest.raises(RejectedImage):
        decode_mask(data)

    assert time.monotonic() - started < 10


def test_large_matlab_file_is_rejected() -> None:
    with pytest.raises(RejectedImage, match=r"too large: .* bytes"):
        decode_mask(HEADER + element(14, bytes(2**24 + 8)))
