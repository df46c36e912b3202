"""Streams of batches: crops against loops over pixels, shares that add up, and Ray Data against a plain loop."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mcis.datasets.decode import decode_square
from mcis.datasets.errors import UserError
from mcis.datasets.images import Squares
from mcis.datasets.pairs import PairSampler
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.stream import Batch, PairDecoder, Place, Share, batches, by_tasks, by_threads, random_crop
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.tags import Tags

quick = settings(deadline=None, max_examples=60)
COLUMNS = ("images_m", "images_n", "m", "n", "epoch", "kind", "row", "unshared_m", "unshared_n")
PADDING = [124, 116, 104]
SIZE = 24

# --- crops


def picture(height: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """An image whose red channel is its label, and whose other channels tell every pixel from every other."""
    rows, columns = np.mgrid[:height, :width]
    labels = ((rows * 7 + columns * 3) % 200).astype(np.uint8)
    return np.stack([labels, rows, columns], -1).astype(np.uint8), labels


def slow_crop(
    rgb: NDArray[np.uint8], labels: NDArray[np.uint8], size: int, top: float, left: float
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixel by pixel: position y of the crop shows position y + shift of the image, or padding."""

    def shift(side: int, draw: float) -> int:
        room = int(draw * (abs(side - size) + 1))
        return room if side >= size else -room

    out = np.empty((size, size, 3), np.uint8)
    out_labels = np.empty((size, size), np.uint8)
    for y in range(size):
        for x in range(size):
            row, column = y + shift(labels.shape[0], top), x + shift(labels.shape[1], left)
            inside = 0 <= row < labels.shape[0] and 0 <= column < labels.shape[1]
            out[y, x] = rgb[row, column] if inside else PADDING
            out_labels[y, x] = labels[row, column] if inside else 255
    return out, out_labels


def crop(
    rgb: NDArray[np.uint8],
    labels: NDArray[np.uint8],
    size: int,
    draws: Sequence[float],
    *,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return random_crop(rgb, labels, size=size, scales=scales, mirror=mirror, draws=np.array(draws))


draws_in_unit = st.floats(0, 1 - 2**-53)


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), draws_in_unit, draws_in_unit, draws_in_unit)
def test_a_crop_is_the_references(height: int, width: int, size: int, turn: float, top: float, left: float) -> None:
    rgb, labels = picture(height, width)
    expected = slow_crop(rgb, labels, size, top, left)
    for found, wanted in zip(crop(rgb, labels, size, [0, turn, top, left]), expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, np.uint8)
        np.testing.assert_array_equal(found, wanted)
    turned = expected if turn >= 0.5 else slow_crop(rgb[:, ::-1], labels[:, ::-1], size, top, left)
    for found, wanted in zip(crop(rgb, labels, size, [0, turn, top, left], mirror=True), turned, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("side", "places"), [(9, 5), (2, 4)])
def test_every_place_of_a_crop_is_taken(side: int, places: int) -> None:
    """A side of 9 holds five crops of 5, a side of 2 lies at four places in one; both ends are among them."""
    rgb, labels = picture(side, side)
    found = {crop(rgb, labels, 5, [0, 0, top, 0])[1].tobytes() for top in np.linspace(0, 1, 50, endpoint=False)}
    assert len(found) == places
    for end in (0.0, 1 - 2**-53):
        assert crop(rgb, labels, 5, [0, 0, end, 0])[1].tobytes() in found


def test_padding_teaches_nothing_and_has_imagenets_color() -> None:
    rgb, labels = picture(3, 4)
    image, taught = crop(rgb, labels, 10, [0, 0, 0.5, 0.5])
    assert (taught != 255).sum() == 12
    assert (image[taught == 255] == PADDING).all()
    np.testing.assert_array_equal(image[taught != 255][:, 0], taught[taught != 255])


