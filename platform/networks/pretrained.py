"""Finds the weights that trainings start from: pretrained backbones, and classifiers that were trained before.

Pretrained weights are a local file, bundled with this package, or downloaded once into the workspace. Torch downloads
those of torchvision and checks their hash; timm downloads its own, or finds them in its cache.
"""

import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.folders import fetch_file, local_path, path_exists, upload_file
from mcis.models.backbones import Backbone
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.pretrained import (
    BUNDLED_BACKBONES,
    TORCHVISION_PRETRAINED,
    bundled_weights,
    load_pretrained,
    torchvision_weights_url,
)
from mcis.models.registry import TIMM_PREFIX
from mcis.platform.config.keys import keys_in_errors
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import load_weights, save
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.workspace import Workspace

_DESCRIBED_FIELDS = {"backbone", "stride", "standardize", "attention", "head", "affinity", "num_domain_affinities"}
"""Fields of a classifier's configuration that its weights are described by."""


def classifier_weights(config: Config, workspace: Workspace) -> Path | None:
    """Returns the file of pretrained weights of the classifier's backbone, from which features are extracted too.

    Returns:
        None if the backbone is trained from scratch, or if the whole classifier is loaded from a file.

    Raises:
        UserError: See `backbone_weights`.
    """
    if config.weights.classifier:
        return None
    return backbone_weights(config.weights.classifier_backbone, config.classifier.backbone, workspace)


def downstream_weights(
    config: Config, network: Literal["segmenter", "affinity_net"], workspace: Workspace
) -> Path | None:
    """Returns the file of pretrained weights of the backbone of a network that is trained after the classifier.

    Returns:
        None if the backbone is trained from scratch, or starts from the weights of the classifier's backbone.

    Raises:
        UserError: See `backbone_weights`.
    """
    if network == "segmenter" and config.segmenter.init == "classifier":
        return None
    return backbone_weights(config.weights.origin(network), getattr(config, network).backbone, workspace)


def load_backbone(network: Literal["classifier", "segmenter", "affinity_net"], backbone: Backbone, path: Path) -> None:
    """Loads pretrained weights into the backbone of a network.

    Raises:
        UserError: See `load_pretrained`; the message names the configuration keys of the network.
    """
    with keys_in_errors(f"weights.{network}_backbone", f"{network}.backbone"):
        load_pretrained(backbone, fetch_file(path))


def backbone_weights(origin: str, backbone: str, workspace: Workspace) -> Path | None:
    """Returns the file of pretrained weights of a backbone, after downloading it if necessary.

    Args:
        origin: `none`, `download`, `bundled` or the path of a file, as configured.
        backbone: Name of the backbone.

    Returns:
        None if the backbone is trained from scratch.

    Raises:
        UserError: The file is absent, there are no such weights of this backbone, or the download failed.
    """
    if origin == "none":
        return None

    if origin == "bundled":
        if backbone not in BUNDLED_BACKBONES:
            raise UserError(
                f"no weights of {backbone} are bundled with mcis",
                f"one of the backbones {', '.join(BUNDLED_BACKBONES)}",
                "choose one (classifier.backbone, segmenter.backbone), or weights.classifier_backbone=download",
            )
        return bundled_weights(backbone)

    if origin == "download":
        path = _download_path(backbone, workspace)
        if not path_exists(path):
            _download(backbone, path)
        return path

    path = local_path(origin)
    if not path_exists(path):
        raise UserError(
            f"weights of {backbone}: {path} is no file",
            "`none`, `download`, `bundled`, or a state_dict file of torchvision's, timm's or, of resnet38, PSA's "
            "(.params or .pth)",
            "name the file, for example weights.classifier_backbone=/path/to/weights.pth",
        )
    return path


