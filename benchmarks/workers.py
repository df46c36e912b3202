"""Training step over several workers, of the same step whose gradients stay with each.

Processes of one thread each do steps of the segmenter of recipe `photos`, with one image each: the sum of the gradients
over all of them (gloo) is to be hidden behind the backward pass. Timed in turn: the step without the sum, the step, the
sum alone.
"""

import contextlib
import datetime
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import machine
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mcis.platform.commands.bench import make_work
from mcis.platform.config.recipes import photos

TARGET = 0.9


def worker(rank: int, world: int, folder: str, rounds: int) -> dict[str, list[float]]:
    """One process: seconds of each side, each begun by all at once."""
    torch.set_num_threads(1)
    meet: Any = {"init_method": f"file://{folder}/meet", "timeout": datetime.timedelta(seconds=300)}
    distributed.init_process_group("gloo", rank=rank, world_size=world, **meet)
    model, _, step = make_work(photos(), "segmenter", wrap=DistributedDataParallel)
    assert isinstance(model, DistributedDataParallel)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))

    def seconds(call: Callable[[], object]) -> float:
        distributed.barrier()
        began = time.perf_counter()
        call()
        distributed.barrier()
        return time.perf_counter() - began

    def apart() -> None:
        with model.no_sync():
            step(1)

    sides: dict[str, Callable[[], object]] = {"apart": apart, "together": partial(step, 1)}
    sides["sum alone"] = partial(distributed.all_reduce, gradients)
    for call in sides.values():
        call()  # the first one of each allocates
    measured = machine.in_turn({side: partial(seconds, call) for side, call in sides.items()}, rounds)
    distributed.destroy_process_group()
    return {**measured, "megabytes": [gradients.numel() * 4e-6]}


def main() -> None:
    """Prints a figure for 2 processes and one for 4."""
    rounds = machine.arguments(__doc__, rounds=15).parse_args().rounds
    print(machine.describe())
    figures = []
    for world in (2, 4):
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(context.Pool(world)) as pool:
            found = pool.starmap(worker, [(rank, world, folder, rounds) for rank in range(world)])[0]
        (megabytes,) = found.pop("megabytes")
        print(f"{world} workers, gradients of {megabytes:.1f} MB")
        medians = machine.medians(found, "s")
        hidden = 1 - (medians["together"] - medians["apart"]) / medians["sum alone"]
        print(f"{hidden:.2f} of the sum is hidden")
        figures.append(
            f"ratio {medians['apart'] / medians['together']:.2f} target {TARGET}: "
            f"training step over {world} workers, of the same step whose gradients stay apart"
        )
    print("\n".join(figures))


if __name__ == "__main__":
    main()
