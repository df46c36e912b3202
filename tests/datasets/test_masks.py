"""Ground-truth masks and saliency maps: what is read of them, and each way in which a file can be wrong."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.io
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import encode_labels
from mcis.datasets.images.masks import Disagreement, compare_tags, read_saliency, read_tags, read_truth, tags_of_mask

LABELS = np.array([[0, 2, 255], [1, 1, 0]], np.uint8)


def write(path: Path, labels: np.ndarray) -> str:
    path.write_bytes(encode_labels(labels))
    return str(path)


def png(pixels: np.ndarray) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_truth_is_read_from_png_and_from_sbd(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    np.testing.assert_array_equal(read_truth(uri, (2, 3), 2), LABELS)
    scipy.io.savemat(tmp_path / "a.mat", {"GTcls": {"Segmentation": LABELS}})
    np.testing.assert_array_equal(read_truth(str(tmp_path / "a.mat"), (2, 3), 2), LABELS)


def test_a_saliency_map_is_read_as_gray(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(LABELS))
    saliency = read_saliency(str(tmp_path / "a.png"), (2, 3))
    np.testing.assert_array_equal(saliency, LABELS)
    assert saliency.dtype == np.uint8


@pytest.mark.parametrize("content", [None, b"", b"<html>404</html>", png(np.zeros((4, 4, 3), np.uint8))[:40]])
def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.png"
    if content is not None:
        path.write_bytes(content)
    found = "no {} .*a[.]png .*No such file" if content is None else "the {} .*a[.]png cannot be read: "
    with pytest.raises(UserError, match=found.format("ground-truth mask")) as caught:
        read_truth(str(path), (2, 3), 2)
    assert caught.value.expected.startswith("a palette PNG")
    with pytest.raises(UserError, match=found.format("ground-truth mask")):
        read_tags(str(path), 2)
    with pytest.raises(UserError, match=found.format("saliency map")) as caught:
        read_saliency(str(path), (2, 3))
    assert caught.value.expected == "a gray PNG"


def test_files_of_another_size_than_their_image_are_named(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    with pytest.raises(UserError, match=r"the ground-truth mask .* has 2x3 pixels \(height x width\)") as caught:
        read_truth(uri, (3, 2), 2)
    assert caught.value.expected == "3x2 as its image"
    (tmp_path / "b.png").write_bytes(png(LABELS))
    with pytest.raises(UserError, match=r"the saliency map .* has 2x3 pixels") as caught:
        read_saliency(str(tmp_path / "b.png"), (2, 4))
    assert caught.value.expected == "2x4 as its image"


def test_labels_above_the_number_of_classes_name_the_argument(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    for read in (lambda: read_truth(uri, (2, 3), 1), lambda: read_tags(uri, 1)):
        with pytest.raises(UserError, match=r"a\.png: label 2; expected 0\.\.1 and 255") as caught:
            read()
        assert "`classes`" in caught.value.remedy


def test_tags_of_a_mask_are_its_labels_less_one() -> None:
    assert tags_of_mask(np.array([[0, 255], [20, 1]], np.uint8), 20) == [0, 19]
    assert tags_of_mask(np.zeros((2, 2), np.uint8), 20) == []
    with pytest.raises(ValueError, match="label 21"):
        tags_of_mask(np.full((2, 2), 21, np.uint8), 20)


def test_tags_are_read_again_when_the_file_has_changed(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    assert read_tags(uri, 2) == [0, 1]
    write(tmp_path / "a.png", np.zeros((20, 30), np.uint8))
    assert read_tags(uri, 2) == []


def test_tags_are_compared_where_there_is_a_mask(tmp_path: Path) -> None:
    uri = write(tmp_path / "a.png", LABELS)
    columns = {"image_id": ["a", "b", "c"], "tags": [[0, 1], [1], [0]], "mask_uri": [uri, uri, None]}
    assert compare_tags(pa.table(columns), 2) == [Disagreement("b", [1], [0, 1])]
