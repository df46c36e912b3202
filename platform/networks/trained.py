"""A classifier that was trained before and is taken from a file of weights, once it is checked to fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.models.classifier import CoAttentionClassifier
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import load_weights

_DESCRIBED = {"backbone", "stride", "standardize", "neck", "attention", "head", "affinity", "kinds"}


def classifier_description(config: ClassifierConfig, classes: Sequence[str]) -> dict[str, Any]:
    """What a file of weights says of its classifier: the class names in their order, and what shapes leave open."""
    return {"classes": list(classes), **config.model_dump(mode="json", include=_DESCRIBED)}


def trained_classifier(config: Config) -> Path | None:
    """The file that `weights.classifier` names, or None where the classifier is to be trained.

    Raises:
        UserError: there is no such file.
    """
    if not config.weights.classifier:
        return None
    path = Path(config.weights.classifier)
    if not path.is_file():
        raise UserError(
            f"weights.classifier: {path} is no file",
            "weights.pt of an earlier run's stage train_classifier, or what `mcis import-weights` wrote",
            "name the file, for example --set weights.classifier=/path/to/weights.pt",
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
    except UserError as error:
        raise UserError(error.found, expected, remedy) from None
    different = [
        f"{name} is {description[name]}, here {value}"
        for name, value in wanted.items()
        if name in description and description[name] != value
    ]
    if different:
        raise UserError(f"{path} does not fit this configuration: {'; '.join(different)}", expected, remedy)
    return model
