"""Training from the stream, compared with training with all batches in memory.

Recipe `small`, whose step is the shortest and so leaves the stream the least time. The stream reads the decoded cache,
as the stage does, in a thread beside the training. Both sides train the same network on the same batches, in turn.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np
import photos
import torch
from stream import tags_of

from mcis.datasets.images.squares import Squares, make_squares
from mcis.datasets.sampling.batch_stream import WorkerShard, batches
from mcis.datasets.sampling.batches import PairBatch
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.runs.files import write_table

TARGET = 0.95


def train(learner: ClassifierLearner, stream: Iterator[PairBatch], steps: int) -> float:
    """Images per second of `steps` updates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model: Any = learner.model()
    model.to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, learner.schedule.optimizer)
    began, images = 0.0, 0
    for step in range(steps):
        if step == steps // 4:  # by then both sides have their buffers
            began, images = time.perf_counter(), 0
        batch = next(stream)
        loss = torch.stack(list(learner.loss_sums(model, batch, step, device).values())).sum() / learner.count(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        images += 2 * len(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def main() -> None:
    """Trains both ways in turn and prints the ratio of the medians."""
    arguments = machine.arguments(__doc__, images=600, steps=120, rounds=4).parse_args()
    print(machine.describe())
    config = resolve("voc", "scratch").config.classifier
    with tempfile.TemporaryDirectory() as folder:
        paths = photos.make(Path(folder) / "images", arguments.images)
        cache = Path(folder) / "cache"
        for first in range(0, len(paths), 64):
            part = paths[first : first + 64]
            name = f"part-{first:08d}-{first + len(part):08d}.arrow"
            write_table(cache / name, make_squares(config.input_size)(photos.rows(part)))
        learner = ClassifierLearner(
            config=config,
            seed=0,
            tags=tags_of(arguments.images),
            source=None,
            images=Squares(paths, config.input_size, cache=cache),
            pretrained=None,
        )
        shard = WorkerShard(0, 1, 0, arguments.steps)
        decode = learner.decoder(shard)
        resident = [decode(np.array([step])) for step in range(arguments.steps)]

        def streamed() -> float:
            stream = batches(decode, batch=config.batch, shard=shard, decode_in="threads", threads=1)
            return train(learner, stream, arguments.steps)

        sides = {"stream": streamed, "resident": lambda: train(learner, iter(resident), arguments.steps)}
        measured = machine.in_turn(sides, arguments.rounds)
    medians = machine.medians(measured, "images/s")
    ratio = medians["stream"] / medians["resident"]
    print(f"ratio {ratio:.2f} target {TARGET}: training from the stream, of resident data")


if __name__ == "__main__":
    main()