@quick
@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([0.5, 0.7, 1.3, 2.0]), st.booleans())
def test_scaled_crops_are_bilinear_and_their_labels_nearest(
    height: int, width: int, scale: float, mirrored: bool
) -> None:
    """Against the triangle filter and nearest centers in float64; the crop is as large as the scaled image."""
    rng = np.random.default_rng(height * 10 + width)
    rgb = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    labels = rng.integers(0, 21, (height, width)).astype(np.uint8)

    def weights(old: int) -> NDArray[np.float64]:
        new = max(1, round(old * scale))
        step = old / new
        centers = (np.arange(new) + 0.5) * step
        triangle = np.clip(1 - np.abs(np.arange(old) + 0.5 - centers[:, None]) / max(step, 1), 0, None)
        return triangle / triangle.sum(1, keepdims=True)

    rows, columns = weights(height), weights(width)
    size = max(len(rows), len(columns))
    smooth = np.einsum("yr,xc,rcb->yxb", rows, columns, rgb.astype(float))
    # The center of a pixel may lie on the border of two: both are nearest.
    nearest = [
        labels[((np.arange(len(rows)) + 0.5) * height / len(rows) + dy).astype(int)][
            :, ((np.arange(len(columns)) + 0.5) * width / len(columns) + dx).astype(int)
        ]
        for dy in (-1e-6, 1e-6)
        for dx in (-1e-6, 1e-6)
    ]
    draws = [0.0, 0.0 if mirrored else 0.9, 0.0, 0.0]
    image, taught = crop(rgb, labels, size, draws, scales=[scale], mirror=True)
    turn = -1 if mirrored else 1
    assert np.abs(image[: len(rows), : len(columns)] - smooth[:, ::turn]).max() <= 1.5
    assert np.any([taught[: len(rows), : len(columns)] == each[:, ::turn] for each in nearest], axis=0).all()
    assert (taught != 255).sum() == len(rows) * len(columns)


def test_each_scale_has_its_part_of_the_draws() -> None:
    rgb, labels = picture(4, 4)
    scales = (0.5, 1.0, 1.5, 2.0)
    for part, scale in enumerate(scales):
        for chosen in (part / 4, (part + 1) / 4 - 2**-53):
            assert (crop(rgb, labels, 8, [chosen, 0, 0, 0], scales=scales)[1] != 255).sum() == (4 * scale) ** 2


@pytest.mark.parametrize(("turn", "mirrored"), [(0.0, True), (0.5 - 2**-53, True), (0.5, False), (1 - 2**-53, False)])
def test_half_of_the_crops_are_mirrored(turn: float, mirrored: bool) -> None:
    rgb, labels = picture(4, 5)
    expected = labels[:, ::-1] if mirrored else labels
    np.testing.assert_array_equal(crop(rgb, labels, 5, [0, turn, 0, 0], mirror=True)[1][:4], expected)


def test_a_crop_of_another_images_labels_raises() -> None:
    rgb, labels = picture(4, 5)
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(5, 4\)"):
        crop(rgb, labels.T, 4, [0, 0, 0, 0])


# --- shares of a batch


