"""A classifier that was trained before, taken over or trained on from a file of weights, once it is checked to fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.folders import is_there, local_path
from mcis.models.classifier import CoAttentionClassifier
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_backbone, build_classifier
from mcis.platform.networks.checkpoints import load_weights
from mcis.platform.networks.pretrained import load_backbone

_DESCRIBED = {"backbone", "stride", "standardize", "neck", "attention", "head", "affinity", "kinds"}


def classifier_description(config: ClassifierConfig, classes: Sequence[str]) -> dict[str, Any]:
    """What a file of weights says of its classifier: the class names in their order, and what shapes leave open."""
    return {"classes": list(classes), **config.model_dump(mode="json", include=_DESCRIBED)}


def classifier_file(config: Config, key: Literal["classifier", "initial"]) -> Path | None:
    """The file of a classifier that is taken over (`weights.classifier`), or that training starts from
    (`weights.initial`); None where none is named.

    Raises:
        UserError: there is no such file.
    """
    name = getattr(config.weights, key)
    if not name:
        return None
    path = local_path(name)
    if not is_there(path):
        raise UserError(
            f"weights.{key}: {path} is no file",
            "weights.pt of an earlier run's stage train_classifier, or what `mcis import-weights` wrote",
            f"name the file, for example --set weights.{key}=/path/to/weights.pt",
        )
    return path


def load_trained_classifier(config: Config, path: Path, classes: Sequence[str]) -> CoAttentionClassifier:
    """The classifier in a file of weights; what the file does not say of itself is taken on trust.

    Raises:
        UserError: the file is damaged or of another configuration.
    """
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


def check_initial_classifier(config: Config, path: Path, classes: Sequence[str], pretrained: Path | None) -> None:
    """Checks that training can start from the classifier in a file of weights.

    Args:
        pretrained: weights of the backbone, by which features are made that the training reads in place of images;
            None where it reads images.

    Raises:
        UserError: the file is damaged or of another configuration, or its backbone is not the one that makes features.
    """
    initial = load_trained_classifier(config, path, classes)
    if pretrained is None:
        return
    backbone = build_backbone(config.classifier)
    load_backbone("classifier", backbone, pretrained)
    own = initial.backbone.state_dict()
    if different := [name for name, value in backbone.state_dict().items() if not torch.equal(value, own[name])]:
        raise UserError(
            f"weights.initial: the backbone in {path} is not that of weights.backbone ({different[0]} differs), by "
            "which the features are made that classifier.trained=neck learns from",
            "initial weights that were trained from the same pretrained ones, with the backbone left as it was",
            "name these by weights.backbone, or train a part of the backbone, too: --set classifier.trained=1",
        )
