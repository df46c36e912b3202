"""The segmentation network as configured, built or loaded from a finished stage."""

from pathlib import Path

from torch import nn

from mcis.datasets.errors import UserError
from mcis.models.networks import SEGMENTERS
from mcis.platform.config.training import SegmenterConfig
from mcis.platform.networks.build import backbone_keys, build_backbone
from mcis.platform.networks.checkpoints import WEIGHTS, load_weights
from mcis.platform.runs.arguments import errors_name_keys


def build_segmenter(config: SegmenterConfig, classes: int) -> nn.Module:
    """The segmentation network as configured, with its initial weights.

    Raises:
        UserError: the backbone cannot have the stride or lacks a level that the network needs, or the network has no
            image-level head where it is to learn.
    """
    backbone = build_backbone(config)
    with errors_name_keys(backbone_keys(config)):
        network = SEGMENTERS[config.network](
            backbone, labels=classes + 1, width=config.width, dilation=config.dilation, dropout=config.dropout
        )
    if config.image_loss and getattr(network, "image_head", None) is None:
        raise UserError(
            f"segmenter.image_loss with the network {config.network}, which says nothing of the image as a whole",
            "a network with such a head, as pyramid",
            "set segmenter.network=pyramid or segmenter.image_loss=0",
        )
    assert isinstance(network, nn.Module)
    return network


def load_segmenter(config: SegmenterConfig, folder: Path, classes: int) -> nn.Module:
    """The trained network of a finished stage, in evaluation mode."""
    model = build_segmenter(config, classes)
    load_weights(model, folder / WEIGHTS)
    return model.eval()
