"""Writes and reads files of weights: tensors and plain values only, with a description of the network."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from mcis.datasets.errors import BadFile, UserError, recompute_command
from mcis.datasets.storage.folders import read_file
from mcis.platform.runs.files import atomic_write

WEIGHTS = "weights.pt"
"""The file of weights in the output of a training stage."""
SAFETENSORS = "model.safetensors"
"""The file of weights in a folder in the layout of the Hugging Face hub."""


def weights_in(folder: Path) -> Path:
    """Returns the file of weights in a folder of either layout."""
    file = folder / SAFETENSORS
    return file if file.is_file() else folder / WEIGHTS


def save_weights(model: nn.Module, path: Path, about: Mapping[str, Any]) -> None:
    """Writes the weights of a network and `about`, a description of it in plain values."""
    save({"state_dict": model.state_dict(), "about": dict(about)}, path)


def load_weights(model: nn.Module, path: Path, *, assign: bool = False) -> dict[str, Any]:
    """Loads a file of weights into a network.

    Args:
        assign: Whether the tensors of the file replace those of the network, instead of being copied into them.

    Returns:
        The description `about` in the file, empty for a bare state_dict.

    Raises:
        BadFile: The file is absent, damaged or of another configuration.
        UserError: The file cannot be read at present.
    """
    expected = "weights of the same networks"
    remedy = f"name another file, or, of a run's own weights, repeat the training: {recompute_command()}"
    try:
        content = read_file(path, load_tensors, expected, remedy)
        is_bare = "state_dict" not in content
        model.load_state_dict(content if is_bare else content["state_dict"], assign=assign)
        return {} if is_bare else dict(content["about"])
    except Exception as error:  # a damaged file makes the unpickler raise errors of many types
        if isinstance(error, UserError) and not isinstance(error, BadFile):
            raise
        why = str(error)[:300] if isinstance(error, RuntimeError) else "it is damaged, or no file of tensors only"
        raise BadFile(f"{path} does not fit this configuration: {why}", expected, remedy) from None


def load_tensors(path: Path, device: torch.device | str = "cpu") -> Any:
    """Reads what `save` wrote, or a file of safetensors. Errors of the disk are raised as OSError."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with path.open("rb") as file:  # torch would report errors of the disk in its own way
        return torch.load(file, map_location=device, weights_only=True)


def save(state: Any, path: Path) -> None:
    """Writes tensors and plain values, aside and renamed."""
    content = io.BytesIO()  # torch reports a full disk in its own way, writing bytes raises OSError
    torch.save(state, content)
    with atomic_write(path) as aside:
        aside.write_bytes(content.getbuffer())
