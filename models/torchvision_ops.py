"""Makes torchvision importable when its compiled operators do not load. Import this module before torchvision.

The torchvision wheel on PyPI is compiled for CUDA. With a CPU-only torch its library does not load, and `import
torchvision` fails because it registers fake kernels for operators that were never defined. The networks and transforms
that mcis uses call none of these operators, so defining their schemas is enough. If the compiled operators load, this
module changes nothing.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def compiled_operators_load() -> bool:
    """Returns whether torchvision's compiled library loads with the installed torch."""
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
"""Defines the missing schemas. A module variable, because the definitions end when the library is deleted."""
if _library:
    for _name, _schema in _SCHEMAS.items():
        _library.define(_name + _schema)
