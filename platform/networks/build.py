"""Builds the networks that a configuration names, and loads those that a finished stage trained."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.models import registry
from mcis.models.affinity_net import AffinityNet
from mcis.models.backbones import Backbone, freeze_except_last
from mcis.models.classifier import CoAttentionClassifier
from mcis.platform.config.keys import keys_in_errors
from mcis.platform.config.training import NETWORKS, AffinityNetConfig, ClassifierConfig, NetworkConfig, SegmenterConfig
from mcis.platform.networks.weights_files import load_weights, weights_in

Network = TypeVar("Network", bound=nn.Module)


def build_backbone(config: NetworkConfig) -> Backbone:
    """Builds the backbone of a configured network with its initial weights.

    Raises:
        UserError: The backbone cannot have the configured stride.
    """
    section = NETWORKS[type(config)]
    with keys_in_errors(f"{section}.backbone", f"{section}.stride"):
        return registry.build_backbone(config.backbone, stride=config.stride, channels=config.channels)


def freeze(network: nn.Module, config: NetworkConfig) -> None:
    """Freezes the stages of a network's backbone that are not trained. Call it before the optimizer is built.

    Raises:
        UserError: The backbone has fewer stages than are to be trained.
    """
    if config.trainable_stages == "all":
        return
    assert isinstance(network.backbone, Backbone)
    with keys_in_errors(f"{NETWORKS[type(config)]}.trainable_stages"):
        freeze_except_last(network.backbone, config.trainable_stages)


def build_classifier(config: ClassifierConfig, classes: int) -> CoAttentionClassifier:
    """Builds the classifier of `classes` classes with its initial weights.

    Raises:
        UserError: The backbone cannot have the configured stride, or lacks the intermediate features that equivariant
            attention compares.
    """
    backbone = build_backbone(config)
    with keys_in_errors("classifier.backbone", "classifier.equivariant.weight"):
        return CoAttentionClassifier(
            backbone,
            classes=classes,
            standardized=config.standardize,
            attention=config.attention,
            head=config.head,
            affinity=config.affinity,
            num_domain_affinities=config.num_domain_affinities,
            phi_std=config.phi_std,
            correlated=config.equivariant.weight > 0,
        )


def build_affinity_net(config: AffinityNetConfig) -> AffinityNet:
    """Builds the affinity network with its initial weights. Raises what `build_backbone` raises."""
    return AffinityNet(
        build_backbone(config),
        kind=config.kind,
        width=config.width,
        embedding=config.embedding,
        finest=config.finest,
        radius=config.radius,
    )


def build_segmenter(config: SegmenterConfig, classes: int) -> nn.Module:
    """Builds the segmentation network of `classes` classes and background with its initial weights.

    Raises:
        UserError: The backbone cannot have the configured stride or lacks a level that the network needs, or an
            image-level loss is configured for a network without an image-level head.
    """
    backbone = build_backbone(config)
    with keys_in_errors("segmenter.backbone", "segmenter.network"):
        network = registry.SEGMENTERS[config.network](
            backbone, labels=classes + 1, width=config.width, dilation=config.dilation, dropout=config.dropout
        )

    if config.image_loss_weight and getattr(network, "image_head", None) is None:
        raise UserError(
            f"segmenter.image_loss_weight is set for network {config.network}, which has no image-level head",
            "a network with such a head, for example pyramid",
            "set segmenter.network=pyramid or segmenter.image_loss_weight=0",
        )
    assert isinstance(network, nn.Module)
    return network


def load_trained(network: Network, folder: Path, device: torch.device | None = None) -> Network:
    """Loads trained weights into a network and switches it to evaluation mode.

    Args:
        folder: The output of a finished training stage, or what `write_pretrained` wrote.
        device: Where to move the network (`move_channels_last`). None: leave it where it is.

    Raises:
        UserError: See `load_weights`.
    """
    load_weights(network, weights_in(folder))
    if device:
        move_channels_last(network, device)
    return network.eval()


def move_channels_last(network: Network, device: torch.device) -> Network:
    """Moves a network to its device, in channels-last order, in which convolutions are fastest."""
    untyped: Any = network  # torch's stubs do not declare memory_format
    untyped.to(device, memory_format=torch.channels_last)
    return network