@given(st.integers(1, 20), st.integers(1, 20))
def test_shares_of_a_batch_add_up_and_differ_by_one_at_most(batch: int, world: int) -> None:
    rows = [Share(rank, world, 0, 1).rows(batch) for rank in range(world)]
    assert sum(rows) == batch
    assert max(rows) - min(rows) <= 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The listing of a small data set that is drawn once."""
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    draw(root, train=24, val=4, size=48, classes=4)
    table = list_voc(root, classes=root / "classes.txt").table
    return table.slice(0, 24)


def decoder(listing: pa.Table, share: Share, batch: int = 5) -> PairDecoder:
    sampler = PairSampler(Tags.of_index(listing["tags"], 4), seed=1)
    return PairDecoder(Squares(listing["uri"].to_pylist(), SIZE), sampler, batch=batch, share=share)


def decoded(listing: pa.Table, share: Share, batch: int = 5) -> list[Batch]:
    """The batches of a share one by one: a call of the decoder a step."""
    decode = decoder(listing, share, batch)
    return [decode({"id": np.array([step])}) for step in range(share.stop - share.start)]


def same(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(COLUMNS)
        for name in COLUMNS:
            kind = "u" if name.startswith("images") or name == "kind" else "b" if name.startswith("unshared") else "i"
            assert one[name].dtype == {"u": np.uint8, "b": np.bool_, "i": np.int64}[kind]
            np.testing.assert_array_equal(one[name], other[name])


def test_decoded_pairs_are_the_samplers_and_their_pixels_the_files(drawn: pa.Table) -> None:
    rows = PairSampler(Tags.of_index(drawn["tags"], 4), seed=1).rows(15, 25)
    (batch,) = [decoder(drawn, Share(0, 1, 3, 5))({"id": np.arange(2)})]
    for name in ("m", "n", "epoch"):
        np.testing.assert_array_equal(batch[name], getattr(rows, name))
    np.testing.assert_array_equal(batch["row"], np.arange(15, 25))
    for side in ("m", "n"):
        assert batch[f"images_{side}"].shape == (10, SIZE, SIZE, 3)
        for place, image in zip(batch[side], batch[f"images_{side}"], strict=True):
            data = Path(drawn["uri"][int(place)].as_py()).read_bytes()
            np.testing.assert_array_equal(image, decode_square(data, SIZE))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_the_workers_rows_make_up_the_batch(drawn: pa.Table, world: int) -> None:
    whole = decoded(drawn, Share(0, 1, 2, 4))
    parts = [decoded(drawn, Share(rank, world, 2, 4)) for rank in range(world)]
    for step, batch in enumerate(whole):
        for name in COLUMNS:
            together = np.empty_like(batch[name])
            for rank in range(world):
                together[rank::world] = parts[rank][step][name]
            np.testing.assert_array_equal(together, batch[name])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_knows_of_unshared_labels_in_the_whole_batch(drawn: pa.Table, rank: int) -> None:
    """Against sets, pair by pair, the pairs of other workers too; a worker's own rows alone say something else."""
    tags = [set(each) for each in drawn["tags"].to_pylist()]
    sampler = PairSampler(Tags.of_index(drawn["tags"], 4), seed=1)
    seen, own = [], []
    for step, batch in enumerate(decoded(drawn, Share(rank, 3, 0, 60), batch=3)):
        rows = sampler.rows(3 * step, 3 * step + 3)
        pairs = list(zip(rows.m.tolist(), rows.n.tolist(), strict=True))
        expected = [any(tags[m] - tags[n] for m, n in pairs), any(tags[n] - tags[m] for m, n in pairs)]
        assert [set(batch[f"unshared_{side}"].tolist()) for side in "mn"] == [{expected[0]}, {expected[1]}]
        m, n = pairs[rank]
        seen.append(expected)
        own.append([bool(tags[m] - tags[n]), bool(tags[n] - tags[m])])
    assert {value for each in seen for value in each} == {True, False}
    assert seen != own


def test_an_image_that_is_twice_in_an_epoch_is_cropped_twice(drawn: pa.Table) -> None:
    sampler = PairSampler(Tags.of_index(drawn["tags"], 4), seed=1, class_balance=1.0)
    squares = Squares(drawn["uri"].to_pylist(), SIZE)
    decode = PairDecoder(squares, sampler, batch=24, share=Share(0, 1, 0, 1), crop_scales=(1.0, 1.5))
    batch = decode({"id": np.array([0])})
    assert set(batch["epoch"].tolist()) == {0}
    crops: dict[int, list[bytes]] = {}
    for image, pixels in zip(batch["m"].tolist(), batch["images_m"], strict=True):
        crops.setdefault(image, []).append(pixels.tobytes())
    again = [pictures for pictures in crops.values() if len(pictures) > 1]
    assert again
    assert all(len(set(pictures)) > 1 for pictures in again)


# --- the two places

both = pytest.mark.parametrize("place", ["threads", "tasks"])


@both
@pytest.mark.parametrize("world", [1, 2])
def test_both_places_stream_what_a_loop_decodes(drawn: pa.Table, world: int, place: Place, ray_local: None) -> None:
    for rank in range(world):
        share = Share(rank, world, 0, 30)
        found = batches(decoder(drawn, share), batch=5, share=share, place=place, threads=3)
        same(list(found), decoded(drawn, share))


