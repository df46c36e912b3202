"""Speed of a training step on several workers, relative to the same step without summing gradients.

Processes with one thread each run steps of the segmenter of recipe `photos` on one image each. The sum of the gradients
over all processes (gloo) should run in parallel with the backward pass. Three variants are timed in turn: the step
without the sum, the complete step, and the sum alone.
"""

import contextlib
import datetime
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial

import harness
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mcis.platform.config.recipes import photos
from mcis.platform.reporting.machine_speed import make_work

TARGET = 0.9
WORKERS = (2, 4)


def run_worker(rank: int, workers: int, folder: str, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Runs one of several workers.

    Args:
        folder: Where the workers' processes find each other.

    Returns:
        Seconds of each variant in each round, and the size of the gradients in megabytes.
    """
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        rank=rank,
        world_size=workers,
        init_method=f"file://{folder}/rendezvous",
        timeout=datetime.timedelta(seconds=300),
    )
    model, _, step = make_work(photos(), "segmenter", wrap=DistributedDataParallel)
    assert isinstance(model, DistributedDataParallel)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))

    def measure_seconds(run: Callable[[], object]) -> float:
        distributed.barrier()
        start = time.perf_counter()
        run()
        distributed.barrier()
        return time.perf_counter() - start

    def step_without_sum() -> None:
        with model.no_sync():
            step(1)

    variants: dict[str, Callable[[], object]] = {
        "no sum": step_without_sum,
        "step": partial(step, 1),
        "sum alone": partial(distributed.all_reduce, gradients),
    }
    for run in variants.values():
        run()  # the first call allocates memory
    sides = {variant: partial(measure_seconds, run) for variant, run in variants.items()}
    measured = harness.measure_in_turn(sides, rounds)
    distributed.destroy_process_group()
    return measured, gradients.numel() * 4e-6


def compare(workers: int, rounds: int) -> str:
    """Measures the variants on some workers, prints what they take, and returns the line with the ratio."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(context.Pool(workers)) as pool:
        results = pool.starmap(run_worker, [(rank, workers, folder, rounds) for rank in range(workers)])
    measured, megabytes = results[0]
    print(f"{workers} workers, gradients of {megabytes:.1f} MB")
    medians = harness.print_medians(measured, "s")
    hidden = 1 - (medians["step"] - medians["no sum"]) / medians["sum alone"]
    print(f"{hidden:.2f} of the sum runs in parallel with the backward pass")
    return (
        f"ratio {medians['no sum'] / medians['step']:.2f} target {TARGET}: "
        f"training step on {workers} workers, relative to the same step without summing gradients"
    )


def main() -> None:
    """Prints a ratio for each number of workers."""
    rounds = harness.option_parser(__doc__, rounds=15).parse_args().rounds
    print(harness.describe_machine())
    ratios = [compare(workers, rounds) for workers in WORKERS]
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
