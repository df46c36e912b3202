"""Images at one size, from their files and from the cache: the same pixels, and clear words where there are none."""

import contextlib
import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import RejectedImage, decode_picture, decode_square
from mcis.datasets.images.squares import Squares, image_bytes, make_squares, read_rgb
from mcis.datasets.storage.files import stamps
from mcis.platform.runs.files import write_table

SIZE = 20


def test_a_file_that_is_gone_or_no_image_any_more_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (3, 2), (1, 2, 3)).save(path)
    assert read_rgb(str(path)).tolist() == [[[1, 2, 3]] * 3] * 2  # smaller than the index accepts by default
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"a\.png.*not an image"):
        read_rgb(str(path))
    path.unlink()
    with pytest.raises(UserError, match=r"a\.png") as caught:
        read_rgb(str(path))
    assert "repeat `index`" in caught.value.remedy


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    """Ten pictures of noise, each of another shape."""
    rng = np.random.default_rng(0)
    out = []
    for n in range(10):
        path = tmp_path / f"{n}.png"
        Image.fromarray(rng.integers(0, 256, (30 + n, 50 - n, 3), np.uint8)).save(path)
        out.append(str(path))
    return out


def rows_of(uris: list[str]) -> pa.Table:
    return pa.table({"uri": uris, "content_hash": [hashlib.sha256(Path(uri).read_bytes()).hexdigest() for uri in uris]})


def filled(folder: Path, uris: list[str], cuts: tuple[int, ...]) -> Path:
    """A cache with shards between the cuts."""
    for first, last in itertools.pairwise(cuts):
        shard = make_squares(SIZE)(rows_of(uris[first:last]))
        write_table(folder / f"part-{first:08d}-{last:08d}.arrow", shard)
    return folder


def expected(uris: list[str], positions: list[int]) -> NDArray[np.uint8]:
    whole = [Image.fromarray(read_rgb(uris[p])) for p in positions]
    return np.stack([np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for image in whole])


@pytest.mark.parametrize("cuts", [(0, 10), (0, 4, 8, 10), (0, 3), ()], ids=["whole", "shards", "part", "none"])
def test_the_cache_changes_no_pixel(tmp_path: Path, uris: list[str], cuts: tuple[int, ...]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, cuts) if cuts else None)
    positions = [9, 0, 3, 3, 8, 4, 2]
    for reader in (images, pickle.loads(pickle.dumps(images))):
        images_read = reader(np.array(positions))
        assert images_read.dtype == np.uint8
        np.testing.assert_array_equal(images_read, expected(uris, positions))


def test_what_is_cached_is_not_decoded_and_the_rest_is(tmp_path: Path, uris: list[str]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, (0, 4, 7)))
    wanted = expected(uris, [1, 6])
    for uri in uris:
        Path(uri).unlink()
    np.testing.assert_array_equal(images(np.array([1, 6])), wanted)
    with pytest.raises(UserError, match=r"7\.png cannot be read"):
        images(np.array([7]))


def test_a_shard_that_made_room_is_decoded_and_a_damaged_one_is_named(tmp_path: Path, uris: list[str]) -> None:
    cache = filled(tmp_path / "cache", uris, (0, 4, 8))
    first, second = sorted(cache.iterdir())
    assert first.stat().st_size > 4 * image_bytes(SIZE)
    images = Squares(uris, SIZE, cache=cache)
    first.unlink()
    second.write_bytes(second.read_bytes()[:500])
    np.testing.assert_array_equal(images(np.array([0, 9])), expected(uris, [0, 9]))
    with pytest.raises(UserError, match=r"part-00000004-00000008\.arrow is damaged"):
        images(np.array([5]))


NoMoreFiles = Callable[[], contextlib.AbstractContextManager[None]]


def test_a_shard_that_cannot_be_opened_at_present_is_not_damaged(
    tmp_path: Path, uris: list[str], no_pauses: None, no_more_files: NoMoreFiles
) -> None:
    images, wanted = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, (0, 10))), expected(uris, [0])
    with no_more_files(), pytest.raises(UserError, match=r"\.arrow could not be read, however often"):
        images(np.array([0]))
    np.testing.assert_array_equal(images(np.array([0])), wanted)


def test_a_shard_is_mapped_not_read(tmp_path: Path, uris: list[str]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, (0, 10)))
    before = pa.total_allocated_bytes()
    images(np.arange(10))
    assert pa.total_allocated_bytes() - before < image_bytes(SIZE)


def test_a_file_that_was_replaced_is_noticed_though_size_and_time_are_the_same(tmp_path: Path, uris: list[str]) -> None:
    rows, path = rows_of(uris), Path(uris[3])
    images = Squares(uris, SIZE, hashes=rows["content_hash"].to_pylist())
    before, content, stamp = images(np.array([3])), path.read_bytes(), stamps([uris[3]])
    other = bytearray(content)
    other[-20] ^= 1
    path.write_bytes(other)
    os.utime(path, ns=(0, stamp[0].changed if stamp[0] else 0))
    assert stamps([uris[3]]) == stamp
    for read in (lambda: images(np.array([3])), lambda: images.read(3), lambda: make_squares(SIZE)(rows)):
        with pytest.raises(UserError, match=r"3\.png was replaced or changed since it was indexed") as caught:
            read()
        assert "repeat `index`" in caught.value.remedy
    path.write_bytes(content)
    np.testing.assert_array_equal(images(np.array([3])), before)
    assert len(make_squares(SIZE)(rows)) == len(uris)


# --- squares of bytes


def encoded(image: Image.Image | NDArray[np.uint8], form: str = "PNG", **options: object) -> bytes:
    stream = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_decoding_squashed_is_decoding_then_squashing(mode: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (50, 70), np.uint16))
    else:
        picture = picture.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture, "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    whole = Image.fromarray(decode_picture(data).rgb).resize((33, 33), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(decode_square(data, 33), np.asarray(whole))
    with pytest.raises(RejectedImage, match=r"truncated|corrupt"):
        decode_square(data[: len(data) // 2], 33)


def test_a_square_forgets_the_aspect_ratio_and_averages() -> None:
    left, right = np.zeros((30, 40, 3), np.uint8), np.full((30, 40, 3), 200, np.uint8)
    squashed = decode_square(encoded(np.concatenate([left, right], 1)), 16)
    assert squashed.shape == (16, 16, 3)
    assert squashed.dtype == np.uint8
    assert (squashed[:, :6] == 0).all()
    assert (squashed[:, 10:] == 200).all()
    checker = np.repeat((np.indices((64, 64)).sum(0) % 2 * 200)[..., None], 3, -1).astype(np.uint8)
    assert np.abs(decode_square(encoded(checker), 16)[2:-2, 2:-2].astype(int) - 100).max() <= 2  # no aliasing
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    np.testing.assert_array_equal(decode_square(encoded(noise), 40), noise)
