"""Memory of the sparse random walk on maps of a 375x500 image, relative to the same walk with a dense matrix.

Each side runs in a separate process, which reports how much its memory grew. The dense side builds the transition
matrix (hw, hw) like the papers' code, but does not also raise it to the power of the steps.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
import torch
from torch import Tensor

from mcis.models.random_walk import directions, pair_slices, random_walk

HEIGHT = 94
WIDTH = 125
"""Positions of the maps, 4 pixels apart."""
MAPS = 2
RADIUS = 5
BETA = 8.0
STEPS = 256
MAX_DIFFERENCE = 1e-4
TARGET = 10


def make_affinities() -> Tensor:
    """Makes affinities (D, h, w) from smooth boundaries, so that maps spread within areas."""
    noise = torch.rand(1, 1, 12, 16, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(noise, size=(HEIGHT, WIDTH), mode="bicubic")[0, 0].clamp(0, 1)
    affinities = torch.zeros(len(directions(RADIUS)), HEIGHT, WIDTH)
    for plane, direction in zip(affinities, directions(RADIUS), strict=True):
        here, there = pair_slices((HEIGHT, WIDTH), direction)
        plane[here] = torch.exp(-8 * (smooth[here] - smooth[there]).abs())
    return affinities


def dense_walk(maps: Tensor, affinities: Tensor, steps: int) -> Tensor:
    """Computes the walk with the matrix of all pairs of positions."""
    count = HEIGHT * WIDTH
    index = np.arange(count).reshape(HEIGHT, WIDTH)
    matrix = torch.eye(count)
    for plane, direction in zip(affinities, directions(RADIUS), strict=True):
        here, there = pair_slices((HEIGHT, WIDTH), direction)
        rows = torch.from_numpy(index[here].ravel())
        columns = torch.from_numpy(index[there].ravel())
        weights = plane[here].reshape(-1).pow(BETA)
        matrix[rows, columns] = weights
        matrix[columns, rows] = weights
    matrix /= matrix.sum(dim=1, keepdim=True)

    values = maps.flatten(1).T
    for _ in range(steps):
        values = matrix @ values
    return values.T.reshape(maps.shape)


def run_side(side: str, steps: int, file: Path) -> None:
    """Runs the walk of a side, writes the maps to a file, and prints the growth of memory and the seconds as JSON."""
    maps = torch.rand(MAPS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    affinities = make_affinities()
    # A small walk first, so that libraries are loaded before memory is measured.
    random_walk(maps[:, :8, :8], affinities[:, :8, :8], radius=RADIUS, beta=BETA, steps=1)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    memory_before = process_memory("VmRSS")
    start = time.perf_counter()
    if side == "dense":
        result = dense_walk(maps, affinities, steps)
    else:
        result = random_walk(maps, affinities, radius=RADIUS, beta=BETA, steps=steps)
    seconds = time.perf_counter() - start
    growth = process_memory("VmHWM") - memory_before
    np.save(file, result.numpy())
    print(json.dumps({"bytes": growth, "seconds": seconds}))


def process_memory(field: str) -> int:
    """Returns the current (`VmRSS`) or peak (`VmHWM`) memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    """Runs both sides, compares their maps and prints the ratio of their memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of the walk [{STEPS}]")
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "FILE"), help="run one side in this process, print JSON")
    options = parser.parse_args()
    if options.one:
        side, file = options.one
        run_side(side, options.steps, Path(file))
        return

    print(harness.describe_machine())
    growth = {}
    maps = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("sparse", "dense"):
            path = Path(folder) / f"{side}.npy"
            measured = harness.run_script(__file__, "--steps", str(options.steps), "--one", side, str(path))
            growth[side] = measured["bytes"]
            maps[side] = np.load(path)
            print(f"{side}: {growth[side] / 2**20:.0f} MiB, {measured['seconds']:.2f} s")

    difference = float(np.abs(maps["sparse"] - maps["dense"]).max())
    print(f"largest difference: {difference:.1e}")
    if difference > MAX_DIFFERENCE:
        sys.exit(f"the walks differ by {difference:.1e}, more than {MAX_DIFFERENCE:g}")
    ratio = growth["dense"] / growth["sparse"]
    print(f"ratio {ratio:.1f} target {TARGET}: memory of a dense random walk, relative to the sparse one")


if __name__ == "__main__":
    main()
