"""Converts checkpoints of the authors' code to weights of `CoAttentionClassifier` (paper-vs-code, "Classifier")."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.models.backbones import vgg16
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.pretrained import read_state_dict

_PREFIXES = {
    "vgg.features.": "backbone.body.features.",
    "vgg.extra_convs.": "backbone.body.extra_convs.",
    "vgg.extra_last_conv.": "phi.",
    "extra_linear_e.weight": "w_p",
    "extra_gate.weight": "common_head.weight",
    "extra_gate_merge.weight": "w_b.weight",
}
"""Names or name prefixes of parameters in a released checkpoint, and in `CoAttentionClassifier`."""
_DEFAULT_CLASSES = 20
"""Number of classes to expect if the checkpoint has no class layer: PASCAL VOC's."""
_REMEDY = "name a checkpoint of the released co-attention classifier with VGG-16"


def convert_released_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts a released checkpoint to the state of `CoAttentionClassifier(vgg16(), classes=K, head="own")`.

    The released affinity is (W_e f_m)^T f_n and Eq. 2 is F_m^T W_P F_n, so W_P is W_e^T. K is the checkpoint's number
    of classes.

    Raises:
        UserError: Tensors are missing, unexpected or of a different shape. The message names all of them.
    """
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    last_conv = state.get("vgg.extra_last_conv.weight")
    classes = len(last_conv) if last_conv is not None and last_conv.ndim == 4 else _DEFAULT_CLASSES
    with torch.device("meta"):
        expected = CoAttentionClassifier(vgg16(), classes=classes, head="own").state_dict()

    own_names = {_released_name(name): name for name in expected}
    problems = [f"missing: {name}" for name in own_names if name not in state]
    problems += [f"unexpected: {name}" for name in state if name not in own_names]
    for released_name, name in own_names.items():
        if released_name in state and state[released_name].shape != expected[name].shape:
            shape = tuple(state[released_name].shape)
            problems.append(f"different shape: {released_name} is {shape}, expected {tuple(expected[name].shape)}")
    if problems:
        raise UserError(
            f"the checkpoint does not fit in {len(problems)} tensor(s):\n  - " + "\n  - ".join(problems),
            f"the {len(own_names)} tensors of the released classifier",
            _REMEDY,
        )

    weights = {name: state[released_name].float() for released_name, name in own_names.items()}
    weights["w_p"] = weights["w_p"].T.contiguous()
    return weights


def _released_name(name: str) -> str:
    """Returns a parameter's name in a released checkpoint."""
    for released_prefix, own_prefix in _PREFIXES.items():
        if name.startswith(own_prefix):
            return released_prefix + name.removeprefix(own_prefix)
    raise KeyError(name)


def read_released_weights(path: Path) -> dict[str, Tensor]:
    """Reads and converts a released checkpoint, without running code in the file.

    Raises:
        UserError: See `read_state_dict` and `convert_released_state`.
    """
    return convert_released_state(read_state_dict(path, _REMEDY))
