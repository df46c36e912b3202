"""Features of a frozen backbone and their maps do not depend on how many images fit the memory or the cache."""

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

from mcis.datasets.tables.memory_mapped import Features
from mcis.models.pretrained import bundled_weights
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.features import MakeFeatures, features_shape
from mcis.platform.networks.pretrained import load_backbone
from mcis.platform.networks.weights_files import WEIGHTS, save_weights
from mcis.platform.outputs.relations import VECTORS
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.stages.localization.workers import Embed, embed_rows

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


@pytest.mark.parametrize("hflip", [False, True])
def test_maps_do_not_depend_on_which_images_are_cached(tmp_path: Path, hflip: bool) -> None:
    """Of five images in batches of two, the cache holds none, the first three, or all."""
    config = frozen_config(f"localize.hflip={str(hflip).lower()}")
    model = build_classifier(config.classifier, 3)
    load_backbone("classifier", model.backbone, bundled_weights(LITE0))
    save_weights(model, tmp_path / WEIGHTS, {})
    rows = pictures(tmp_path, 5)
    rows = rows.append_column("domain", pa.array(["target"] * 5)).append_column("tags", pa.array([[0, 2]] * 5))
    make = MakeFeatures(config.classifier, bundled_weights(LITE0), gpu=False, views=2)

    written = []
    for cached in (0, 3, 5):
        folder = tmp_path / f"cached-{cached}"
        features = None
        if cached:
            write_table(folder / f"part-00000000-{cached:08d}.arrow", make(rows.slice(0, cached)))
            features = Features(rows["uri"].to_pylist(), folder, features_shape(config.classifier))
        embedded = folder / "embedded"
        table = Embed(config, tmp_path, 3, features, embedded)(embed_rows(rows))
        vectors = read_table(embedded / VECTORS)["vector"]
        (shard,) = (embedded / "features").iterdir()
        written.append((table["map"].to_pylist(), vectors.to_pylist(), shard.read_bytes()))
    assert written[0] == written[2]
    assert written[1] == written[2]


def frozen_config(*overrides: str) -> Config:
    """A configuration whose classifier trains on the features of a small frozen backbone."""
    small = (f"classifier.backbone={LITE0}", "classifier.input_size=64", "localize.batch=2", "compute.gpu=false")
    config = resolve("voc", "photos", overrides=[*small, *overrides]).config
    assert config.classifier.trains_on_features
    return config
