"""The affinity network as configured, built or loaded from a finished stage."""

from pathlib import Path

from mcis.models.affinity_net import AffinityNet
from mcis.platform.config.training import AffinityNetConfig
from mcis.platform.networks.build import build_backbone
from mcis.platform.networks.checkpoints import WEIGHTS, load_weights


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