@both
def test_a_stream_that_starts_in_the_middle_continues(drawn: pa.Table, place: Place, ray_local: None) -> None:
    late = Share(1, 2, 7, 12)
    found = batches(decoder(drawn, late), batch=5, share=late, place=place)
    same(list(found), decoded(drawn, Share(1, 2, 0, 12))[7:])


@both
def test_random_crops_are_the_same_in_both_places_and_differ_between_epochs(
    drawn: pa.Table, place: Place, ray_local: None
) -> None:
    share = Share(0, 1, 0, 10)
    sampler = PairSampler(Tags.of_index(drawn["tags"], 4), seed=1)
    decode = PairDecoder(Squares(drawn["uri"].to_pylist(), SIZE), sampler, batch=5, share=share, crop_scales=(1.0, 1.5))
    found = list(batches(decode, batch=5, share=share, place=place, threads=2))
    same(found, [decode({"id": np.array([step])}) for step in range(10)])
    seen: dict[int, list[NDArray[np.uint8]]] = {}
    for batch in found:
        for image, pixels in zip(batch["m"].tolist(), batch["images_m"], strict=True):
            seen.setdefault(image, []).append(pixels)
    again = [pictures for pictures in seen.values() if len(pictures) > 1]
    assert again, "the stream is longer than an epoch"
    assert any(not np.array_equal(pictures[0], pictures[1]) for pictures in again)


def test_threads_decode_a_bounded_number_of_steps_ahead_and_stop_with_the_reader() -> None:
    asked: list[int] = []

    class Decode:
        row_bytes = 8

        def __call__(self, steps: Batch) -> Batch:
            asked.extend(steps["id"].tolist())
            return dict(steps)

    before = threading.active_count()
    stream = by_threads(Decode(), share=Share(0, 1, 0, 1000), threads=2)
    assert [int(next(stream)["id"][0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    time.sleep(0.2)
    assert 5 <= len(asked) <= 5 + 2 * 4
    stream.close()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.05)
    assert threading.active_count() == before
    assert len(asked) <= 5 + 2 * 4


@pytest.mark.parametrize("steps", [1, 4, 11])
def test_windows_change_nothing(drawn: pa.Table, ray_local: None, steps: int) -> None:
    share = Share(0, 1, 3, 14)
    decode = decoder(drawn, share)
    found = list(by_tasks(decode, batch=5, share=share, window_bytes=steps * 5 * decode.row_bytes))
    same(found, decoded(drawn, share))


@both
def test_a_stream_of_no_step_is_empty(drawn: pa.Table, place: Place) -> None:
    share = Share(0, 1, 4, 4)
    assert list(batches(decoder(drawn, share), batch=5, share=share, place=place)) == []


def test_order_holds_where_the_first_blocks_take_longest(ray_local: None) -> None:
    class Decode:
        row_bytes = 8

        def __call__(self, steps: Batch) -> Batch:
            time.sleep(1.5 if 0 in steps["id"] else 0)
            return {"step": np.repeat(steps["id"], 32), "block": np.full(32 * len(steps["id"]), steps["id"][0])}

    found = list(batches(Decode(), batch=32, share=Share(0, 1, 0, 12), place="tasks"))
    assert [set(batch["step"].tolist()) for batch in found] == [{step} for step in range(12)]
    assert [len(batch["step"]) for batch in found] == [32] * 12
    assert len({block for batch in found for block in batch["block"].tolist()}) > 2, "one block proves nothing"


@both
def test_a_file_that_vanishes_ends_the_stream_with_the_users_error(
    drawn: pa.Table, place: Place, ray_local: None
) -> None:
    uris = drawn["uri"].to_pylist()
    uris[5] += ".gone"
    share = Share(0, 1, 0, 10)
    decode = decoder(drawn, share)
    decode.images = Squares(uris, SIZE)
    with pytest.raises(UserError, match=r"\.gone cannot be read any more") as caught:
        list(batches(decode, batch=5, share=share, place=place))
    assert type(caught.value) is UserError
    assert "Traceback" not in str(caught.value)
