"""Array files (.npy) of a round's features, memory-mapped by all workers and written by each of them in parts."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier
from mcis.platform.runs.workspace import disk_errors


def feature_shape(config: Config, weights: Path, classes: int) -> tuple[int, int, int]:
    """(D, H, W) of an image's embedding.

    Args:
        weights: folder of the trained classifier of `classes` classes.
    """
    size = config.classifier.input_size
    with torch.inference_mode():
        model = load_classifier(config.classifier, weights, classes)
        d, h, w = model.embed(torch.zeros(1, 3, size, size)).shape[1:]
    return d, h, w


def create_file(path: Path, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> None:
    """Creates an array file of zeros and reserves all its space on the disk."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}")
        np.lib.format.open_memmap(aside, mode="w+", dtype=dtype, shape=shape).flush()
        with aside.open("r+b") as file:  # a full disk shows here, not as a fault in some worker's memory
            os.posix_fallocate(file.fileno(), 0, aside.stat().st_size)
        aside.rename(path)


def write_rows(path: Path, first: int, values: NDArray[Any]) -> None:
    """Writes rows `first`, `first + 1`, ... of an array file, through to its disk.

    The rows are written as bytes rather than through a memory map, whose pages would also write back rows of workers
    on other nodes. They reach the disk before the shard exists that says they are there.
    """
    with path.open("r+b") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        file.seek(first * values[0].nbytes, os.SEEK_CUR)
        file.write(np.ascontiguousarray(values).tobytes())
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path, rows: int | list[int]) -> NDArray[np.float32]:
    """Rows of an array file, as float32.

    The file is opened in each call: a process that held it open would keep its space on the disk after its removal.
    """
    return np.load(path, mmap_mode="r")[rows].astype(np.float32)
