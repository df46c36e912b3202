"""Images at one size, from their files and from the cache: the same pixels, and clear words where there are none."""

import hashlib
import itertools
import os
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.squares import Squares, image_bytes, make_squares, read_rgb
from mcis.datasets.storage.files import stamps
from mcis.platform.runs.files import write_table

SIZE = 20


def squashed(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return decode_square(stream.getvalue(), size)


def test_a_square_forgets_the_aspect_ratio_and_averages() -> None:
    left, right = np.zeros((30, 40, 3), np.uint8), np.full((30, 40, 3), 200, np.uint8)
    square = squashed(np.concatenate([left, right], 1), 16)
    assert square.shape == (16, 16, 3)
    assert square.dtype == np.uint8
    assert (square[:, :6] == 0).all()
    assert (square[:, 10:] == 200).all()
    checker = np.repeat((np.indices((64, 64)).sum(0) % 2 * 200)[..., None], 3, -1).astype(np.uint8)
    assert np.abs(squashed(checker, 16)[2:-2, 2:-2].astype(int) - 100).max() <= 2  # no aliasing
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    np.testing.assert_array_equal(squashed(noise, 40), noise)


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
