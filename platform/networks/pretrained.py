"""Pretrained weights: from a local file, or fetched once by torch's own downloader into the workspace, hash checked."""

import urllib.error
from pathlib import Path
from typing import Literal

from mcis.datasets.errors import UserError
from mcis.models.backbones import PRETRAINED, Backbone, load_pretrained, pretrained_url
from mcis.platform.config.sections import Config
from mcis.platform.runs.arguments import errors_name_keys
from mcis.platform.runs.workspace import Workspace


def classifier_weights(config: Config, workspace: Workspace) -> Path | None:
    """The pretrained weights that the classifier starts from; None where a trained one is taken over."""
    if config.weights.classifier:
        return None
    return backbone_weights(config.weights.backbone, config.classifier.backbone, workspace)


def segmenter_weights(config: Config, workspace: Workspace) -> Path | None:
    """The pretrained weights that the segmenter starts from; None where it starts from the classifier's backbone."""
    if config.segmenter.init == "classifier":
        return None
    origin = config.weights.segmenter or config.weights.backbone
    return backbone_weights(origin, config.segmenter.backbone, workspace)


def load_backbone(network: Literal["classifier", "segmenter"], backbone: Backbone, path: Path) -> None:
    """Loads pretrained weights into the backbone of one of the networks.

    Raises:
        UserError: they do not fit; it names the configuration keys of the network.
    """
    weights_key = {"classifier": "weights.backbone", "segmenter": "weights.segmenter"}[network]
    with errors_name_keys({"path": weights_key, "backbone": f"{network}.backbone"}):
        load_pretrained(backbone, path)


def backbone_weights(origin: str, backbone: str, workspace: Workspace) -> Path | None:
    """The file with the ImageNet weights of a backbone, or None where it is trained from scratch.

    Args:
        origin: `none`, `download` or a file's path, as configured.

    Raises:
        UserError: the file is absent, there are none for this backbone, or the download failed.
    """
    if origin == "none":
        return None
    if origin == "download":
        return _downloaded(backbone, workspace)
    path = Path(origin)
    if not path.is_file():
        raise UserError(
            f"weights of {backbone}: {path} is no file",
            "`none`, `download`, or torchvision's ImageNet state_dict file",
            "name the file, for example --set weights.backbone=/path/to/weights.pth",
        )
    return path


def _downloaded(backbone: str, workspace: Workspace) -> Path:
    """torchvision's weights of a backbone, fetched unless the workspace has them."""
    if backbone not in PRETRAINED:
        raise UserError(
            f"there are no pretrained weights of the backbone {backbone}",
            f"one of {', '.join(PRETRAINED)}",
            "choose such a backbone, or --set weights.backbone=none to train from scratch",
        )
    from torch.hub import load_state_dict_from_url

    url = pretrained_url(backbone)
    path = workspace.weights / url.rsplit("/", 1)[1]
    if path.is_file():
        return path
    try:
        load_state_dict_from_url(url, str(workspace.weights), map_location="cpu", check_hash=True, weights_only=True)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        raise UserError(
            f"the weights of {backbone} cannot be downloaded ({error})",
            f"a connection, or the file {path}",
            f"fetch {path.name} from torchvision's model zoo on a machine with a connection and put it at {path}, "
            "or name a file by --set weights.backbone=PATH (the segmenter's: weights.segmenter=PATH)",
        ) from None
    return path
