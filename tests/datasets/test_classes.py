"""Class names, the palette, and files of class names."""

from pathlib import Path

import pytest

from mcis.datasets.classes import check_classes, palette, read_classes
from mcis.datasets.errors import UserError


def test_palette_is_the_color_map_of_pascal_voc():
    colors = palette()
    assert colors.shape == (256, 3)
    assert colors.dtype == "uint8"

    published = {
        0: (0, 0, 0),
        1: (128, 0, 0),
        2: (0, 128, 0),
        5: (128, 0, 128),
        8: (64, 0, 0),
        12: (64, 0, 128),
        15: (192, 128, 128),
        20: (0, 64, 128),
        255: (224, 224, 192),
    }
    assert {label: tuple(colors[label].tolist()) for label in published} == published


def test_palette_colors_are_distinct():
    assert len({tuple(color) for color in palette().tolist()}) == 256


@pytest.mark.parametrize(
    "text",
    [
        "cat\nsea lion\nété\n",
        "\ufeffcat\r\n  sea lion \r\nété",
        "cat\nsea lion\nété\n\n\n",
        "cat\u200b\nsea\u00a0lion\n\ufeffété\n",
    ],
)
def test_read_classes_keeps_the_order_of_lines(tmp_path: Path, text: str):
    path = tmp_path / "classes.txt"
    path.write_bytes(text.encode())
    assert read_classes(path) == ("cat", "sea lion", "été")


INVALID_CONTENT = {
    b"": "is empty",
    b" \n\n": "is empty",
    b"cat\n\xff\xfe\n": "cannot read",
    b"cat\n\ndog\n": "line 2 of .* is blank",
    b"\ncat\n": "line 1 of .* is blank",
    b"cat\ndog\ncat \n": "names cat more than once",
    b"Background\ncat\n": "names background as a class",
    "\n".join(map(str, range(255))).encode(): "names 255 classes",
}


@pytest.mark.parametrize(("content", "message"), INVALID_CONTENT.items())
def test_read_classes_reports_what_is_wrong(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "classes.txt"
    path.write_bytes(content)

    with pytest.raises(UserError, match=message) as raised:
        read_classes(path)

    assert str(path) in raised.value.found


def test_read_classes_reports_a_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match="no file of class names"):
        read_classes(tmp_path / "absent.txt")


def test_read_classes_reports_a_folder(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read"):
        read_classes(tmp_path)


def test_a_class_name_that_no_file_can_have_is_refused() -> None:
    check_classes("classes.txt", ["cat", "ä" * 125])
    with pytest.raises(UserError, match="a class name of 252 bytes") as caught:
        check_classes("classes.txt", ["cat", "ä" * 126])
    assert "at most 251 bytes" in caught.value.expected
