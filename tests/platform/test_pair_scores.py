"""Scores of pairs as the classifier gives them, kinds of pairs included."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.backbone_outputs import COLUMN, Features
from mcis.datasets.tables.memory_mapped import cache_table
from mcis.models.backbones import IMAGENET, to_unit
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import WEIGHTS, save_weights
from mcis.platform.networks.pair_scores import PAIR_SCORES_SCHEMA, ScorePairs
from mcis.platform.runs.files import write_table


@pytest.mark.parametrize("kinds", [1, 3])
def test_scores_are_the_classifiers(tmp_path: Path, kinds: int) -> None:
    rng = np.random.default_rng(0)
    uris = [str(tmp_path / f"{n}.png") for n in range(3)]
    for uri in uris:
        Image.fromarray(rng.integers(0, 256, (40, 56, 3), np.uint8)).save(uri)
    torch.manual_seed(0)
    config = ClassifierConfig.model_validate({"backbone": "small", "channels": 6, "input_size": 32, "kinds": kinds})
    model = build_classifier(config, 4).eval()
    save_weights(model, tmp_path / WEIGHTS, {})
    m = np.tile(np.arange(3), 2)  # more pairs than pass through the network at a time
    kind = np.tile(np.array([0, 2, 1], np.uint8), 2) if kinds == 3 else np.zeros(6, np.uint8)
    rows = pa.table({"m": m, "n": (m + 1) % 3, "kind": kind})
    got = ScorePairs(config, tmp_path, 4, False, uris)(rows)
    assert got.schema.equals(PAIR_SCORES_SCHEMA)
    with torch.inference_mode():
        images = IMAGENET(to_unit(torch.from_numpy(np.stack([read_rgb(uri, 32) for uri in uris]))))
        outputs = model.backbone(images)
        expected = model.pair_scores(outputs[m], outputs[(m + 1) % 3], torch.from_numpy(kind).long())
    for name in PAIR_SCORES_SCHEMA.names:
        np.testing.assert_allclose(np.array(got[name].to_pylist()), getattr(expected, name).numpy(), atol=1e-5)

    kept = torch.stack([outputs, torch.zeros_like(outputs)], dim=1).half()  # mirror images have no part in it
    write_table(tmp_path / "kept" / "part-00000000-00000003.arrow", cache_table(COLUMN, kept.numpy()))
    features = Features(uris, tmp_path / "kept", tuple(outputs.shape[1:]))
    of_kept = ScorePairs(config, tmp_path, 4, False, features)(rows)
    for name in PAIR_SCORES_SCHEMA.names:
        np.testing.assert_allclose(np.array(of_kept[name].to_pylist()), np.array(got[name].to_pylist()), atol=0.01)
