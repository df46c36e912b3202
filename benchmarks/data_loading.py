"""Images of pairs per second that a training worker receives.

Four sides are measured in turn in each round: plain decoding and resizing in one process per core, which is the upper
limit; a torch DataLoader with as many processes, the same images and the same transforms; the stream that decodes; and
the stream from the cache of decoded images. Both streams run in a Ray Train worker that does not use the batches. The
cache is made beforehand.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import jpeg_files
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.squares import Squares, make_squares
from mcis.datasets.sampling.batch_stream import WorkerShard, decode_in_threads
from mcis.datasets.sampling.batches import PairDecoder
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tags import Tags
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.files import write_table

SIDE = 256
BATCH = 8
CLASSES = 20
WARM_UP_BATCHES = 20
"""Batches that are not measured, so that batches prepared beforehand count for no side."""
CHUNK = 64
TARGET_CACHE = 4
TARGET_DECODING = 1


def draw_tags(images: int) -> Tags:
    """Draws synthetic tags, about 1.5 per image."""
    rng = np.random.default_rng(0)
    matrix = np.zeros((images, CLASSES), bool)
    matrix[np.arange(images), rng.integers(0, CLASSES, images)] = True
    has_second = rng.random(images) < 0.5
    matrix[has_second, rng.integers(0, CLASSES, has_second.sum())] = True
    return Tags.from_matrix(matrix)


def write_cache(folder: Path, paths: list[str], side: int) -> None:
    """Decodes the images to squares and writes them as shards of a cache."""
    make = make_squares(side)
    for first in range(0, len(paths), CHUNK):
        chunk = paths[first : first + CHUNK]
        name = f"part-{first:08d}-{first + len(chunk):08d}.arrow"
        write_table(folder / name, make(jpeg_files.file_rows(chunk)))


def decode(path: str) -> NDArray[np.uint8]:
    """Decodes and resizes a file, the same on all sides."""
    return decode_square(Path(path).read_bytes(), SIDE)


class PairDataset(Dataset[Any]):
    """Pairs of images as a torch data set.

    Args:
        paths: Files of the images.
        sampler: Draws the pairs.
        pairs: Number of pairs.
    """

    def __init__(self, paths: list[str], sampler: PairSampler, pairs: int):
        rows = sampler.rows(0, pairs)
        self.paths_m = [paths[position] for position in rows.m.tolist()]
        self.paths_n = [paths[position] for position in rows.n.tolist()]

    def __len__(self) -> int:
        return len(self.paths_m)

    def __getitem__(self, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        image_m = torch.from_numpy(decode(self.paths_m[pair]))
        image_n = torch.from_numpy(decode(self.paths_n[pair]))
        return image_m, image_n


def plain_rate(dataset: PairDataset) -> float:
    """Measures the images per second of decoding and resizing only."""
    paths = []
    for path_m, path_n in zip(dataset.paths_m, dataset.paths_n, strict=True):
        paths += [path_m, path_n]
    chunks = [paths[first : first + CHUNK] for first in range(0, len(paths), CHUNK)]
    with harness.process_pool() as pool:
        start = time.perf_counter()
        for _ in pool.imap_unordered(_decode_all, chunks):
            pass
        return len(paths) / (time.perf_counter() - start)


def _decode_all(paths: list[str]) -> int:
    return sum(len(decode(path)) for path in paths)


def loader_rate(dataset: PairDataset, processes: int) -> float:
    """Measures the images per second of the DataLoader."""
    loader = iter(DataLoader(dataset, batch_size=BATCH, num_workers=processes, multiprocessing_context="spawn"))
    for _ in range(WARM_UP_BATCHES):
        next(loader)
    start = time.perf_counter()
    images = 0
    for images_m, images_n in loader:
        images += len(images_m) + len(images_n)
    return images / (time.perf_counter() - start)


def stream_rate(images: Squares, sampler: PairSampler, pairs: int, threads: int) -> float:
    """Measures the images per second that a Ray Train worker receives from the stream."""
    import ray.train
    import ray.train.torch

    shard = WorkerShard(0, 1, 0, pairs // BATCH)
    with tempfile.TemporaryDirectory() as folder:
        rate_file = Path(folder) / "rate.json"

        def read_stream(settings: dict[str, Any]) -> None:
            decoder = PairDecoder(images, sampler, batch=BATCH, shard=shard)
            stream = decode_in_threads(decoder, shard=shard, threads=threads)
            for _ in range(WARM_UP_BATCHES):
                next(stream)
            start = time.perf_counter()
            count = 0
            for batch in stream:
                count += 2 * len(batch)
            rate_file.write_text(json.dumps(count / (time.perf_counter() - start)))

        ray.train.torch.TorchTrainer(
            read_stream,
            train_loop_config={},
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
            run_config=ray.train.RunConfig(name="stream", storage_path=folder),
        ).fit()
        rate: float = json.loads(rate_file.read_text())
        return rate


def main() -> None:
    """Measures all four sides in turn and prints the ratios of their medians."""
    options = harness.option_parser(__doc__, images=1500, rounds=5).parse_args()
    print(harness.describe_machine())
    cores = harness.available_cores()
    with tempfile.TemporaryDirectory() as folder:
        paths = jpeg_files.write_jpegs(Path(folder) / "images", options.images)
        sampler = PairSampler(draw_tags(options.images), seed=0)
        dataset = PairDataset(paths, sampler, options.images)
        cache = Path(folder) / "cache"
        write_cache(cache, paths, SIDE)
        decoded = Squares(paths, SIDE)
        cached = Squares(paths, SIDE, cache=cache)
        sides = {
            "plain": lambda: plain_rate(dataset),
            "loader": lambda: loader_rate(dataset, cores),
            "decoding": lambda: stream_rate(decoded, sampler, options.images, cores),
            "cache": lambda: stream_rate(cached, sampler, 8 * options.images, cores),
        }
        with ray_session(ComputeConfig()):
            measured = harness.measure_in_turn(sides, options.rounds)

    size = f"{jpeg_files.WIDTH}x{jpeg_files.HEIGHT}"
    print(f"{options.images} JPEGs of {size} to {SIDE}x{SIDE}, batches of {BATCH} pairs")
    medians = harness.print_medians(measured, "images/s")
    from_cache = medians["cache"] / medians["loader"]
    print(f"ratio {from_cache:.2f} target {TARGET_CACHE}: images/s of pairs from the cache, relative to a DataLoader")
    decoding = medians["decoding"] / medians["loader"]
    print(f"ratio {decoding:.2f} target {TARGET_DECODING}: images/s of pairs with decoding, relative to a DataLoader")


if __name__ == "__main__":
    main()
