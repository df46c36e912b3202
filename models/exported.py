"""A segmentation network with its preprocessing as a program of torch.export, which runs without the project."""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mcis.models.backbones import Normalization, to_unit

LEAST_SIDE, MOST_SIDE = 32, 4096
"""Sides of the images that an exported network takes, pixels."""


class WithPixels(nn.Module):
    """Pixels of one image of any size -> label probabilities, at one scale."""

    def __init__(self, network: nn.Module, normalize: Normalization):
        super().__init__()
        self.network, self.normalize = network, normalize

    def forward(self, image: Tensor) -> Tensor:
        """RGB (H, W, 3) uint8 -> probabilities (K + 1, H, W)."""
        return torch.softmax(self.network(self.normalize(to_unit(image[None]))), dim=1)[0]


def export(network: nn.Module, normalize: Normalization) -> ExportedProgram:
    """The network in evaluation mode as a program from an image (H, W, 3) uint8 to probabilities (K + 1, H, W).

    Both sides may have LEAST_SIDE to MOST_SIDE pixels.
    """
    image = torch.zeros(96, 129, 3, dtype=torch.uint8)  # two sizes that nothing in a network is likely to have
    sides = {0: Dim("height", min=LEAST_SIDE, max=MOST_SIDE), 1: Dim("width", min=LEAST_SIDE, max=MOST_SIDE)}
    with torch.no_grad():
        return torch.export.export(
            WithPixels(network, normalize).eval(), (image,), dynamic_shapes=(sides,), strict=False
        )