def _download_path(backbone: str, workspace: Workspace) -> Path:
    """Returns where the weights of a backbone are kept after their download. Raises UserError if there are none."""
    if backbone.startswith(TIMM_PREFIX):
        return workspace.weights / f"{backbone.replace('/', '-')}.pt"
    if backbone not in TORCHVISION_PRETRAINED:
        raise UserError(
            f"there are no pretrained weights of the backbone {backbone} to download",
            f"one of {', '.join(TORCHVISION_PRETRAINED)}, or timm/NAME, or a file",
            "name a state_dict file by weights.classifier_backbone=PATH (for resnet38: PSA's ImageNet weights, "
            "ilsvrc-cls_rna-a1_cls1000_ep-0001.params), choose such a backbone, or "
            "weights.classifier_backbone=none to train from scratch",
        )
    return workspace.weights / torchvision_weights_url(backbone).rsplit("/", 1)[1]


def _download(backbone: str, path: Path) -> None:
    """Downloads the weights of a backbone to a file. Raises UserError if that fails."""
    is_timm = backbone.startswith(TIMM_PREFIX)
    try:
        if is_timm:
            _download_from_timm(backbone, path)
        else:
            _download_from_torchvision(backbone, path)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        hub = "timm's hub" if is_timm else "torchvision's model zoo"
        raise UserError(
            f"the weights of {backbone} cannot be downloaded ({error})",
            f"a connection, or the file {path}",
            f"fetch {path.name} from {hub} on a machine with a connection and put it at {path}, "
            "or name a file by weights.classifier_backbone=PATH (for the segmenter: "
            "weights.segmenter_backbone=PATH)",
        ) from None


def _download_from_timm(backbone: str, path: Path) -> None:
    from mcis.models.timm_backbones import download_state_dict

    save(download_state_dict(backbone.removeprefix(TIMM_PREFIX)), path)


def _download_from_torchvision(backbone: str, path: Path) -> None:
    from torch.hub import load_state_dict_from_url

    with disk_errors(path.parent):
        load_state_dict_from_url(
            torchvision_weights_url(backbone), str(path.parent), map_location="cpu", check_hash=True, weights_only=True
        )
        upload_file(path, path)


def classifier_description(config: ClassifierConfig, classes: Sequence[str]) -> dict[str, Any]:
    """Returns the description of a classifier in its file of weights.

    It holds the class names in their order, and the values of the configuration that shapes of tensors do not reveal.
    """
    return {"classes": list(classes), **config.model_dump(mode="json", include=_DESCRIBED_FIELDS)}


def trained_classifier_file(config: Config) -> Path | None:
    """Returns the file of a trained classifier that is used instead of a training (`weights.classifier`).

    Returns:
        None if no file is configured.

    Raises:
        UserError: There is no such file.
    """
    if not config.weights.classifier:
        return None
    path = local_path(config.weights.classifier)
    if not path_exists(path):
        raise UserError(
            f"weights.classifier: {path} is no file",
            "weights.pt of an earlier run's stage train_classifier, or what `mcis import-weights` wrote",
            "name the file, for example weights.classifier=/path/to/weights.pt",
        )
    return path


def load_trained_classifier(config: Config, path: Path, classes: Sequence[str]) -> CoAttentionClassifier:
    """Loads the classifier from a file of weights. Values that the file does not describe are not checked.

    Raises:
        UserError: The file is damaged or of another configuration.
    """
    model = build_classifier(config.classifier, len(classes))
    expected = f"the classifier of this configuration ({config.classifier.backbone}, {len(classes)} classes)"
    remedy = "give the recipe and values that it was trained with; released weights need --recipe released"
    try:
        found = load_weights(model, path)
    except BadFile as error:
        raise UserError(error.found, expected, remedy) from None

    configured = classifier_description(config.classifier, classes)
    different = [
        f"{name} is {found[name]}, here {value}"
        for name, value in configured.items()
        if name in found and found[name] != value
    ]
    if different:
        raise UserError(f"{path} does not fit this configuration: {'; '.join(different)}", expected, remedy)
    return model
