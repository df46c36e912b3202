"""Square images, from their files and from the cache: equal pixels, and clear errors."""

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
from mcis.datasets.images.squares import (
    Squares,
    add_squares,
    image_bytes,
    make_squares,
    read_picture,
    read_rgb,
    read_squares,
)
from mcis.datasets.storage.files import stamps
from mcis.platform.runs.files import write_table

SIZE = 20


def squashed(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Encodes pixels as PNG and decodes them to a square."""
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return decode_square(stream.getvalue(), size)


def test_square_ignores_the_aspect_ratio() -> None:
    pixels = np.zeros((30, 80, 3), np.uint8)
    pixels[:, 40:] = 200

    square = squashed(pixels, 16)

    assert square.shape == (16, 16, 3)
    assert square.dtype == np.uint8
    assert (square[:, :6] == 0).all()
    assert (square[:, 10:] == 200).all()


def test_square_averages_without_aliasing() -> None:
    checker = np.repeat((np.indices((64, 64)).sum(0) % 2 * 200)[..., None], 3, -1).astype(np.uint8)
    assert np.abs(squashed(checker, 16)[2:-2, 2:-2].astype(int) - 100).max() <= 2


def test_square_of_the_same_size_is_unchanged() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    np.testing.assert_array_equal(squashed(noise, 40), noise)


def test_read_rgb_reads_images_that_an_index_would_reject_as_small(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (3, 2), (1, 2, 3)).save(path)
    assert read_rgb(str(path)).tolist() == [[[1, 2, 3]] * 3] * 2


def test_read_rgb_names_a_file_that_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"a\.png.*not an image"):
        read_rgb(str(path))


def test_read_rgb_names_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.png") as caught:
        read_rgb(str(tmp_path / "a.png"))
    assert "mcis relocate --name RUN OLD NEW" in caught.value.remedy


def test_every_reader_uses_the_value_range(tmp_path: Path) -> None:
    uri = str(tmp_path / "a.png")
    values = np.linspace(0, 4095, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
    Image.fromarray(values).save(uri)
    expected_pixels = np.rint(values / 4095 * 255)[..., None].repeat(3, axis=-1)
    rows = rows_of([uri])
    value_range = (0.0, 4095.0)
    write_table(tmp_path / "cache/part-00000000-00000001.arrow", make_squares(SIZE, value_range)(rows))

    read = [
        read_rgb(uri, value_range=value_range),
        read_picture(uri, value_range=value_range).rgb,
        read_squares(rows, SIZE, value_range)[0],
        read_squares(add_squares(SIZE, value_range, rows), SIZE)[0],
        Squares([uri], SIZE, value_range=value_range)(np.array([0]))[0],
        Squares([uri], SIZE, cache=tmp_path / "cache")(np.array([0]))[0],
    ]
    for pixels in read:
        np.testing.assert_array_equal(pixels, expected_pixels)


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    """Paths of ten pictures of noise, each of another shape."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{n}.png" for n in range(10)]
    for n, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (30 + n, 50 - n, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


def rows_of(uris: list[str]) -> pa.Table:
    hashes = [hashlib.sha256(Path(uri).read_bytes()).hexdigest() for uri in uris]
    return pa.table({"uri": uris, "content_hash": hashes})


def test_squares_that_were_read_before_are_not_read_again(uris: list[str]) -> None:
    """Also not for a slice of their rows."""
    rows = add_squares(SIZE, None, rows_of(uris))
    for uri in uris:
        Path(uri).unlink()
    np.testing.assert_array_equal(read_squares(rows.slice(3, 4), SIZE), read_squares(rows, SIZE)[3:7])


def filled(folder: Path, uris: list[str], cuts: tuple[int, ...]) -> Path:
    """Fills a cache with one shard between each two cuts."""
    for first, last in itertools.pairwise(cuts):
        shard = make_squares(SIZE)(rows_of(uris[first:last]))
        write_table(folder / f"part-{first:08d}-{last:08d}.arrow", shard)
    return folder


def expected(uris: list[str], positions: list[int]) -> NDArray[np.uint8]:
    whole = [Image.fromarray(read_rgb(uris[position])) for position in positions]
    return np.stack([np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for image in whole])


@pytest.mark.parametrize("cuts", [(0, 10), (0, 4, 8, 10), (0, 3), ()], ids=["whole", "shards", "part", "none"])
def test_cache_changes_no_pixel(tmp_path: Path, uris: list[str], cuts: tuple[int, ...]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, cuts) if cuts else None)
    positions = [9, 0, 3, 3, 8, 4, 2]

    for reader in (images, pickle.loads(pickle.dumps(images))):
        squares = reader(np.array(positions))
        assert squares.dtype == np.uint8
        np.testing.assert_array_equal(squares, expected(uris, positions))


def test_cached_images_are_not_decoded_and_others_are(tmp_path: Path, uris: list[str]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, (0, 4, 7)))
    cached = expected(uris, [1, 6])
    for uri in uris:
        Path(uri).unlink()

    np.testing.assert_array_equal(images(np.array([1, 6])), cached)
    with pytest.raises(UserError, match=r"7\.png cannot be read"):
        images(np.array([7]))


def test_images_of_a_removed_shard_are_decoded(tmp_path: Path, uris: list[str]) -> None:
    cache = filled(tmp_path / "cache", uris, (0, 4, 8))
    images = Squares(uris, SIZE, cache=cache)
    min(cache.iterdir()).unlink()
    np.testing.assert_array_equal(images(np.array([0, 9])), expected(uris, [0, 9]))


def test_damaged_shard_is_named(tmp_path: Path, uris: list[str]) -> None:
    cache = filled(tmp_path / "cache", uris, (0, 4, 8))
    images = Squares(uris, SIZE, cache=cache)
    shard = max(cache.iterdir())
    shard.write_bytes(shard.read_bytes()[:500])

    with pytest.raises(UserError, match=r"part-00000004-00000008\.arrow is damaged"):
        images(np.array([5]))


def test_shard_has_at_least_the_bytes_of_its_images(tmp_path: Path, uris: list[str]) -> None:
    (shard,) = filled(tmp_path / "cache", uris, (0, 4)).iterdir()
    assert shard.stat().st_size > 4 * image_bytes(SIZE)


def test_shard_is_mapped_and_not_read(tmp_path: Path, uris: list[str]) -> None:
    images = Squares(uris, SIZE, cache=filled(tmp_path / "cache", uris, (0, 10)))
    before = pa.total_allocated_bytes()
    images(np.arange(10))
    assert pa.total_allocated_bytes() - before < image_bytes(SIZE)


def test_replaced_file_is_noticed_even_if_size_and_time_are_the_same(tmp_path: Path, uris: list[str]) -> None:
    rows = rows_of(uris)
    images = Squares(uris, SIZE, hashes=rows["content_hash"].to_pylist())
    pixels = images(np.array([3]))

    path = Path(uris[3])
    content = path.read_bytes()
    (stamp,) = stamps([uris[3]])
    assert stamp is not None
    changed = bytearray(content)
    changed[-20] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(0, stamp.changed))
    assert stamps([uris[3]]) == [stamp]

    for read in (lambda: images(np.array([3])), lambda: images.read(3), lambda: make_squares(SIZE)(rows)):
        with pytest.raises(UserError, match=r"3\.png was replaced or changed since it was indexed") as caught:
            read()
        assert "--from index" in caught.value.remedy

    path.write_bytes(content)
    np.testing.assert_array_equal(images(np.array([3])), pixels)
    assert len(make_squares(SIZE)(rows)) == len(uris)
