"""Training speed from the stream of batches, relative to training with all batches in memory.

Recipe `scratch`, whose step is the shortest and therefore leaves the stream the least time. The stream reads the cache
of decoded images like the stage does, in a thread next to the training. Both sides train the same network on the same
batches, in turn.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import jpeg_files
import numpy as np
import torch
from data_loading import draw_tags, write_cache

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard, decode_in_threads
from mcis.datasets.sampling.batches import PairBatch
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import ClassifierLearner

TARGET = 0.95


def train(learner: ClassifierLearner, stream: Iterator[PairBatch], steps: int) -> float:
    """Trains for `steps` steps and returns the images per second. The first quarter of the steps is not measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model: Any = learner.model()
    model.to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, learner.schedule.optimizer)
    start = 0.0
    images = 0
    for step in range(steps):
        if step == steps // 4:  # by now both sides have filled their buffers
            start = time.perf_counter()
            images = 0
        batch = next(stream)
        losses = learner.loss_sums(model, batch, step, device)
        loss = torch.stack(list(losses.values())).sum() / learner.count(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        images += 2 * len(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - start)


def main() -> None:
    """Trains both ways in turn and prints the ratio of the medians."""
    options = harness.option_parser(__doc__, images=600, steps=120, rounds=4).parse_args()
    print(harness.describe_machine())
    config = resolve("voc", "scratch").config.classifier
    with tempfile.TemporaryDirectory() as folder:
        paths = jpeg_files.write_jpegs(Path(folder) / "images", options.images)
        cache = Path(folder) / "cache"
        write_cache(cache, paths, config.input_size)
        learner = ClassifierLearner(
            config=config,
            seed=0,
            tags=draw_tags(options.images),
            is_source=None,
            images=Squares(paths, config.input_size, cache=cache),
            pretrained=None,
        )
        shard = WorkerShard(0, 1, 0, options.steps)
        decode = learner.decoder(shard)
        resident = [decode(np.array([step])) for step in range(options.steps)]

        def train_from_stream() -> float:
            stream = decode_in_threads(decode, shard=shard, threads=1)
            return train(learner, stream, options.steps)

        def train_from_memory() -> float:
            return train(learner, iter(resident), options.steps)

        sides = {"stream": train_from_stream, "memory": train_from_memory}
        measured = harness.measure_in_turn(sides, options.rounds)

    medians = harness.print_medians(measured, "images/s")
    ratio = medians["stream"] / medians["memory"]
    print(f"ratio {ratio:.2f} target {TARGET}: training from the stream, relative to batches in memory")


if __name__ == "__main__":
    main()
