"""Classifiers in files of weights: one that training starts from, with a backbone that makes features for it."""

from pathlib import Path

import pytest
import torch

from mcis.datasets.errors import UserError
from mcis.models.pretrained import bundled_file
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import save_weights
from mcis.platform.networks.pretrained import load_backbone
from mcis.platform.networks.trained import check_initial_classifier, classifier_description

CLASSES = ("cat", "dog", "sheep")


def test_what_learns_from_features_starts_from_the_backbone_that_made_them(tmp_path: Path) -> None:
    config = resolve("tags", "photos", {"data.tags.table": str(tmp_path / "photos.csv")}).config
    path, about = tmp_path / "mine.pt", classifier_description(config.classifier, CLASSES)
    model = build_classifier(config.classifier, len(CLASSES))
    load_backbone("classifier", model.backbone, bundled_file())
    save_weights(model, path, about)
    check_initial_classifier(config, path, CLASSES, bundled_file())
    with torch.no_grad():
        next(iter(model.backbone.parameters())).mul_(2)
    save_weights(model, path, about)
    check_initial_classifier(config, path, CLASSES, None)
    with pytest.raises(UserError, match=r"is not that of weights\.backbone"):
        check_initial_classifier(config, path, CLASSES, bundled_file())
