"""Pretrained weights: from a local file, or fetched once by torch's own downloader into the workspace, hash checked."""

import urllib.error
from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.models.backbones import PRETRAINED, pretrained_url
from mcis.platform.config import WeightsConfig
from mcis.platform.workspace import Workspace


def backbone_weights(weights: WeightsConfig, backbone: str, workspace: Workspace) -> Path | None:
    """The file with the ImageNet weights of a backbone; None = from scratch.

    Raises:
        UserError: the file is absent, there are none for this backbone, or the download failed.
    """
    if weights.backbone == "none":
        return None
    if weights.backbone != "download":
        path = Path(weights.backbone).expanduser().resolve()
        if not path.is_file():
            raise UserError(
                f"weights.backbone names {path}, which is no file",
                "`none`, `download`, or torchvision's ImageNet state_dict file",
                "name the file, for example --set weights.backbone=/path/to/weights.pth",
            )
        return path
    if backbone not in PRETRAINED:
        raise UserError(
            f"there are no pretrained weights of the backbone {backbone}",
            f"one of {', '.join(PRETRAINED)}",
            "choose such a backbone, or --set weights.backbone=none to train from scratch",
        )
    from torch.hub import load_state_dict_from_url

    url = pretrained_url(backbone)
    path = workspace.weights / url.rsplit("/", 1)[1]
    if not path.is_file():
        try:
            load_state_dict_from_url(
                url, str(workspace.weights), map_location="cpu", check_hash=True, weights_only=True
            )
        except (urllib.error.URLError, OSError, RuntimeError) as error:
            raise UserError(
                f"the weights of {backbone} cannot be downloaded ({error})",
                f"a connection, or the file {path}",
                f"fetch {path.name} from torchvision's model zoo on a machine with a connection and put it at {path}, "
                "or name a file by --set weights.backbone=PATH",
            ) from None
    return path
