"""Speed of a training step on cached features of a frozen backbone, relative to a step that computes them again.

The classifier of recipe `photos` before its pairs attend to each other, in batches of 16. One side reads float16
features from the shards of a cache. The other side reads images and passes them through the backbone without gradients.
The rest of the step is the same. Filling the cache costs one pass of each image and its horizontal flip.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.tables.memory_mapped import Features, cache_table
from mcis.models.backbones import to_float_images
from mcis.models.classifier import PairInputs
from mcis.models.classifier_losses import LossInputs, weighted_losses
from mcis.platform.config.resolve import resolve
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier, freeze, move_channels_last
from mcis.platform.networks.features import features_shape
from mcis.platform.runs.files import write_table

TARGET = 10.0
CLASSES = 20
IMAGES = 128


def write_features(folder: Path, features: NDArray[np.float16]) -> Features:
    """Writes features of all images and their flips as one shard of a cache."""
    write_table(folder / f"part-{0:08d}-{IMAGES:08d}.arrow", cache_table(features))
    return Features(["?"] * IMAGES, folder, features.shape[2:])


class Training:
    """Training steps of the classifier of recipe `photos` on random images.

    Args:
        config: The classifier.
        folder: Folder for the shards of the cache.
    """

    def __init__(self, config: ClassifierConfig, folder: Path):
        torch.manual_seed(0)
        self.config = config
        self.model = build_classifier(config, CLASSES)
        freeze(self.model, config)
        move_channels_last(self.model, torch.device("cpu")).train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.rng = np.random.default_rng(0)
        self.pixels = self.rng.integers(0, 256, (IMAGES, config.input_size, config.input_size, 3), np.uint8)
        shape = (IMAGES, 2, *features_shape(config))
        self.features = write_features(folder, self.rng.normal(size=shape).astype(np.float16))

    def step_on_features(self) -> None:
        """Reads the features of a batch of pairs and makes a step."""
        self._step(PairInputs(self._read_features(), self._read_features(), is_embedded=True))

    def step_on_images(self) -> None:
        """Embeds the images of a batch of pairs and makes a step."""
        self._step(PairInputs(self._read_images(), self._read_images()))

    def _read_features(self) -> Tensor:
        return torch.from_numpy(self.features(self._draw_positions())).float()

    def _read_images(self) -> Tensor:
        pixels = torch.from_numpy(self.pixels[self._draw_positions()])
        images: Tensor = self.model.backbone.normalize(to_float_images(pixels))
        return images

    def _draw_positions(self) -> NDArray[np.int64]:
        return self.rng.integers(0, IMAGES, self.config.batch)

    def _step(self, pairs: PairInputs) -> None:
        num_pairs = len(pairs.m)
        tags = (torch.rand(num_pairs, CLASSES) < 0.1).float()
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.model(pairs, attend=False)
        inputs = LossInputs(outputs.pairs, tags, tags, *outputs.features[0])
        losses = weighted_losses(inputs, self.config.loss_values, epoch=self.config.epochs)
        torch.stack([loss / num_pairs for loss in losses.values()]).sum().backward()
        self.optimizer.step()


def main() -> None:
    """Measures both sides in turn and prints the ratio of their medians."""
    parser = harness.option_parser(__doc__, steps=5, rounds=3)
    harness.add_overrides(parser)
    options = parser.parse_args()
    print(harness.describe_machine())
    config = resolve("tags", "photos", overrides=options.overrides).config.classifier

    with tempfile.TemporaryDirectory() as folder:
        training = Training(config, Path(folder))
        sides = {
            "features": lambda: median_seconds(training.step_on_features, 4 * options.steps),
            "images": lambda: median_seconds(training.step_on_images, options.steps),
        }
        measured = harness.measure_in_turn(sides, options.rounds)

    medians = harness.print_medians(measured, f"s per step of {2 * config.batch} images")
    ratio = medians["images"] / medians["features"]
    print(f"ratio {ratio:.1f} target {TARGET:g}: training step on cached features, times faster than from the images")


def median_seconds(step: Callable[[], None], steps: int) -> float:
    """Measures the median seconds of a step, after one step that is not counted."""
    step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
