"""The precision of a network's arithmetic in training; weights, losses and updates are float32 in any case."""

from typing import Literal

import torch

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.training import Optimizer
from mcis.platform.engine.runtime import uses_gpu


def resolve_precision(wanted: Literal["auto", "float32", "bf16"], device: torch.device) -> Literal["float32", "bf16"]:
    """The precision on a device; `auto` is bfloat16 on a GPU that has it, else float32."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def precision_key(optimizer: Optimizer, compute: ComputeConfig) -> str:
    """What a training's result depends on of its precision: `auto` means another one on GPUs than on CPUs."""
    return "auto on GPUs" if optimizer.precision == "auto" and uses_gpu(compute) else optimizer.precision
