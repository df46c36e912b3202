"""Files of a training: weights that do not fit are named, and the log of its steps is cut back to the checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.platform.engine.step_log import STEPS, StepLog
from mcis.platform.networks.weights_files import WEIGHTS, load_weights


class _Head(nn.Module):
    """Weights to save and load: a layer and a free matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 2, 1)
        self.w_p = nn.Parameter(torch.eye(4))


class _Program:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("content", ["none", "garbage", "cut", "other network", "other shape", "program"])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / WEIGHTS
    if content == "program":
        torch.save({"w_p": _Program(tmp_path / "ran")}, path)
    elif content == "other network":
        torch.save(nn.Linear(2, 2).state_dict(), path)
    elif content == "other shape":
        torch.save({**_Head().state_dict(), "w_p": torch.zeros(5, 5)}, path)
    elif content != "none":
        torch.save(_Head().state_dict(), path)
        path.write_bytes(b"PK garbage" if content == "garbage" else path.read_bytes()[:500])
    with pytest.raises(UserError, match=rf"{WEIGHTS} does not fit this configuration") as caught:
        load_weights(_Head(), path)
    assert "--from" in caught.value.remedy
    assert not (tmp_path / "ran").exists()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_step_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / STEPS
    log = StepLog(path, 0)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": step / 7})
    log.flush()
    before = path.read_text().splitlines()
    again = StepLog(path, 20)
    assert path.read_text().splitlines() == before[:2]
    again.write({"step": 30, "loss": 0.0})
    again.flush()
    assert steps_of(path) == [10, 20, 30]
    StepLog(path, 0)
    assert path.read_text() == ""
