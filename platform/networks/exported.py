"""The trained segmentation network of a run -> a file that torch alone, or a runtime of ONNX, reads and runs."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mcis.datasets.errors import UserError
from mcis.models.backbones import Normalization, to_unit
from mcis.models.networks import normalization_of
from mcis.platform.networks.build import build_segmenter, load_trained
from mcis.platform.networks.hub import write_pretrained
from mcis.platform.networks.trained_segmenter import open_trained_segmenter
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import Workspace

ABOUT = "about.json"
"""The file inside of the exported one that says what goes in and what comes out."""
LEAST_SIDE, MOST_SIDE = 33, 4096
"""Sides of the images that an exported network takes, pixels; of 32, ConvNeXt has a single column to pool."""


class _WithPixels(nn.Module):
    """Pixels of one image of any size -> label probabilities, at one scale."""

    def __init__(self, network: nn.Module, normalize: Normalization):
        super().__init__()
        self.network, self.normalize = network, normalize

    def forward(self, image: Tensor) -> Tensor:
        """RGB (H, W, 3) uint8 -> probabilities (K + 1, H, W)."""
        return torch.softmax(self.network(self.normalize(to_unit(image[None]))), dim=1)[0]


def export_network(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the network with its preprocessing, at one scale and without the CRF; returns what it wrote, in words.

        extra = {"about.json": ""}
        network = torch.export.load("network.pt2", extra_files=extra).module()
        labels = network(image).argmax(0)  # (H, W, 3) uint8 -> (H, W)

    Raises:
        UserError: the run has trained no segmenter, or its backbone cannot be exported for images of any size.
    """
    program, about = _program(workspace, name)
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about, indent=2)})
    with written_aside(out) as aside:
        aside.write_bytes(content.getbuffer())
    return f"network of {len(about['classes'])} classes in {out}: {about['input']} -> {about['output']}"


def export_onnx(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the same as a model of ONNX, with what `about.json` says in its metadata. Errors as of
    `export_network`; UserError where the packages that write it are absent."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(str(error), "the packages that ONNX is written by", "pip install 'mcis[onnx]'") from None
    graph, about = _program(workspace, name)
    model = torch.onnx.export(graph, input_names=["image"], output_names=["probabilities"], dynamo=True, verbose=False)
    assert model is not None
    model.model.metadata_props.update({k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()})
    with written_aside(out) as aside:
        model.save(aside)
    return f"ONNX of {len(about['classes'])} classes in {out}: {about['input']} -> {about['output']}"


def _program(workspace: Workspace, name: str) -> tuple[ExportedProgram, dict[str, Any]]:
    """The network with its preprocessing, for images of any size, and what it says of itself."""
    trained = open_trained_segmenter(workspace.run(name, create=False).path)
    backbone = trained.config.segmenter.backbone
    network = load_trained(build_segmenter(trained.config.segmenter, len(trained.classes)), trained.weights)
    with_pixels = _WithPixels(network, normalization_of(backbone)).eval()
    image = torch.zeros(96, 129, 3, dtype=torch.uint8)  # two sizes that nothing in a network is likely to have
    sides = {0: Dim("height", min=LEAST_SIDE, max=MOST_SIDE), 1: Dim("width", min=LEAST_SIDE, max=MOST_SIDE)}
    try:
        with torch.no_grad():
            program = torch.export.export(with_pixels, (image,), dynamic_shapes=(sides,), strict=False)
    except (RuntimeError, AssertionError, ValueError) as error:  # torch's errors of what depends on a size
        raise UserError(
            f"the backbone {backbone} cannot be exported for images of any size ({str(error)[:200]})",
            "a network whose computing does not depend on the size of its image",
            "train another segmenter.backbone, or predict by `mcis predict`",
        ) from None
    return program, {
        "input": f"RGB (H, W, 3) uint8, sides of {LEAST_SIDE} to {MOST_SIDE} pixels",
        "output": "probabilities (K + 1, H, W) float32: background, then `classes`",
        "classes": list(trained.classes),
        "trained at": f"images of up to {trained.max_side} pixels a side",
    }


def export_pretrained(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the network as `Predictor.save_pretrained` does; returns what it wrote, in words."""
    write_pretrained(open_trained_segmenter(workspace.run(name, create=False).path), out)
    return f"network and model card in {out}: mcis predict IMAGES --model {out}, or publish it by `hf upload`"
