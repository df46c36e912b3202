"""Files of weights: tensors and plain values alone, with what their reader has to know of the network."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from mcis.datasets.errors import BadFile, UserError
from mcis.datasets.storage.folders import read_file
from mcis.platform.runs.files import written_aside

WEIGHTS, SAFETENSORS = "weights.pt", "model.safetensors"
"""Files of weights: in the output of a stage, and as the Hugging Face hub names them."""


def weights_in(folder: Path) -> Path:
    """The file of weights in a folder of either kind."""
    return file if (file := folder / SAFETENSORS).is_file() else folder / WEIGHTS


def save_weights(model: nn.Module, path: Path, about: Mapping[str, Any]) -> None:
    """Writes a network's weights, with what its reader has to know of it."""
    save({"state_dict": model.state_dict(), "about": dict(about)}, path)


def load_weights(model: nn.Module, path: Path, *, assign: bool = False) -> dict[str, Any]:
    """Loads a file of weights into a network; with `assign` its tensors become the network's.

    Returns:
        What the file says of the network (`about`), empty for a bare state_dict.

    Raises:
        BadFile: the file is absent, damaged or of another configuration.
        UserError: it cannot be read at present.
    """
    expected, remedy = "weights of the same networks", "repeat the command with --from the training stage"
    try:
        content = read_file(path, load_tensors, expected, remedy)
        bare = "state_dict" not in content
        model.load_state_dict(content if bare else content["state_dict"], assign=assign)
        return {} if bare else dict(content["about"])
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        if isinstance(error, UserError) and not isinstance(error, BadFile):
            raise
        why = str(error)[:300] if isinstance(error, RuntimeError) else "it is damaged, or no file of tensors alone"
        raise BadFile(f"{path} does not fit this configuration: {why}", expected, remedy) from None


def load_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads what `save` wrote. Errors of the disk stay what they are, as Python reads the file."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with path.open("rb") as file:
        return torch.load(file, map_location=device, weights_only=True)


def save(state: Any, path: Path) -> None:
    """Writes tensors, aside and renamed."""
    content = io.BytesIO()  # torch reports a full disk in its own way, a file as the operating system does
    torch.save(state, content)
    with written_aside(path) as aside:
        aside.write_bytes(content.getbuffer())
