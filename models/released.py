"""Checkpoints of the authors' code, converted to the weights of this project's classifier (RELEASED_RECIPE)."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.models.backbones import vgg16
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.pretrained import read_state_dict

NAMES = {
    "vgg.features.": "backbone.body.features.",
    "vgg.extra_convs.": "backbone.body.extra_convs.",
    "vgg.extra_last_conv.": "phi.",
    "extra_linear_e.weight": "w_p",
    "extra_gate.weight": "common_head.weight",
    "extra_gate_merge.weight": "w_b.weight",
}
"""Names of parameters, or their prefixes, in a released checkpoint and in `CoAttentionClassifier`."""
_REMEDY = "name a checkpoint of the released co-attention classifier with VGG-16"


def convert_released_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of `CoAttentionClassifier(vgg16(), classes=K, head="own")` with a released checkpoint's values.

    The released affinity is (W_e f_m)^T f_n and Eq. 2 is F_m^T W_P F_n, so W_P is W_e^T. K is that of the checkpoint.

    Raises:
        UserError: tensors are missing, surplus or of another shape; all are named.
    """
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    layer = state.get("vgg.extra_last_conv.weight")
    classes = len(layer) if layer is not None and layer.ndim == 4 else 20
    with torch.device("meta"):
        wanted = CoAttentionClassifier(vgg16(), classes=classes, head="own").state_dict()
    names = {to + of.removeprefix(own): of for of in wanted for to, own in NAMES.items() if of.startswith(own)}
    problems = [f"missing: {name}" for name in names if name not in state]
    problems += [f"surplus: {name}" for name in state if name not in names]
    for released, name in names.items():
        if released in state and state[released].shape != wanted[name].shape:
            shape, expected = (tuple(t.shape) for t in (state[released], wanted[name]))
            problems.append(f"misshapen: {released} is {shape}, expected {expected}")
    if problems:
        raise UserError(
            f"the checkpoint does not fit, {len(problems)} tensor(s):\n  - " + "\n  - ".join(problems),
            f"the {len(names)} tensors of the released classifier",
            _REMEDY,
        )
    weights = {name: state[released].float() for released, name in names.items()}
    weights["w_p"] = weights["w_p"].T.contiguous()
    return weights


def read_released_weights(path: Path) -> dict[str, Tensor]:
    """Reads a released checkpoint, as a `state_dict` or under the key `state_dict`; nothing in the file is run. Errors
    as of `read_state_dict` and `convert_released_state`."""
    return convert_released_state(read_state_dict(path, _REMEDY))
