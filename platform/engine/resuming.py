"""Checkpoints of a training: written while it runs, loaded when it starts again."""

import os
from pathlib import Path

import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.platform.networks.checkpoints import save

_FILE = "checkpoint.pt"


def write_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes all of a training's state: weights, the optimizer's buffers, and the number of updates done.

    The rest is a function of that number: the learning rate, the position in the stream (batch `step` comes next,
    whatever the number of workers), and what is random (drawn from seed and row).
    """
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    save(state, Path(folder) / _FILE)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Loads the last checkpoint, if there is one, into the network and its optimizer; returns the updates done.

    Args:
        folder: of the training, for messages.

    Raises:
        UserError: the checkpoint is damaged, or of another configuration.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if not checkpoint:
        return 0
    try:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, _FILE), map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except OSError:
        raise
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        raise UserError(
            f"the last checkpoint in {folder} does not fit this configuration: {str(error)[:300]}",
            "a checkpoint of the same network and optimizer",
            f"remove {folder} and repeat the command",
        ) from None
