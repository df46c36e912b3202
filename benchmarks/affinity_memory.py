"""Memory of an image of 500x500 pixels whose maps walk over affinities, of the bound that a run states.

Each network in a process of its own, with random weights: it is built, computes the affinities of one image, and three
maps walk over them. Counted is by how much the process's memory grew at most.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from random_walk import memory

from mcis.models.backbones import to_unit
from mcis.models.networks import normalization_of
from mcis.models.random_walk import random_walk
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_affinity_net, move_channels_last
from mcis.platform.networks.needs import walk_memory

SIDE, MAPS, TARGET = 500, 3, 1
NETWORKS: dict[str, dict[str, Any]] = {
    "AffinityNet on ResNet-38": {"backbone": "resnet38", "kind": "features", "finest": 8},
    "boundaries on ResNet-50": {"backbone": "resnet50", "kind": "boundaries", "finest": 4},
    "boundaries on EfficientNet-Lite0": {"backbone": "timm/tf_efficientnet_lite0", "kind": "boundaries", "finest": 4},
}


@torch.inference_mode()
def one(name: str) -> None:
    """Walks in this process; prints the growth of memory, the bound, both in bytes, and seconds of network and walk."""
    values = [f"affinity_net.{key}={value}" for key, value in NETWORKS[name].items()]
    walk = ["affinity_net.trained=all", f"pseudo_masks.walk.max_side={SIDE}", "pseudo_masks.background=affinity"]
    config = resolve("voc", "small", assignments=values + walk).config
    torch.set_num_threads(1)  # as in a task
    with torch.device("meta"):
        bound = walk_memory(config, build_affinity_net(config.affinity_net))
    conv = move_channels_last(torch.nn.Conv2d(64, 64, 3), torch.device("cpu"))
    conv(torch.rand(1, 64, 64, 64))  # loads what is loaded late
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    model = move_channels_last(build_affinity_net(config.affinity_net), torch.device("cpu")).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), np.uint8)
    began = time.perf_counter()
    neighbors = model.neighbors(normalization_of(config.affinity_net.backbone)(to_unit(torch.from_numpy(pixels))))
    affinities = neighbors.affinities[0]
    asked = time.perf_counter()
    maps = torch.rand(MAPS, *affinities.shape[1:], generator=torch.Generator().manual_seed(0))
    c = config.pseudo_masks.walk
    random_walk(maps, affinities, radius=model.radius, beta=c.beta, steps=c.steps)
    ended = time.perf_counter()
    grown = memory("VmHWM") - before
    print(json.dumps({"grown": grown, "bound": bound, "network": asked - began, "walk": ended - asked}))


def main() -> None:
    """Measures each network and prints the largest ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=list(NETWORKS), help="one network in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    print(machine.describe())
    ratios = []
    for name in NETWORKS:
        command = [sys.executable, __file__, "--one", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ratios.append(found["grown"] / found["bound"])
        grown, bound = (found[key] / 2**20 for key in ("grown", "bound"))
        print(f"{name}: {grown:.0f} MiB of {bound:.0f}; network {found['network']:.1f} s, walk {found['walk']:.1f} s")
    what = "memory of maps of 500x500 pixels that walk, of the bound that is stated"
    print(f"ratio {max(ratios):.2f} target at most {TARGET}: {what}")


if __name__ == "__main__":
    main()
