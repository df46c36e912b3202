"""Weights that trainings start from: pretrained ones of backbones, and classifiers that were trained before.

Pretrained ones are a local file, the bundled one, or fetched once into the workspace: torch's own downloader fetches
torchvision's and checks their hash; timm fetches its own, from its hub or cache.
"""

import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.folders import fetched, is_there, local_path, send
from mcis.models.backbones import Backbone
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.networks import TIMM
from mcis.models.pretrained import BUNDLED, PRETRAINED, bundled_file, load_pretrained, pretrained_url
from mcis.platform.config.keys import keys_in_errors
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import load_weights, save
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.workspace import Workspace


def classifier_weights(config: Config, workspace: Workspace) -> Path | None:
    """The pretrained weights that the classifier's backbone starts from, or features are made by; None where it is
    trained from scratch, or a file has all of its weights."""
    if config.weights.classifier:
        return None
    return backbone_weights(config.weights.classifier_backbone, config.classifier.backbone, workspace)


def later_weights(config: Config, network: Literal["segmenter", "affinity_net"], workspace: Workspace) -> Path | None:
    """The pretrained weights that a network behind the classifier starts from; None: from the classifier's backbone."""
    if network == "segmenter" and config.segmenter.init == "classifier":
        return None
    return backbone_weights(config.weights.origin(network), getattr(config, network).backbone, workspace)


def load_backbone(network: Literal["classifier", "segmenter", "affinity_net"], backbone: Backbone, path: Path) -> None:
    """Loads pretrained weights into the backbone of one of the networks; errors as of `load_pretrained`, with the
    configuration keys of the network."""
    with keys_in_errors(f"weights.{network}_backbone", f"{network}.backbone"):
        load_pretrained(backbone, fetched(path))


def backbone_weights(origin: str, backbone: str, workspace: Workspace) -> Path | None:
    """The file with the pretrained weights of a backbone, or None where it is trained from scratch.

    Args:
        origin: `none`, `download`, `bundled` or a file's path, as configured.

    Raises:
        UserError: the file is absent, there are none for this backbone, or the download failed.
    """
    if origin == "none":
        return None
    if origin == "bundled":
        if backbone not in BUNDLED:
            raise UserError(
                f"no weights of {backbone} are bundled with mcis",
                f"one of the backbones {', '.join(BUNDLED)}",
                "choose one (classifier.backbone, segmenter.backbone), or --set weights.classifier_backbone=download",
            )
        return bundled_file(backbone)
    if origin == "download":
        path = _place(backbone, workspace)
        if not is_there(path):
            _download(backbone, path)
        return path
    path = local_path(origin)
    if not is_there(path):
        raise UserError(
            f"weights of {backbone}: {path} is no file",
            "`none`, `download`, `bundled`, or a state_dict file of torchvision's, timm's or, of resnet38, PSA's",
            "name the file, for example --set weights.classifier_backbone=/path/to/weights.pth",
        )
    return path


def _place(backbone: str, workspace: Workspace) -> Path:
    """Where a backbone's weights are kept once they are fetched."""
    if backbone.startswith(TIMM):
        return workspace.weights / f"{backbone.replace('/', '-')}.pt"
    if backbone not in PRETRAINED:
        raise UserError(
            f"there are no pretrained weights of the backbone {backbone} to download",
            f"one of {', '.join(PRETRAINED)}, or timm/NAME, or a file",
            "name a state_dict file by --set weights.classifier_backbone=PATH (for resnet38: PSA's ImageNet weights, "
            "converted to torch), choose such a backbone, or "
            "--set weights.classifier_backbone=none to train from scratch",
        )
    return workspace.weights / pretrained_url(backbone).rsplit("/", 1)[1]


def _download(backbone: str, path: Path) -> None:
    """Fetches the weights of a backbone into a file."""
    try:
        if backbone.startswith(TIMM):
            from mcis.models.timm_backbones import downloaded_state

            state = downloaded_state(backbone.removeprefix(TIMM))
            save(state, path)
        else:
            from torch.hub import load_state_dict_from_url

            with disk_errors(path.parent):
                load_state_dict_from_url(
                    pretrained_url(backbone), str(path.parent), map_location="cpu", check_hash=True, weights_only=True
                )
                send(path, path)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        hub = "timm's hub" if backbone.startswith(TIMM) else "torchvision's model zoo"
        raise UserError(
            f"the weights of {backbone} cannot be downloaded ({error})",
            f"a connection, or the file {path}",
            f"fetch {path.name} from {hub} on a machine with a connection and put it at {path}, "
            "or name a file by --set weights.classifier_backbone=PATH (for the segmenter: "
            "weights.segmenter_backbone=PATH)",
        ) from None


_DESCRIBED = {"backbone", "stride", "standardize", "attention", "head", "affinity", "num_domain_affinities"}


def classifier_description(config: ClassifierConfig, classes: Sequence[str]) -> dict[str, Any]:
    """What a file of weights says of its classifier: the class names in their order, and what shapes leave open."""
    return {"classes": list(classes), **config.model_dump(mode="json", include=_DESCRIBED)}


def classifier_file(config: Config) -> Path | None:
    """The file of a classifier that is taken over (`weights.classifier`); None where none is named. UserError where
    there is no such file."""
    if not config.weights.classifier:
        return None
    path = local_path(config.weights.classifier)
    if not is_there(path):
        raise UserError(
            f"weights.classifier: {path} is no file",
            "weights.pt of an earlier run's stage train_classifier, or what `mcis import-weights` wrote",
            "name the file, for example --set weights.classifier=/path/to/weights.pt",
        )
    return path


def load_trained_classifier(config: Config, path: Path, classes: Sequence[str]) -> CoAttentionClassifier:
    """The classifier in a file of weights; what the file does not say of itself is taken on trust. UserError where the
    file is damaged or of another configuration."""
    model = build_classifier(config.classifier, len(classes))
    wanted = classifier_description(config.classifier, classes)
    expected = f"the classifier of this configuration ({config.classifier.backbone}, {len(classes)} classes)"
    remedy = "give the recipe and values that it was trained with; released weights need --recipe released"
    try:
        description = load_weights(model, path)
    except BadFile as error:
        raise UserError(error.found, expected, remedy) from None
    different = [
        f"{name} is {description[name]}, here {value}"
        for name, value in wanted.items()
        if name in description and description[name] != value
    ]
    if different:
        raise UserError(f"{path} does not fit this configuration: {'; '.join(different)}", expected, remedy)
    return model
