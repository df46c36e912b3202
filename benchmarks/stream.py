"""Pair images per second that a training worker is given.

Sides, in turn in each round: bare decoding and resizing in as many processes as there are cores, the limit; a torch
DataLoader with as many processes, the same images and the same transforms; the stream that decodes, and the stream from
the decoded cache, both in a Ray Train worker that does nothing with what it gets. The cache was made beforehand.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import photos
import torch
from torch.utils.data import DataLoader, Dataset

from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.squares import Squares, make_squares
from mcis.datasets.sampling.batch_stream import WorkerShard, batches
from mcis.datasets.sampling.batches import PairDecoder
from mcis.datasets.sampling.pairs import PairSampler
from mcis.datasets.tags import Tags
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.files import write_table

SIZE, BATCH, CLASSES = 256, 8, 20
SKIPPED = 20  # batches before the clock starts, so that what was prepared beforehand counts for neither side


def tags_of(images: int) -> Tags:
    """Made-up tags, 1.5 per image."""
    rng = np.random.default_rng(0)
    matrix = np.zeros((images, CLASSES), bool)
    matrix[np.arange(images), rng.integers(0, CLASSES, images)] = True
    second = rng.random(images) < 0.5
    matrix[second, rng.integers(0, CLASSES, second.sum())] = True
    return Tags.from_matrix(matrix)


def load(path: str) -> np.ndarray:
    """What both sides do with a file."""
    return decode_square(Path(path).read_bytes(), SIZE)


class Pairs(Dataset[Any]):
    """The sampler's pairs as a torch data set."""

    def __init__(self, paths: list[str], sampler: PairSampler, pairs: int):
        rows = sampler.rows(0, pairs)
        self.paths, self.m, self.n = paths, rows.m.tolist(), rows.n.tolist()

    def __len__(self) -> int:
        return len(self.m)

    def __getitem__(self, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        m, n = load(self.paths[self.m[pair]]), load(self.paths[self.n[pair]])
        return torch.from_numpy(m), torch.from_numpy(n)


def bare(paths: list[str], pairs: Pairs) -> float:
    """Images per second of decoding and resizing alone."""
    wanted = [paths[i] for pair in zip(pairs.m, pairs.n, strict=True) for i in pair]
    with machine.processes() as pool:
        began = time.perf_counter()
        for _ in pool.imap_unordered(_bare, [wanted[i : i + 64] for i in range(0, len(wanted), 64)]):
            pass
        return len(wanted) / (time.perf_counter() - began)


def _bare(paths: list[str]) -> int:
    return sum(len(load(path)) for path in paths)


def loader(pairs: Pairs, processes: int) -> float:
    """Images per second of the DataLoader."""
    ready = iter(DataLoader(pairs, batch_size=BATCH, num_workers=processes, multiprocessing_context="spawn"))
    for _ in range(SKIPPED):
        next(ready)
    began, images = time.perf_counter(), 0
    for m, n in ready:
        images += len(m) + len(n)
    return images / (time.perf_counter() - began)


def delivered(images: Squares, sampler: PairSampler, pairs: int, threads: int) -> float:
    """Images per second that a Ray Train worker gets from the stream."""
    import ray.train
    import ray.train.torch

    shard = WorkerShard(0, 1, 0, pairs // BATCH)
    with tempfile.TemporaryDirectory() as folder:

        def work(settings: dict[str, Any]) -> None:
            decode = PairDecoder(images, sampler, batch=BATCH, shard=shard)
            stream = batches(decode, batch=BATCH, shard=shard, decode_in="threads", threads=threads)
            for _ in range(SKIPPED):
                next(stream)
            began, count = time.perf_counter(), 0
            for batch in stream:
                count += 2 * len(batch)
            rate = count / (time.perf_counter() - began)
            (Path(folder) / "rate.json").write_text(json.dumps(rate))

        ray.train.torch.TorchTrainer(
            work,
            train_loop_config={},
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
            run_config=ray.train.RunConfig(name="stream", storage_path=folder),
        ).fit()
        rate: float = json.loads((Path(folder) / "rate.json").read_text())
        return rate


def main() -> None:
    """Measures all four sides and prints the ratios of their medians."""
    arguments = machine.arguments(__doc__, images=1500, rounds=5).parse_args()
    print(machine.describe())
    cores = machine.cores()
    with tempfile.TemporaryDirectory() as folder:
        paths = photos.make(Path(folder) / "images", arguments.images)
        sampler = PairSampler(tags_of(arguments.images), seed=0)
        pairs = Pairs(paths, sampler, arguments.images)
        cache = Path(folder) / "cache"
        for first in range(0, len(paths), 64):
            part = paths[first : first + 64]
            write_table(
                cache / f"part-{first:08d}-{first + len(part):08d}.arrow", make_squares(SIZE)(photos.rows(part))
            )
        squares, cached = Squares(paths, SIZE), Squares(paths, SIZE, cache=cache)
        sides = {
            "bare": lambda: bare(paths, pairs),
            "loader": lambda: loader(pairs, cores),
            "decoding": lambda: delivered(squares, sampler, arguments.images, cores),
            "cache": lambda: delivered(cached, sampler, 8 * arguments.images, cores),
        }
        with ray_session(ComputeConfig()):
            measured = machine.in_turn(sides, arguments.rounds)
    print(f"{arguments.images} JPEGs of {photos.WIDTH}x{photos.HEIGHT} to {SIZE}x{SIZE}, batches of {BATCH} pairs")
    medians = machine.medians(measured, "images/s")
    print(f"ratio {medians['cache'] / medians['loader']:.2f} target 4: pair images/s from the cache, of a DataLoader")
    print(f"ratio {medians['decoding'] / medians['loader']:.2f} target 1: pair images/s, decoding, of a DataLoader")


if __name__ == "__main__":
    main()
