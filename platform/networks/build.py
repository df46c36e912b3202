"""The networks that a configuration names, built or loaded from a finished stage."""

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.models import networks
from mcis.models.affinity_net import AffinityNet
from mcis.models.backbones import Backbone, train_last
from mcis.models.classifier import CoAttentionClassifier
from mcis.platform.config.keys import keys_in_errors
from mcis.platform.config.training import NETWORKS, AffinityNetConfig, ClassifierConfig, NetworkConfig, SegmenterConfig
from mcis.platform.networks.checkpoints import load_weights, weights_in

Network = TypeVar("Network", bound=nn.Module)


def build_backbone(config: NetworkConfig) -> Backbone:
    """The backbone of a configured network, with its initial weights; errors as of `networks.build_backbone`."""
    section = NETWORKS[type(config)]
    with keys_in_errors(f"{section}.backbone", f"{section}.stride"):
        return networks.build_backbone(config.backbone, stride=config.stride, channels=config.channels)


def freeze(network: nn.Module, config: NetworkConfig) -> None:
    """Freezes what is not trained of a network's backbone, before its optimizer is made; errors as of `train_last`."""
    if config.trainable_stages != "all":
        assert isinstance(network.backbone, Backbone)
        with keys_in_errors(f"{NETWORKS[type(config)]}.trainable_stages"):
            train_last(network.backbone, 0 if isinstance(config.trainable_stages, str) else config.trainable_stages)


def build_classifier(config: ClassifierConfig, classes: int) -> CoAttentionClassifier:
    """The classifier as configured, with its initial weights; UserError where the backbone cannot have the stride, or
    lacks what equivariant attention compares."""
    backbone = build_backbone(config)
    with keys_in_errors("classifier.backbone", "classifier.equivariant.weight"):
        return CoAttentionClassifier(
            backbone,
            classes=classes,
            standardized=config.standardize,
            attention=config.attention,
            head=config.head,
            affinity=config.affinity,
            kinds=config.num_domain_affinities,
            phi_std=config.phi_std,
            correlated=config.equivariant.weight > 0,
        )


def build_affinity_net(config: AffinityNetConfig) -> AffinityNet:
    """The affinity network as configured, with its initial weights."""
    return AffinityNet(
        build_backbone(config),
        kind=config.kind,
        width=config.width,
        embedding=config.embedding,
        finest=config.finest,
        radius=config.radius,
    )


def build_segmenter(config: SegmenterConfig, classes: int) -> nn.Module:
    """The segmentation network as configured, with its initial weights; UserError where the backbone cannot have the
    stride or lacks a level that the network needs, or the network has no image-level head where it is to learn."""
    backbone = build_backbone(config)
    with keys_in_errors("segmenter.backbone", "segmenter.network"):
        network = networks.SEGMENTERS[config.network](
            backbone, labels=classes + 1, width=config.width, dilation=config.dilation, dropout=config.dropout
        )
    if config.image_loss_weight and getattr(network, "image_head", None) is None:
        raise UserError(
            f"segmenter.image_loss_weight is set for network {config.network}, which has no image-level head",
            "a network with such a head, as pyramid",
            "set segmenter.network=pyramid or segmenter.image_loss_weight=0",
        )
    assert isinstance(network, nn.Module)
    return network


def load_trained(network: Network, folder: Path, device: torch.device | None = None) -> Network:
    """A network with the weights that a finished stage, or `write_pretrained`, left in a folder, in evaluation mode;
    where a device is named, there (`move_channels_last`)."""
    load_weights(network, weights_in(folder))
    return (move_channels_last(network, device) if device else network).eval()


def move_channels_last(network: Network, device: torch.device) -> Network:
    """Moves a network to its device, channels last, the order in which convolutions are fastest."""
    anything: Any = network  # torch's stubs know no memory format
    anything.to(device, memory_format=torch.channels_last)
    return network
