"""The trained segmentation network of a run -> a file that torch alone reads and runs (`torch.export`)."""

import io
import json
from pathlib import Path

import torch

from mcis.datasets.errors import UserError
from mcis.models.exported import LEAST_SIDE, MOST_SIDE, export
from mcis.models.networks import normalization_of
from mcis.platform.networks.predictor import trained_run
from mcis.platform.networks.segmenter import load_segmenter
from mcis.platform.runs.files import written_aside
from mcis.platform.runs.workspace import Workspace

ABOUT = "about.json"
"""The file inside of the exported one that says what goes in and what comes out."""


def export_network(workspace: Workspace, name: str, out: Path) -> str:
    """Writes the network with its preprocessing, at one scale and without the CRF; returns what it wrote, in words.

        extra = {"about.json": ""}
        network = torch.export.load("network.pt2", extra_files=extra).module()
        labels = network(image).argmax(0)  # (H, W, 3) uint8 -> (H, W)

    Raises:
        UserError: the run has trained no segmenter, or its backbone cannot be exported for images of any size.
    """
    trained = trained_run(workspace.run(name, create=False).path)
    backbone = trained.config.segmenter.backbone
    network = load_segmenter(trained.config.segmenter, trained.weights, len(trained.classes))
    try:
        program = export(network, normalization_of(backbone))
    except (RuntimeError, AssertionError, ValueError) as error:  # torch's errors of what depends on a size
        raise UserError(
            f"the backbone {backbone} cannot be exported for images of any size ({str(error)[:200]})",
            "a network whose computing does not depend on the size of its image",
            "train another segmenter.backbone, or predict by `mcis predict`",
        ) from None
    about = {
        "input": f"RGB (H, W, 3) uint8, sides of {LEAST_SIDE} to {MOST_SIDE} pixels",
        "output": "probabilities (K + 1, H, W) float32: background, then `classes`",
        "classes": list(trained.classes),
        "trained at": f"images of up to {trained.max_side} pixels a side",
    }
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about, indent=2)})
    with written_aside(out) as aside:
        aside.write_bytes(content.getbuffer())
    return f"network of {len(trained.classes)} classes in {out}: {about['input']} -> {about['output']}"
