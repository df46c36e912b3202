"""A training step on a frozen backbone whose outputs are kept, times faster than one that computes them again.

The classifier of recipe `photos` before its pairs attend, batches of 16: kept outputs are read from the shards of a
cache, float16; the other side reads images and passes them through the backbone without gradients. Both then do the
same. What the first epoch pays for the cache is one pass of each image and its mirror image.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import machine
import numpy as np
import torch
from torch import Tensor

from mcis.datasets.tables.memory_mapped import Features, cache_table
from mcis.models.backbones import to_float_images
from mcis.models.classifier_losses import LossInputs, weighted_losses
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_classifier, freeze, move_channels_last
from mcis.platform.networks.features import features_shape
from mcis.platform.runs.files import write_table

TARGET = 10.0
CLASSES, IMAGES = 20, 128


def main() -> None:
    """Runs both sides in turn and prints the ratio of their medians."""
    arguments = machine.arguments(__doc__, steps=5).parse_args()
    print(machine.describe())
    config = resolve("tags", "photos").config.classifier
    torch.manual_seed(0)
    model = build_classifier(config, CLASSES)
    freeze(model, config)
    move_channels_last(model, torch.device("cpu")).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rng, shape = np.random.default_rng(0), features_shape(config)
    pixels = rng.integers(0, 256, (IMAGES, config.input_size, config.input_size, 3), np.uint8)

    def step(m: Tensor, n: Tensor, *, embedded: bool) -> None:
        tags = (torch.rand(len(m), CLASSES) < 0.1).float()
        optimizer.zero_grad(set_to_none=True)
        outputs = model(m, n, embedded=embedded, attend=False)
        inputs = LossInputs(outputs.pairs, tags, tags, *outputs.features[0])
        losses = weighted_losses(inputs, config.loss_values, epoch=config.epochs)
        torch.stack([total / len(m) for total in losses.values()]).sum().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        kept = rng.normal(size=(IMAGES, 2, *shape)).astype(np.float16)
        write_table(Path(folder) / f"part-{0:08d}-{IMAGES:08d}.arrow", cache_table(kept))
        features = Features(["?"] * IMAGES, Path(folder), shape)

        def from_features() -> None:
            m, n = (torch.from_numpy(features(rng.integers(0, IMAGES, config.batch))).float() for _ in range(2))
            step(m, n, embedded=True)

        def from_images() -> None:
            pair = (torch.from_numpy(pixels[rng.integers(0, IMAGES, config.batch)]) for _ in range(2))
            m, n = (model.backbone.normalize(to_float_images(images)) for images in pair)
            step(m, n, embedded=False)

        sides = {
            "kept": lambda: median(from_features, 4 * arguments.steps),
            "images": lambda: median(from_images, arguments.steps),
        }
        measured = machine.in_turn(sides, 3)
    medians = machine.medians(measured, f"s per step of {2 * config.batch} images")
    ratio = medians["images"] / medians["kept"]
    print(f"ratio {ratio:.1f} target {TARGET:g}: training step on kept features, times faster than from the images")


def median(step: Callable[[], None], steps: int) -> float:
    """Seconds of a step, behind one that counts for nothing."""
    step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
