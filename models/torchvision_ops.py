"""Lets torchvision be imported where its compiled operators do not load; `mcis` imports this module first.

torchvision's registry wheel is compiled for CUDA. Beside a CPU-only torch its library does not load, and
`import torchvision` then fails because it registers fake kernels for operators that were never defined. The
networks and transforms used here need none of these operators, so their schemas are enough. Where the operators
load, this module changes nothing.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def compiled_operators_load() -> bool:
    """Whether torchvision's compiled library loads into this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    try:
        for path in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(path))
    except (OSError, RuntimeError):
        return False
    return hasattr(torch.ops.torchvision, "nms")


_library = None if compiled_operators_load() else torch.library.Library("torchvision", "DEF")
"""That the missing schemas are defined in, as long as this process lives."""
if _library:
    for _name, _schema in _SCHEMAS.items():
        _library.define(_name + _schema)
