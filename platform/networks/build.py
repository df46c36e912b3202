"""The networks that a configuration names, built or loaded from a finished stage."""

import functools
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mcis.models import networks
from mcis.models.affinity_net import AffinityNet
from mcis.models.backbones import Backbone, train_last
from mcis.models.classifier import Affinity, CoAttentionClassifier
from mcis.platform.config.training import NETWORKS, AffinityNetConfig, ClassifierConfig, NetworkConfig
from mcis.platform.networks.checkpoints import WEIGHTS, load_weights
from mcis.platform.runs.arguments import errors_name_keys

Network = TypeVar("Network", bound=nn.Module)


def build_backbone(config: NetworkConfig) -> Backbone:
    """The backbone of one of the networks as configured, with its initial weights.

    Raises:
        UserError: it cannot have the stride.
    """
    with errors_name_keys(backbone_keys(config)):
        return networks.build_backbone(config.backbone, stride=config.stride, channels=config.channels)


def freeze(network: nn.Module, config: NetworkConfig) -> None:
    """Freezes what the configuration does not train of a network's backbone, before its optimizer is made.

    Raises:
        UserError: more stages are to be trained than there are.
    """
    if config.trained != "all":
        assert isinstance(network.backbone, Backbone)
        with errors_name_keys(backbone_keys(config)):
            train_last(network.backbone, 0 if isinstance(config.trained, str) else config.trained)


def backbone_keys(config: NetworkConfig) -> dict[str, str]:
    """The configuration keys that errors of a network's backbone name."""
    keys = {name: f"{NETWORKS[type(config)]}.{name}" for name in ("backbone", "network", "stride", "trained")}
    return keys | {"correlated": "classifier.equivariant.weight"}


def build_classifier(config: ClassifierConfig, classes: int) -> CoAttentionClassifier:
    """The classifier as configured, with its initial weights.

    Raises:
        UserError: the backbone cannot have the stride, or lacks what an affinity or equivariant attention compares.
    """
    backbone = build_backbone(config)
    with errors_name_keys(backbone_keys(config)):
        return CoAttentionClassifier(
            backbone,
            classes=classes,
            standardized=config.standardize,
            neck=config.neck,
            attention=config.attention,
            head=config.head,
            affinity=Affinity(**dict(config.affinity)),
            kinds=config.kinds,
            phi_std=config.phi_std,
            correlated=config.equivariant.weight > 0,
        )


@functools.cache
def embedding_shape(config: ClassifierConfig, classes: int) -> tuple[int, int, int]:
    """(D, H, W) of the features that localization keeps of an image."""
    with torch.device("meta"), torch.inference_mode():
        model = build_classifier(config, classes).eval()
        d, h, w = model.embed(torch.zeros(1, 3, config.input_size, config.input_size)).shape[1:]
    return d, h, w


def load_classifier(config: ClassifierConfig, folder: Path, classes: int) -> CoAttentionClassifier:
    """The trained classifier of a finished stage, in evaluation mode."""
    model = build_classifier(config, classes)
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def build_affinity_net(config: AffinityNetConfig) -> AffinityNet:
    """The affinity network as configured, with its initial weights.

    Raises:
        UserError: the backbone cannot have the stride.
    """
    return AffinityNet(
        build_backbone(config),
        kind=config.kind,
        width=config.width,
        embedding=config.embedding,
        finest=config.finest,
        radius=config.radius,
    )


def load_affinity_net(config: AffinityNetConfig, folder: Path) -> AffinityNet:
    """The trained network of a finished stage, in evaluation mode."""
    model = build_affinity_net(config)
    load_weights(model, folder / WEIGHTS)
    return model.eval()


def move_channels_last(network: Network, device: torch.device) -> Network:
    """Moves a network to its device, channels last, the order in which convolutions are fastest."""
    anything: Any = network  # torch's stubs know no memory format
    anything.to(device, memory_format=torch.channels_last)
    return network
