"""The random walk of maps of an image of 375x500 pixels, sparse, against the same with a dense matrix.

Each side runs in a process of its own, which tells by how much its memory grew at most. The dense one lays out the
step's matrix (hw, hw), as the papers' code does, which raises it to the power of the steps besides.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import torch
from torch import Tensor

from mcis.models.random_walk import directions, pair_slices, random_walk

HEIGHT, WIDTH, MAPS, RADIUS, BETA, STEPS = 94, 125, 2, 5, 8.0, 256  # positions 4 pixels apart
AGREEMENT, MEMORY = 1e-4, 10


def affinities() -> Tensor:
    """Of smooth boundaries, so that areas form within which maps spread, (D, h, w)."""
    rough = torch.rand(1, 1, 12, 16, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(rough, size=(HEIGHT, WIDTH), mode="bicubic")[0, 0].clamp(0, 1)
    planes = torch.zeros(len(directions(RADIUS)), HEIGHT, WIDTH)
    for plane, direction in enumerate(directions(RADIUS)):
        here, there = pair_slices((HEIGHT, WIDTH), direction)
        planes[plane][here] = torch.exp(-8 * (smooth[here] - smooth[there]).abs())
    return planes


def dense(maps: Tensor, planes: Tensor) -> Tensor:
    """The walk with the matrix of all pairs of positions."""
    index, count = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH), HEIGHT * WIDTH
    matrix = torch.eye(count)
    for plane, direction in zip(planes, directions(RADIUS), strict=True):
        here, there = pair_slices((HEIGHT, WIDTH), direction)
        one, other = (torch.from_numpy(index[part].ravel()) for part in (here, there))
        weights = plane[here].reshape(-1).pow(BETA)
        matrix[one, other] = weights
        matrix[other, one] = weights
    matrix /= matrix.sum(dim=1, keepdim=True)
    values = maps.flatten(1).T
    for _ in range(STEPS):
        values = matrix @ values
    return values.T.reshape(maps.shape)


def one(side: str, file: Path) -> None:
    """Walks in this process, writes the maps, and prints the growth of memory in bytes and the seconds."""
    maps = torch.rand(MAPS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    planes = affinities()
    random_walk(maps[:, :8, :8], planes[:, :8, :8], radius=RADIUS, beta=BETA, steps=1)  # loads what is loaded late
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.perf_counter()
    walked = (
        dense(maps, planes) if side == "dense" else random_walk(maps, planes, radius=RADIUS, beta=BETA, steps=STEPS)
    )
    seconds = time.perf_counter() - began
    grown = memory("VmHWM") - before
    np.save(file, walked.numpy())
    print(json.dumps({"bytes": grown, "seconds": seconds}))


def memory(name: str) -> int:
    """Memory of this process now (`VmRSS`) or at most (`VmHWM`), bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Runs both sides, compares their maps, and prints the ratio of their memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "FILE"), help="one side in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one[0], Path(arguments.one[1]))
        return
    print(machine.describe())
    grown, walked = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("sparse", "dense"):
            file = Path(folder) / f"{side}.npy"
            measured = machine.alone(__file__, "--one", side, str(file))
            grown[side], walked[side] = measured["bytes"], np.load(file)
            print(f"{side}: {grown[side] / 2**20:.0f} MiB, {measured['seconds']:.2f} s")
    difference = float(np.abs(walked["sparse"] - walked["dense"]).max())
    print(f"largest difference: {difference:.1e}")
    if difference > AGREEMENT:
        sys.exit(f"the walks differ by {difference:.1e}, more than {AGREEMENT:g}")
    ratio = grown["dense"] / grown["sparse"]
    print(f"ratio {ratio:.1f} target {MEMORY}: memory of a dense random walk, times that of the sparse one")


if __name__ == "__main__":
    main()
