"""A training step on CPUs in a process that keeps what tensors free, times faster than with glibc's own settings.

Two networks: the classifier of recipe `scratch` on its batch of pairs, and the bundled EfficientNet-Lite0, whose many
thin layers compute little for what they write, on 16 images of 256 pixels. A step is forward, loss, gradients and
update, in a thread as Ray Train runs it. Each side runs in fresh processes, in turn.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import machine
import torch
from torch import Tensor, nn

from mcis.models.classifier_losses import LossInputs, weighted_losses
from mcis.models.pretrained import BUNDLED_BACKBONES
from mcis.models.timm_backbones import build_timm_backbone
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ALLOCATOR
from mcis.platform.networks.build import build_classifier, move_channels_last

TARGETS = {"small": 1.1, "EfficientNet-Lite0": 1.3}
CLASSES = 20
Loss = Callable[[], Tensor]


def small() -> tuple[nn.Module, Loss]:
    """The classifier of recipe `scratch`, and its loss of a batch of pairs."""
    config = resolve("voc", "scratch").config.classifier
    model = build_classifier(config, CLASSES)
    images_m, images_n = (images(config.batch, config.input_size) for _ in range(2))
    tags_m, tags_n = ((torch.rand(config.batch, CLASSES) < 0.1).float() for _ in range(2))

    def loss() -> Tensor:
        outputs = model(images_m, images_n, ())
        inputs = LossInputs(outputs.pairs, tags_m, tags_n, *outputs.features[0])
        losses = weighted_losses(inputs, config.loss_values, epoch=config.epochs)
        return torch.stack([value / config.batch for value in losses.values()]).sum()

    return model, loss


def lite() -> tuple[nn.Module, Loss]:
    """The bundled backbone with random weights, and a loss of its features of 16 images."""
    model = build_timm_backbone(BUNDLED_BACKBONES[0].removeprefix("timm/"), stride=32)
    batch = images(16, 256)
    return model, lambda: model(batch).square().mean()


NETWORKS = {"small": small, "EfficientNet-Lite0": lite}


def images(count: int, side: int) -> Tensor:
    """Random images, (count, 3, side, side), channels last."""
    return torch.randn(count, 3, side, side).contiguous(memory_format=torch.channels_last)


def measure(network: str, steps: int) -> float:
    """Seconds of the fastest of so many steps, behind two that count for nothing: others may use the machine too."""
    torch.manual_seed(0)
    model, loss = NETWORKS[network]()
    move_channels_last(model, torch.device("cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return min(seconds[2:])


def main() -> None:
    """Runs both sides of both networks in turn and prints the ratios of their medians."""
    parser = machine.arguments(__doc__, steps=8, rounds=3)
    parser.add_argument("--one", metavar="NETWORK", help="one network in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        network = arguments.one
        thread = threading.Thread(target=lambda: print(json.dumps(measure(network, arguments.steps))))
        thread.start()
        thread.join()
        return
    print(machine.describe())
    lines = []
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    for network, target in TARGETS.items():
        words = f"--steps={arguments.steps}", "--one", network
        sides = {
            side: partial(machine.alone, __file__, *words, environment=environment)
            for side, environment in (("kept", plain | ALLOCATOR), ("given back", plain))
        }
        print(f"{network}, by what becomes of freed memory:")
        medians = machine.medians(machine.in_turn(sides, arguments.rounds), "s per step")
        lines.append(
            f"ratio {medians['given back'] / medians['kept']:.2f} target {target:g}: training step of {network} that "
            "keeps freed memory, times faster than one that gives it back"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
