"""Tests of the index: checks of images, and the reason for each kind of broken file."""

import hashlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, check_images

if TYPE_CHECKING:
    from tests.conftest import FaultyS3


def jpeg(height: int, width: int, **options: object) -> bytes:
    stream = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG", **options)
    return stream.getvalue()


def listing(paths: list[Path]) -> pa.Table:
    same: dict[str, object] = {"domain": "target", "split": "train", "tags": [2, 7], "mask_uri": None}
    same["is_negative"] = False
    rows = [same | {"image_id": p.stem, "uri": str(p)} for p in paths]
    return pa.Table.from_pylist(rows, schema=LISTING_SCHEMA)


def files(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]


def test_valid_images_get_size_and_hash(tmp_path: Path) -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6  # rotated by 90 degrees: displayed 40 high, 50 wide
    contents = {"a.jpg": jpeg(33, 47), "b.jpg": jpeg(50, 40, exif=sideways)}
    found = check_images(listing(files(tmp_path, contents)))

    assert found["reason"].to_pylist() == [None, None]
    assert found["height"].to_pylist() == [33, 40]
    assert found["width"].to_pylist() == [47, 50]
    assert found["content_hash"].to_pylist() == [hashlib.sha256(data).hexdigest() for data in contents.values()]

    for name in LISTING_SCHEMA.names:
        assert found[name].to_pylist() == listing([tmp_path / n for n in contents])[name].to_pylist()


def test_each_broken_file_has_a_reason(tmp_path: Path) -> None:
    whole = jpeg(64, 64)
    contents = {"sound.jpg": whole, "empty.jpg": b"", "text.jpg": b"<html>404</html>", "flat.jpg": jpeg(64, 31)}
    contents["cut.jpg"] = whole[: len(whole) // 2]
    paths = files(tmp_path, contents)
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    paths += [tmp_path / "gone.jpg", tmp_path / "folder.jpg", tmp_path / "loop.jpg"]
    found = check_images(listing(paths))

    assert found["image_id"].to_pylist() == [p.stem for p in paths], "all rows are kept in order"

    reasons = dict(zip(found["image_id"].to_pylist(), found["reason"].to_pylist(), strict=True))
    assert reasons.pop("sound") is None
    expected = {
        "empty": "empty: ",
        "text": "not an image: ",
        "cut": "truncated: ",
        "flat": "too small: 31x64 ",
        "gone": "cannot be read: No such file or directory",
        "folder": "cannot be read: Is a directory",
        "loop": "cannot be read: Too many levels of symbolic links",
    }

    assert {name: reason[: len(expected[name])] for name, reason in reasons.items()} == expected

    broken = found.filter(pa.compute.is_valid(found["reason"]))
    assert set(broken["height"].to_pylist()) == {0}

    digests = dict(zip(found["image_id"].to_pylist(), found["content_hash"].to_pylist(), strict=True))
    assert digests["text"] == hashlib.sha256(contents["text.jpg"]).hexdigest()
    assert digests["gone"] == ""


def test_refused_access_does_not_reject_an_image(faulty_s3: "FaultyS3") -> None:
    faulty_s3.files["/bucket/a.jpg"] = jpeg(40, 40)
    table = listing([Path("a.jpg")])
    table = table.set_column(table.schema.get_field_index("uri"), "uri", [[faulty_s3.uri("/bucket/a.jpg")]])
    faulty_s3.faults["/bucket/a.jpg"] = [403]

    with pytest.raises(UserError, match=r"access to s3://bucket/a\.jpg is refused") as caught:
        check_images(table)
    assert "repeat the command" in caught.value.remedy
    assert check_images(table)["reason"].to_pylist() == [None]
