"""Speed of the classifier's training step on resident data, relative to the same step directly by the equations.

VGG-16 at 256x256 pixels, with loss, gradients and optimizer step, for recipes `paper` and `released`. The other side
embeds both images of each pair separately (`released` has four pairs per step, each of which embeds m again) and
computes all affinities and co-attentive features in full. Each side runs in separate processes, in turn. Gradients and
peak memory are compared, too.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import direct_classifier
import harness
import torch
from torch import Tensor

from mcis.models.classifier import PairInputs
from mcis.models.classifier_losses import LossInputs, PairScores, weighted_losses
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import in_float32
from mcis.platform.networks.build import build_classifier
from mcis.platform.reporting.machine_speed import count_operations, measure_seconds

TARGETS = {"paper": 1.0, "released": 1.25}
CLASSES = 20
MAX_GRADIENT_DIFFERENCE = 1e-4
Measured = dict[str, float]


def measure(recipe: str, side: str, options: argparse.Namespace, gradients: Path | None) -> Measured:
    """Measures one side: seconds per step, peak memory in bytes, and on a GPU floating point operations per second.

    Args:
        side: `mcis` or `direct`.
        gradients: File for the gradients of the first step. None: do not write them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve("voc", recipe, {}, options.overrides).config.classifier
    torch.manual_seed(0)
    model: Any = build_classifier(config, CLASSES)
    model.to(device, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, config.optimizer)

    generator = torch.Generator().manual_seed(1)
    shape = (options.batch, 3, config.input_size, config.input_size)
    images_m = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
    images_n = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
    tags_m = (torch.rand(options.batch, CLASSES, generator=generator) < 0.1).float().to(device)
    tags_n = (torch.rand(options.batch, CLASSES, generator=generator) < 0.1).float().to(device)

    def losses(scores: PairScores, partner_tags: Tensor) -> Iterable[Tensor]:
        no_features = torch.empty(0)  # these losses do not read them
        inputs = LossInputs(in_float32(scores), tags_m, partner_tags, no_features, no_features)
        return weighted_losses(inputs, config.loss_values, epoch=config.epochs).values()

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            if side == "direct":
                pairs, self_pairs = direct_classifier.forward(model, images_m, images_n, config.self_pairs)
            else:
                pairs, self_pairs, *_ = model(PairInputs(images_m, images_n), config.self_pairs)

        values = [*losses(pairs, tags_n)]
        for scores in self_pairs:
            values += losses(scores, tags_m)
        optimizer.zero_grad(set_to_none=True)
        torch.stack([value / options.batch for value in values]).sum().backward()

    backward()
    if gradients:
        torch.save({name: p.grad.cpu() for name, p in model.named_parameters()}, gradients)
    seconds = seconds_per_step(backward, optimizer, options.steps)
    measured = {"seconds": seconds, "memory": peak_memory(device)}
    if device.type == "cuda":
        measured["rate"] = count_operations(backward) / seconds
    return measured


def seconds_per_step(backward: Callable[[], None], optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Measures the seconds per training step."""
    start = time.perf_counter()
    for _ in range(steps):
        backward()
        optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def peak_memory(device: torch.device) -> float:
    """Returns the peak memory in bytes of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def matrix_rate() -> float:
    """Measures the GPU's bf16 operations per second in a product of two square matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / measure_seconds(lambda: a @ b, 1.0)


def gradient_difference(path: Path, reference: Path) -> float:
    """Returns the largest difference between a parameter's gradients, relative to their norm."""
    gradients = torch.load(path, weights_only=True)
    expected = torch.load(reference, weights_only=True)
    differences = []
    for name, gradient in expected.items():
        norm = gradient.norm().clamp(min=1e-12)
        differences.append(float((gradients[name] - gradient).norm() / norm))
    return max(differences)


def compare(recipe: str, options: argparse.Namespace) -> str:
    """Measures both sides in turn, prints what they take, and returns the line with the ratio."""
    common = [f"--batch={options.batch}", f"--steps={options.steps}", "--bf16" if options.bf16 else "--no-bf16"]
    common += [f"--set={override}" for override in options.overrides]
    results: dict[str, list[Measured]] = {"mcis": [], "direct": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.rounds):
            for side, measured in results.items():
                gradients = str(folder / side) if number == 0 else "none"
                measured.append(harness.run_script(__file__, *common, "--one", recipe, side, gradients))
        difference = gradient_difference(folder / "mcis", folder / "direct")

    if not options.bf16 and difference > MAX_GRADIENT_DIFFERENCE:
        raise SystemExit(
            f"{recipe}: gradients differ by {difference:.1e} of their norm, more than {MAX_GRADIENT_DIFFERENCE:g}"
        )
    seconds = {side: statistics.median(r["seconds"] for r in measured) for side, measured in results.items()}
    memory = {side: statistics.median(r["memory"] for r in measured) for side, measured in results.items()}
    for side in results:
        print(
            f"{recipe}, {side}: {seconds[side]:.2f} s per step of {options.batch} pairs, "
            f"peak {memory[side] / 2**30:.2f} GiB"
        )
    print(f"{recipe}: gradients differ by {difference:.1e} of their norm")
    if torch.cuda.is_available():
        rate = statistics.median(r["rate"] for r in results["mcis"])
        print(f"{recipe}: {rate / matrix_rate():.2f} of the GPU's measured bf16 matrix rate")
    print(f"{recipe}: {memory['mcis'] / memory['direct']:.2f} of the memory")
    return (
        f"ratio {seconds['direct'] / seconds['mcis']:.2f} target {TARGETS[recipe]:g}: "
        f"speedup of the training step of `{recipe}` over a direct implementation of the equations"
    )


def main() -> None:
    """Compares both sides for both recipes and prints the ratios of their medians."""
    gpu = torch.cuda.is_available()
    parser = harness.option_parser(__doc__, batch=5 if gpu else 2, steps=20 if gpu else 1, rounds=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=gpu)
    harness.add_overrides(parser)
    parser.add_argument("--recipes", nargs="+", choices=TARGETS, default=list(TARGETS), help="recipes to measure [all]")
    parser.add_argument("--one", nargs=3, metavar=("RECIPE", "SIDE", "GRADIENTS"), help="measure one side, print JSON")
    options = parser.parse_args()
    if options.one:
        recipe, side, gradients = options.one
        path = None if gradients == "none" else Path(gradients)
        print(json.dumps(measure(recipe, side, options, path)))
        return

    print(harness.describe_machine())
    ratios = [compare(recipe, options) for recipe in options.recipes]
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
