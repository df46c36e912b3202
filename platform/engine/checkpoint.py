"""Writes and loads the checkpoint of a training, a single file."""

import functools
import zipfile
from pathlib import Path

import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import path_exists, read_file, remove
from mcis.platform.networks.weights_files import load_tensors, save

CHECKPOINT = "checkpoint.pt"
"""The file of the checkpoint in the folder of a training."""


def write_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes the state of a training: weights, the optimizer's buffers, and the number of steps. Replaces an older one.

    Everything else follows from the number of steps: the learning rate, the position in the stream (batch `step` is
    next, for any number of workers), and random numbers, which are functions of seed and row.
    """
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / CHECKPOINT)


def weights_bytes(model: nn.Module) -> int:
    """Returns about how many bytes the file of a network's weights takes. The network may be on the device `meta`."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def checkpoint_bytes(model: nn.Module) -> int:
    """Returns how many bytes a checkpoint takes at most: the weights, and two values of the optimizer for each
    parameter that is trained. The network may be on the device `meta`.
    """
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return weights_bytes(model) + 2 * trained


def remove_damaged(folder: Path) -> bool:
    """Removes a checkpoint that is cut or whose bytes changed. Returns whether there was one.

    It reads the whole file and compares the checksums in it.

    Raises:
        UserError: The checkpoint cannot be read at present.
    """
    file = folder / CHECKPOINT
    try:
        is_sound = read_file(file, _is_sound, "a checkpoint", f"remove {folder} and repeat the command")
    except FileNotFoundError:
        return False
    if is_sound:
        return False
    remove(file)
    return True


def _is_sound(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, MemoryError):
        raise
    except Exception:  # a damaged file makes the reader raise errors of many types
        return False


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Loads the last checkpoint, if there is one, into a network and its optimizer.

    Args:
        folder: The folder of the training.
        device: The device of the network.

    Returns:
        The number of steps in the checkpoint; 0 without one.

    Raises:
        UserError: The checkpoint is of another configuration, or cannot be read at present.
        RuntimeError: The workers read different checkpoints.
    """
    step = 0
    if path_exists(folder / CHECKPOINT):
        step = _load(folder, model, optimizer, device)
    if torch.distributed.is_initialized():
        _check_same_step(step, device)
    return step


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    expected = "a checkpoint of the same network and optimizer"
    remedy = f"remove {folder} and repeat the command"
    try:
        load = functools.partial(load_tensors, device=device)
        state = read_file(folder / CHECKPOINT, load, expected, remedy)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:  # a damaged file makes the unpickler raise errors of many types
        found = f"the last checkpoint in {folder} does not fit this configuration: {str(error)[:300]}"
        raise UserError(found, expected, remedy) from None


def _check_same_step(step: int, device: torch.device) -> None:
    """Raises RuntimeError unless all workers read a checkpoint of the same step.

    A worker of an earlier group may write another checkpoint before it notices that the group was given up.
    """
    extremes = torch.tensor([step, -step], device=device)
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
    last, first = extremes[0], -extremes[1]
    if first != last:
        raise RuntimeError(f"the workers read checkpoints of {first} to {last} steps")
