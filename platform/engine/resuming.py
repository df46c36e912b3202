"""The checkpoint of a training: one file, written while it runs, loaded when it starts again."""

import functools
import zipfile
from pathlib import Path

import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import path_exists, read_file, remove
from mcis.platform.networks.checkpoints import load_tensors, save

CHECKPOINT = "checkpoint.pt"


def write_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes all of a training's state, in the place of an earlier one: weights, the optimizer's buffers, updates done.

    The rest is a function of that number: the learning rate, the position in the stream (batch `step` comes next,
    whatever the number of workers), and what is random (drawn from seed and row).
    """
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / CHECKPOINT)


def drop_damaged(folder: Path) -> bool:
    """Removes a checkpoint that is cut or whose bytes changed, if there is one; True if it did.

    All of the file is read, as checksums of its parts lie in it.
    """
    file = folder / CHECKPOINT
    try:
        if read_file(file, _is_whole, "a checkpoint", f"remove {folder} and repeat the command"):
            return False
    except FileNotFoundError:
        return False
    remove(file)
    return True


def _is_whole(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as parts:
            return parts.testzip() is None
    except (OSError, MemoryError):
        raise
    except Exception:  # whatever a damaged file makes the reader raise
        return False


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Loads the last checkpoint, if there is one, into the network and its optimizer; returns the updates done.

    Args:
        folder: of the training.

    Raises:
        UserError: the checkpoint is of another configuration, or cannot be read at present.
        RuntimeError: a worker of the group found another checkpoint than this one.
    """
    done = 0
    expected, remedy = "a checkpoint of the same network and optimizer", f"remove {folder} and repeat the command"
    if path_exists(folder / CHECKPOINT):
        try:
            load = functools.partial(load_tensors, device=device)
            state = read_file(folder / CHECKPOINT, load, expected, remedy)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = int(state["step"])
        except (OSError, MemoryError, UserError):
            raise
        except Exception as error:  # whatever a damaged file makes the unpickler raise
            found = f"the last checkpoint in {folder} does not fit this configuration: {str(error)[:300]}"
            raise UserError(found, expected, remedy) from None
    if torch.distributed.is_initialized():
        # A worker of a group that was given up may write until it notices, so all make sure that they read the same.
        reached = torch.tensor([done, -done], device=device)
        torch.distributed.all_reduce(reached, torch.distributed.ReduceOp.MAX)
        if reached[0] != -reached[1]:
            raise RuntimeError(f"the workers read checkpoints of {-reached[1]} to {reached[0]} updates")
    return done
