"""Speed of a training step on CPUs in a process that keeps freed memory, relative to glibc's default settings.

Two networks: the classifier of recipe `scratch` on a batch of pairs, and the bundled EfficientNet-Lite0 on 16 images of
256 pixels, whose many thin layers compute little per written byte. A step is forward pass, loss, backward pass and
optimizer step, in a thread like in Ray Train. Each side runs in new processes, in turn.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import harness
import torch
from torch import Tensor, nn

from mcis.models.classifier import PairInputs
from mcis.models.classifier_losses import LossInputs, weighted_losses
from mcis.models.pretrained import BUNDLED_BACKBONES
from mcis.models.timm_backbones import build_timm_backbone
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ALLOCATOR
from mcis.platform.networks.build import build_classifier, move_channels_last

TARGETS = {"small": 1.1, "EfficientNet-Lite0": 1.3}
CLASSES = 20
WARM_UP_STEPS = 2
Loss = Callable[[], Tensor]


def build_small() -> tuple[nn.Module, Loss]:
    """Returns the classifier of recipe `scratch` and its loss on a batch of pairs."""
    config = resolve("voc", "scratch").config.classifier
    model = build_classifier(config, CLASSES)
    images_m = random_images(config.batch, config.input_size)
    images_n = random_images(config.batch, config.input_size)
    tags_m = (torch.rand(config.batch, CLASSES) < 0.1).float()
    tags_n = (torch.rand(config.batch, CLASSES) < 0.1).float()

    def compute_loss() -> Tensor:
        outputs = model(PairInputs(images_m, images_n))
        inputs = LossInputs(outputs.pairs, tags_m, tags_n, *outputs.features[0])
        losses = weighted_losses(inputs, config.loss_values, epoch=config.epochs)
        return torch.stack([loss / config.batch for loss in losses.values()]).sum()

    return model, compute_loss


def build_lite0() -> tuple[nn.Module, Loss]:
    """Returns the bundled backbone with random weights, and a loss on its features of 16 images."""
    model = build_timm_backbone(BUNDLED_BACKBONES[0].removeprefix("timm/"), stride=32)
    images = random_images(16, 256)

    def compute_loss() -> Tensor:
        features: Tensor = model(images)
        return features.square().mean()

    return model, compute_loss


NETWORKS = {"small": build_small, "EfficientNet-Lite0": build_lite0}


def random_images(count: int, side: int) -> Tensor:
    """Returns channels-last images (count, 3, side, side)."""
    return torch.randn(count, 3, side, side).contiguous(memory_format=torch.channels_last)


def fastest_step(network: str, steps: int) -> float:
    """Returns the seconds of the fastest step. The median would include what other programs on the machine take."""
    torch.manual_seed(0)
    model, compute_loss = NETWORKS[network]()
    move_channels_last(model, torch.device("cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        compute_loss().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds[WARM_UP_STEPS:])


def run_in_thread(network: str, steps: int) -> None:
    """Prints the seconds of the fastest step as JSON. The steps run in a thread."""
    thread = threading.Thread(target=lambda: print(json.dumps(fastest_step(network, steps))))
    thread.start()
    thread.join()


def compare(network: str, *, steps: int, rounds: int) -> float:
    """Prints the seconds per step of both sides and returns how many times faster keeping freed memory is."""
    default: Mapping[str, str] = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    words = (f"--steps={steps}", "--one", network)
    sides = {
        "kept": partial(harness.run_script, __file__, *words, environment={**default, **ALLOCATOR}),
        "given back": partial(harness.run_script, __file__, *words, environment=default),
    }
    print(f"{network}, by whether freed memory is kept:")
    medians = harness.print_medians(harness.measure_in_turn(sides, rounds), "s per step")
    return medians["given back"] / medians["kept"]


def main() -> None:
    """Measures both sides of both networks in turn and prints the ratios of their medians."""
    parser = harness.option_parser(__doc__, steps=8, rounds=3)
    parser.add_argument(
        "--networks", nargs="+", choices=TARGETS, default=list(TARGETS), help="networks to measure [all]"
    )
    parser.add_argument("--one", metavar="NETWORK", help="measure one network in this process and print JSON")
    options = parser.parse_args()
    if options.one:
        run_in_thread(options.one, options.steps)
        return

    print(harness.describe_machine())
    ratios = {network: compare(network, steps=options.steps, rounds=options.rounds) for network in options.networks}
    for network, ratio in ratios.items():
        print(
            f"ratio {ratio:.2f} target {TARGETS[network]:g}: speedup of a training step with backbone {network} by "
            "keeping freed memory (`MALLOC_*`)"
        )


if __name__ == "__main__":
    main()
