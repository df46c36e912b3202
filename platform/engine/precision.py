"""The precision of a network's arithmetic in training; weights, losses and updates are float32 in any case."""

from typing import Literal

import torch


def resolve_precision(wanted: Literal["auto", "float32", "bf16"], device: torch.device) -> Literal["float32", "bf16"]:
    """The precision on a device; `auto` is bfloat16 on a GPU that has it, else float32."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
