"""The networks that a configuration names, built or loaded from a finished stage, and the parameters of its CRF."""

from pathlib import Path

from torch import nn

from mcis.models.backbones import BACKBONES, Backbone
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.crf import CrfParameters
from mcis.models.segmenters import SEGMENTERS
from mcis.platform.config.maps import CrfConfig
from mcis.platform.config.training import ClassifierConfig, SegmenterConfig
from mcis.platform.networks.checkpoints import WEIGHTS, load_weights


def build_backbone(name: str, *, channels: int, stride: int = 8) -> Backbone:
    """A backbone by its name in the configuration; width and stride are the backbone `small`'s to choose."""
    return BACKBONES[name](channels=channels, stride=stride) if name == "small" else BACKBONES[name]()


def build_classifier(config: ClassifierConfig, classes: int) -> CoAttentionClassifier:
    """The classifier as configured, with its initial weights."""
    return CoAttentionClassifier(
        build_backbone(config.backbone, channels=config.channels),
        classes=classes,
        attention=config.attention,
        head=config.head,
        affinity=config.affinity,
        affinity_scale=config.affinity_scale,
        affinity_init=config.affinity_init,
        kinds=config.kinds,
    )


def load_classifier(config: ClassifierConfig, folder: Path, classes: int) -> CoAttentionClassifier:
    """The trained classifier of a finished stage, in evaluation mode."""
    model = build_classifier(config, classes)
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def build_segmenter(config: SegmenterConfig, classes: int) -> nn.Module:
    """The segmentation network as configured, with its initial weights."""
    return SEGMENTERS[config.network](
        build_backbone(config.backbone, channels=config.channels, stride=config.stride),
        labels=classes + 1,
        width=config.width,
        dilation=config.dilation,
        dropout=config.dropout,
    )


def load_segmenter(config: SegmenterConfig, folder: Path, classes: int) -> nn.Module:
    """The trained network of a finished stage, in evaluation mode."""
    model = build_segmenter(config, classes)
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def crf_parameters(config: CrfConfig) -> CrfParameters:
    """The configuration's section of the dense CRF as the numerics take it."""
    return CrfParameters(**config.model_dump())
