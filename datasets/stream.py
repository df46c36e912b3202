"""Streams from drawn rows to decoded uint8 batches for one training worker.

A worker asks for its own rows: of batch t it takes every world-th pair, beginning at its rank. The whole batch is the
same for any number of workers, and a stream that starts at step s continues as if it had never stopped. Rows are
drawn, files opened and decoded in threads of the worker's process, or in Ray Data tasks on any CPU of the cluster; both
deliver the same batches. uint8 crosses the wire and everything else (normalization, jitter, flips) happens on the
device.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.decode import resize_labels
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.errors import UserError
from mcis.datasets.images import Squares, read_rgb
from mcis.datasets.pairs import PairRows, PairSampler

Batch = dict[str, NDArray[Any]]
Place = Literal["threads", "tasks"]
_ROWS_A_BLOCK = 64
_AHEAD = 4
_PADDING = (124, 116, 104)  # ImageNet's mean color


class Share(NamedTuple):
    """A worker's part of a stream: every `world`-th row of each batch from `rank` on, steps `start` .. `stop` - 1."""

    rank: int
    world: int
    start: int
    stop: int

    def rows(self, batch: int) -> int:
        """Rows of a batch that fall to this worker."""
        return len(range(self.rank, batch, self.world))


def random_crop(
    rgb: NDArray[np.uint8],
    labels: NDArray[np.uint8],
    *,
    size: int,
    scales: Sequence[float],
    mirror: bool,
    draws: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A training crop of an image (H, W, 3) and its labels (H, W): scaled, mirrored, padded where it is too small.

    Args:
        size: side of the crop, pixels. Padding has ImageNet's mean color and label 255, which teaches nothing.
        scales: factors, one of which is drawn; bilinear for the image, nearest for the labels.
        draws: four numbers in [0, 1): scale, mirror, top, left.

    Returns:
        (size, size, 3) and (size, size), uint8.

    Raises:
        ValueError: image and labels differ in size.
    """
    if rgb.shape[:2] != labels.shape:
        raise ValueError(f"image {rgb.shape[:2]} and labels {labels.shape} differ in size")
    factor = scales[int(draws[0] * len(scales))]
    height, width = (max(1, round(side * factor)) for side in labels.shape)
    rgb = np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BILINEAR))
    labels = resize_labels(labels, height, width)
    if mirror and draws[1] < 0.5:
        rgb, labels = rgb[:, ::-1], labels[:, ::-1]
    out = np.full((size, size, 3), _PADDING, np.uint8)
    out_labels = np.full((size, size), 255, np.uint8)
    # Where the image is smaller than the crop, it lies anywhere in it; where it is larger, any part of it is taken.
    at, to = [], []
    for side, draw in ((height, draws[2]), (width, draws[3])):
        offset = int(draw * (abs(side - size) + 1))
        length = min(side, size)
        at.append(slice(offset, offset + length) if side > size else slice(0, length))
        to.append(slice(0, length) if side > size else slice(offset, offset + length))
    out[to[0], to[1]] = rgb[at[0], at[1]]
    out_labels[to[0], to[1]] = labels[at[0], at[1]]
    return out, out_labels


class PairDecoder:
    """Step numbers -> the decoded pairs of those steps.

    `images_m`, `images_n` (N, S, S, 3) uint8; `m`, `n` positions in the index, `epoch` and `kind` (see PairRows), (N,);
    `row`, the pair's number in the endless stream, (N,): what is drawn for a pair is drawn from it, since an image may
    be in several pairs of an epoch; `unshared_m`, `unshared_n`, whether any pair of the whole batch, those of other
    workers too, has a label on that side that the other side lacks, (N,) bool.

    Args:
        crop_scales: None = the images whole; else random crops (see `random_crop`), drawn from (seed, row, image).
    """

    def __init__(
        self,
        images: Squares,
        sampler: PairSampler,
        *,
        batch: int,
        share: Share,
        crop_scales: Sequence[float] | None = None,
    ):
        self.images, self.sampler, self.batch, self.share, self.scales = images, sampler, batch, share, crop_scales

    @property
    def row_bytes(self) -> int:
        """Two images."""
        return 2 * 3 * self.images.size**2

    def __call__(self, steps: Batch) -> Batch:
        numbers = [np.arange(t * self.batch, (t + 1) * self.batch) for t in steps["id"] + self.share.start]
        rows = [self.sampler.rows(int(each[0]), int(each[-1]) + 1) for each in numbers]
        mine = slice(self.share.rank, None, self.share.world)
        m, n, epoch, kind = (np.concatenate([r[k][mine] for r in rows]) for k in range(4))
        row = np.concatenate([each[mine] for each in numbers])
        unshared = np.repeat([self._unshared(r) for r in rows], self.share.rows(self.batch), axis=0)
        return {
            "images_m": self._pictures(m, row, Draw.PAIR_CROP_M),
            "images_n": self._pictures(n, row, Draw.PAIR_CROP_N),
            "m": m,
            "n": n,
            "epoch": epoch,
            "kind": kind,
            "row": row,
            "unshared_m": unshared[:, 0],
            "unshared_n": unshared[:, 1],
        }

    def _unshared(self, rows: PairRows) -> tuple[bool, bool]:
        """Whether some pair has a label on the side of m, and of n, that its other side lacks."""
        tags_m, tags_n = (self.sampler.tags.matrix(side) for side in (rows.m, rows.n))
        return bool((tags_m & ~tags_n).any()), bool((tags_n & ~tags_m).any())

    def _pictures(self, positions: NDArray[np.int64], row: NDArray[np.int64], purpose: Draw) -> NDArray[np.uint8]:
        if self.scales is None:
            return self.images(positions)
        draws = uniforms(purpose, self.sampler.seed, row, positions, count=4)
        crops = []
        for position, numbers in zip(positions.tolist(), draws, strict=True):
            rgb = read_rgb(self.images.uris[position])
            blank = np.zeros(rgb.shape[:2], np.uint8)
            size = self.images.size
            crops.append(random_crop(rgb, blank, size=size, scales=self.scales, mirror=False, draws=numbers)[0])
        return np.stack(crops)


class Decoder(Protocol):
    """Turns step numbers counted from the share's start (column `id`) into the decoded rows of these steps."""

    @property
    def row_bytes(self) -> int:
        """About how large a row is, bytes."""

    def __call__(self, steps: Batch) -> Batch:
        """The rows of the steps, in order."""


class _Windows:
    """Decodes a stream a window at a time, as an actor.

    An actor of its own, because Ray Data's loop would keep Python's lock from a training that it shares a process
    with; windows that are decoded whole, because that loop runs hot for as long as it holds back what nobody takes.
    """

    def __init__(self, decode: Decoder, blocks_of: int):
        import ray.data

        self.decode, self.blocks_of = decode, blocks_of
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.raise_original_map_exception = True  # else what `decode` raises arrives as text alone

    def window(self, first: int, last: int) -> Any:
        """Steps first .. last - 1 as a materialized data set."""
        import ray.data

        decode = self.decode
        blocks = -(-(last - first) // self.blocks_of)
        steps = ray.data.range(last - first, override_num_blocks=blocks)
        return steps.map_batches(lambda batch: decode({"id": batch["id"] + first}), batch_size=None).materialize()


def batches(decode: Decoder, *, batch: int, share: Share, place: Place, threads: int = 1) -> Iterator[Batch]:
    """The decoded batches of a worker's share, one a step, in order.

    Args:
        batch: rows of a whole batch, over all workers.
        place: `threads` of this process, the fastest where its own node has cores enough; or Ray Data `tasks`, for
            which any CPU of the cluster serves.
        threads: of the place `threads`.

    Raises:
        UserError: what `decode` raised as such.
    """
    if share.stop <= share.start:
        return iter(())
    if place == "threads":
        return by_threads(decode, share=share, threads=threads)
    return by_tasks(decode, batch=batch, share=share)


def by_threads(decode: Callable[[Batch], Batch], *, share: Share, threads: int) -> Generator[Batch, None, None]:
    """Decodes up to four steps a thread ahead of the training, in threads of this process; they end by `close`."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    coming: deque[Future[Batch]] = deque()
    try:
        for step in range(share.stop - share.start):
            coming.append(pool.submit(decode, {"id": np.array([step])}))
            if len(coming) > _AHEAD * threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def by_tasks(decode: Decoder, *, batch: int, share: Share, window_bytes: int = 96 * 2**20) -> Iterator[Batch]:
    """Decodes a window of `window_bytes` ahead in Ray Data tasks; at most two are held, in the object store."""
    import ray

    steps, mine = share.stop - share.start, share.rows(batch)
    length = max(1, window_bytes // (decode.row_bytes * mine))
    windows = [(first, min(first + length, steps)) for first in range(0, steps, length)]
    driver: Any = ray.remote(num_cpus=0)(_Windows).remote(decode, max(1, _ROWS_A_BLOCK // mine))
    try:
        coming = driver.window.remote(*windows[0])
        for place in range(len(windows)):
            window = ray.get(coming)
            if place + 1 < len(windows):
                coming = driver.window.remote(*windows[place + 1])
            for rows in window.iter_batches(batch_size=mine, prefetch_batches=1):
                yield {name: np.asarray(column) for name, column in rows.items()}
    except ray.exceptions.RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, UserError):
            raise cause from None
        raise
    finally:
        ray.kill(driver)
