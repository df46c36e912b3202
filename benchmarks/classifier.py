"""A training step of the classifier, data resident, compared with the same step as the equations stand.

VGG-16 at 256x256, loss, gradients and update, recipes `paper` and `released`. The other side embeds both images of
each pair on their own (`released`: four pairs per step, each of which embeds m again) and lays out every affinity and
all co-attentive features. Each side runs in processes of its own, in turn; gradients and peak memory are compared too.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import literal
import machine
import torch
from torch import Tensor

from mcis.models.classifier_losses import LossInputs, PairScores, weighted_losses
from mcis.platform.commands.bench import count_operations, measure_seconds
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import in_float32
from mcis.platform.networks.build import build_classifier

TARGETS = {"paper": 1.0, "released": 1.25}
CLASSES = 20


def measure(recipe: str, side: str, batch: int, steps: int, bf16: bool, gradients: Path | None) -> dict[str, float]:
    """Seconds per step, peak memory in bytes, and on a GPU the floating point operations per second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve("voc", recipe).config.classifier
    torch.manual_seed(0)
    model: Any = build_classifier(config, CLASSES)
    model.to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, config.optimizer)
    generator = torch.Generator().manual_seed(1)
    size = config.input_size
    images_m, images_n = (
        torch.randn(batch, 3, size, size, generator=generator).to(device, memory_format=torch.channels_last)
        for _ in range(2)
    )
    tags_m, tags_n = ((torch.rand(batch, CLASSES, generator=generator) < 0.1).float().to(device) for _ in range(2))

    def loss_terms(scores: PairScores, partner_tags: Tensor) -> Iterable[Tensor]:
        unread_features = torch.empty(0)  # by these losses
        inputs = LossInputs(in_float32(scores), tags_m, partner_tags, unread_features, unread_features)
        return weighted_losses(inputs, config.loss_values, epoch=config.epochs).values()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            if side == "literal":
                pairs, selves = literal.forward(model, images_m, images_n, config.self_pairs)
            else:
                pairs, selves, *_ = model(images_m, images_n, config.self_pairs)

        losses = [*loss_terms(pairs, tags_n)]
        for scores in selves:
            losses += loss_terms(scores, tags_m)
        optimizer.zero_grad(set_to_none=True)
        torch.stack([loss / batch for loss in losses]).sum().backward()

    def timed(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    step()
    if gradients:
        torch.save({name: p.grad.cpu() for name, p in model.named_parameters()}, gradients)
    measured = {"seconds": timed(steps)}
    if device.type == "cuda":
        measured["memory"] = float(torch.cuda.max_memory_allocated())
        measured["rate"] = count_operations(step) / measured["seconds"]
    else:
        measured["memory"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return measured


def matrix_rate() -> float:
    """Measured bf16 operations per second of the GPU in a product of two square matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / measure_seconds(lambda: a @ b, 1.0)


def difference(ours: Path, theirs: Path) -> float:
    """Largest difference of a parameter's gradients, relative to their norm."""
    a, b = (torch.load(path, weights_only=True) for path in (ours, theirs))
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-12)) for name in b)


def main() -> None:
    """Runs both sides of both recipes in turn and prints the ratios of their medians."""
    gpu = torch.cuda.is_available()
    parser = machine.arguments(__doc__, batch=5 if gpu else 2, steps=20 if gpu else 1, rounds=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument("--one", nargs=3, metavar=("RECIPE", "SIDE", "GRADIENTS"), help="one side, as JSON")
    arguments = parser.parse_args()
    common = (arguments.batch, arguments.steps, arguments.bf16)
    if arguments.one:
        recipe, side, path = arguments.one
        print(json.dumps(measure(recipe, side, *common, None if path == "none" else Path(path))))
        return
    print(machine.describe())
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, target in TARGETS.items():
            measured: dict[str, list[dict[str, float]]] = {"ours": [], "literal": []}
            for number in range(arguments.rounds):
                for side, results in measured.items():
                    keep = str(Path(folder) / side) if number == 0 else "none"
                    words = [f"--{name}={getattr(arguments, name)}" for name in ("batch", "steps")]
                    words += ["--bf16" if arguments.bf16 else "--no-bf16"]
                    results.append(machine.alone(__file__, *words, "--one", recipe, side, keep))
            seconds, memory = (
                {side: statistics.median(r[key] for r in results) for side, results in measured.items()}
                for key in ("seconds", "memory")
            )
            apart = difference(Path(folder) / "ours", Path(folder) / "literal")
            if not arguments.bf16 and apart > 1e-4:
                raise SystemExit(f"{recipe}: gradients differ by {apart:.1e} of their norm, more than 1e-4")
            for side in measured:
                print(
                    f"{recipe}, {side}: {seconds[side]:.2f} s per step of {arguments.batch} pairs, "
                    f"peak {memory[side] / 2**30:.2f} GiB"
                )
            print(f"{recipe}: gradients differ by {apart:.1e} of their norm")
            if gpu:
                rate = statistics.median(r["rate"] for r in measured["ours"])
                print(f"{recipe}: {rate / matrix_rate():.2f} of the GPU's measured bf16 matrix rate")
            lines.append(
                f"ratio {seconds['literal'] / seconds['ours']:.2f} target {target:g}: training step `{recipe}` against "
                f"the equations as they stand, {memory['ours'] / memory['literal']:.2f} of the memory"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
