"""Features of a frozen backbone do not depend on how many images fit the memory at a time."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from mcis.models.pretrained import bundled_weights
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.features import MakeFeatures

LITE0 = "timm/tf_efficientnet_lite0"


def pictures(folder: Path, count: int) -> pa.Table:
    """Rows of pictures of noise."""
    rng = np.random.default_rng(0)
    uris = [str(folder / f"{number}.png") for number in range(count)]
    for uri in uris:
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(uri)
    hashes = [hashlib.sha256(Path(uri).read_bytes()).hexdigest() for uri in uris]
    return pa.table({"image_id": uris, "uri": uris, "content_hash": hashes})


def values(table: pa.Table) -> NDArray[np.float32]:
    return np.asarray(table["rows"].combine_chunks().flatten().to_numpy(), np.float32)


def test_a_batch_for_which_memory_runs_out_is_halved(tmp_path: Path) -> None:
    make = MakeFeatures(ClassifierConfig(backbone=LITE0, input_size=64), bundled_weights(LITE0), gpu=False, views=2)
    rows = pictures(tmp_path, 5)
    expected = values(make(rows))

    sizes: list[int] = []
    fitting = 4

    def run_out(backbone: nn.Module, inputs: tuple[Any, ...]) -> None:
        sizes.append(len(inputs[0]))
        if len(inputs[0]) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    make.backbone.register_forward_pre_hook(run_out)
    make.batch_size = 8
    np.testing.assert_allclose(values(make(rows)), expected, rtol=1e-2, atol=1e-2)
    assert sizes == [10, 8, 4, 4, 2], "with their flips"
    make(rows)
    assert sizes[5:] == [4, 4, 2]

    fitting = 1
    with pytest.raises(torch.OutOfMemoryError):
        make(rows)
    assert sizes[8:] == [4, 2]
