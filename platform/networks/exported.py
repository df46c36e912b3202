"""Exports the trained segmentation network of a run for torch or for a runtime of ONNX, without this package."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mcis.datasets.errors import UserError
from mcis.models.backbones import Normalization, to_float_images
from mcis.models.registry import backbone_normalization
from mcis.platform.networks.build import build_segmenter, load_trained
from mcis.platform.networks.hub import write_pretrained
from mcis.platform.networks.trained_segmenter import open_trained_segmenter
from mcis.platform.runs.files import atomic_write
from mcis.platform.runs.workspace import Workspace

ABOUT = "about.json"
"""The file inside the exported program that describes its input and output."""
MIN_SIDE = 33
"""Shortest side of images that an exported network accepts, pixels. At 32, ConvNeXt has a single column to pool."""
MAX_SIDE = 4096
"""Longest side of images that an exported network accepts, pixels."""


class _WithPixels(nn.Module):
    """Maps the pixels of one image of any size to label probabilities, at a single scale."""

    def __init__(self, network: nn.Module, normalize: Normalization):
        super().__init__()
        self.network = network
        self.normalize = normalize

    def forward(self, image: Tensor) -> Tensor:
        """Returns the probabilities (K + 1, H, W) of an image, RGB (H, W, 3) uint8."""
        return torch.softmax(self.network(self.normalize(to_float_images(image[None]))), dim=1)[0]


def export_network(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the network of a run with its preprocessing, for a single scale and without the CRF.

        extra = {"about.json": ""}
        network = torch.export.load("network.pt2", extra_files=extra).module()
        labels = network(image).argmax(0)  # (H, W, 3) uint8 -> (H, W)

    Returns:
        A sentence that says what was written.

    Raises:
        UserError: The run has trained no segmenter, or its backbone cannot be exported for images of any size.
    """
    program, about = _program(workspace, name)
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about, indent=2)})
    with atomic_write(out) as aside:
        aside.write_bytes(content.getbuffer())
    return f"network of {len(about['classes'])} classes in {out}: {about['input']} -> {about['output']}"


def export_onnx(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the same network as an ONNX model, with the content of `about.json` in its metadata.

    Returns:
        A sentence that says what was written.

    Raises:
        UserError: See `export_network`; or a package that writes ONNX is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        remedy = "pip install -c constraints.txt -e '.[onnx]' in the clone of mcis"
        raise UserError(str(error), "the packages that write ONNX", remedy) from None

    program, about = _program(workspace, name)
    model = torch.onnx.export(
        program, input_names=["image"], output_names=["probabilities"], dynamo=True, verbose=False
    )
    assert model is not None
    for key, value in about.items():
        model.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)

    with atomic_write(out) as aside:
        model.save(aside)
    return f"ONNX of {len(about['classes'])} classes in {out}: {about['input']} -> {about['output']}"


def export_pretrained(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the network of a run as `Predictor.save_pretrained` does. Returns a sentence that says what was written.

    Raises:
        UserError: The run has trained no segmenter.
    """
    write_pretrained(open_trained_segmenter(workspace.run(name, create=False).path), out)
    command = f"mcis predict IMAGES --model {shlex.quote(str(out))}"
    return f"network and model card in {out}: {command}, or publish it by `hf upload`"


def _program(workspace: Workspace, name: str) -> tuple[ExportedProgram, dict[str, Any]]:
    """Returns the network with its preprocessing, for images of any size, and its description."""
    trained = open_trained_segmenter(workspace.run(name, create=False).path)
    backbone = trained.config.segmenter.backbone
    network = load_trained(build_segmenter(trained.config.segmenter, len(trained.classes)), trained.weights)
    with_pixels = _WithPixels(network, backbone_normalization(backbone)).eval()

    image = torch.zeros(96, 129, 3, dtype=torch.uint8)  # two sizes that no layer of a network is likely to have
    sides = {0: Dim("height", min=MIN_SIDE, max=MAX_SIDE), 1: Dim("width", min=MIN_SIDE, max=MAX_SIDE)}
    try:
        with torch.no_grad():
            program = torch.export.export(with_pixels, (image,), dynamic_shapes=(sides,), strict=False)
    except (RuntimeError, AssertionError, ValueError) as error:  # torch's errors if code depends on the size
        raise UserError(
            f"the backbone {backbone} cannot be exported for images of any size ({str(error)[:200]})",
            "a network whose code does not depend on the size of its image",
            "train another segmenter.backbone, or predict by `mcis predict`",
        ) from None

    about = {
        "input": f"RGB (H, W, 3) uint8, sides of {MIN_SIDE} to {MAX_SIDE} pixels",
        "output": "probabilities (K + 1, H, W) float32: background, then `classes`",
        "classes": list(trained.classes),
        "trained at": f"images of up to {trained.max_side} pixels a side",
    }
    return program, about
