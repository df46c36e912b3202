"""Source and recipe of the LID challenge: lists with masks of split val only, and its networks on few small images."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcis.datasets.errors import UserError
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit as synthetic
from mcis.models.registry import BACKBONES
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_classifier, build_segmenter, freeze
from mcis.platform.runs.files import read_table
from mcis.platform.runs.results import MasksResult, StageResult
from mcis.platform.runs.workspace import Workspace

TINY = (
    "pseudo_masks.min_foreground_fraction=0",
    "pseudo_masks.crf.iterations=1",
    "report.panels=4",
    "compute.shard_rows=16",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
SHRUNK = (
    "compute.gpu=false",
    "classifier.input_size=64",
    "classifier.epoch_pairs=4",
    "classifier.batch=2",
    "classifier.epochs=1",
    "affinity_net.crop=64",
    "affinity_net.batch=2",
    "affinity_net.min_steps=2",
    "segmenter.crop=65",
    "segmenter.batch=2",
    "segmenter.min_steps=2",
)
"""Values that make recipe `lid` small: image size, steps, no GPU."""


def draw_challenge(root: Path, *, train: int, val: int, classes: int = 3) -> dict[str, str]:
    """Draws a data set in the layout of the challenge, with masks of val; returns its configuration values."""
    devkit, lid = root / "VOC2012", root / "lid"
    synthetic.draw(devkit, train=train, val=val, size=64, classes=classes)
    (lid / "images").mkdir(parents=True)
    (lid / "masks" / "images").mkdir(parents=True)
    lines: dict[str, list[str]] = {"train": [], "val": []}
    for row in list_voc(devkit, classes=devkit / "classes.txt").table.to_pylist():
        shutil.copy(row["uri"], lid / "images")
        lines[row["split"]].append(" ".join([f"images/{row['image_id']}.jpg", *map(str, row["tags"])]))
        if row["split"] == "val":
            shutil.copy(row["mask_uri"], lid / "masks" / "images")
    for split, listed in lines.items():
        (lid / f"{split}.txt").write_text("\n".join(listed) + "\n")
    shutil.copy(devkit / "classes.txt", lid)
    return {"data.lid.root": str(lid), "data.lid.truth_masks": "masks"}


def run(recipe: str | None, folder: Path, options: dict[str, str], *overrides: str) -> Any:
    resolved = resolve("lid", recipe, options, [*TINY, *overrides])
    return pipeline.run(resolved, Workspace(folder), "run")


@pytest.mark.slow
def test_the_recipe_runs_from_lists_to_scores(ray_local: None, tmp_path: Path) -> None:
    """ResNet-38 with equivariant attention and DeepLab-V3 on ResNet-101, both from files of weights."""
    options = draw_challenge(tmp_path, train=10, val=4)
    torch.manual_seed(0)
    for key, backbone in (("classifier", "resnet38"), ("segmenter", "resnet101")):
        options[f"weights.{key}_backbone"] = str(tmp_path / f"{backbone}.pth")
        torch.save(BACKBONES[backbone]().body.state_dict(), options[f"weights.{key}_backbone"])
    result = run(None, tmp_path / "workspace", options, *SHRUNK)
    steps = (result.context.stage_outputs["train_classifier"] / "steps.jsonl").read_text()
    assert {f'"{term}"' for term in ("basic", "co_attention", "contrastive", "equivariant", "cross")} <= set(
        part.strip(" {") for line in steps.splitlines() for pair in line.split(",") for part in pair.split(":")[:1]
    )
    assert result.context.result("train_classifier", StageResult).counts["steps"] == 2
    assert result.context.result("train_affinity", StageResult).counts["steps"] == 2
    assert result.context.result("pseudo_masks", MasksResult).background_cue == "affinity"
    folder = result.context.stage_outputs["localize"]
    maps = read_table(folder / "maps")
    assert maps.equals(read_table(folder / "single"))
    values = np.array(maps["map"].to_pylist())
    assert values.shape[1] == 8 * 8
    assert 0 <= values.min() < values.max() <= 1
    assert not list(folder.glob("*.npy"))
    scored = [(s.output, s.name, s.images) for s in result.scores]
    assert scored == [("segmentation", "plain", 4), ("segmentation", "with CRF", 4)]
    assert all(np.isfinite(s.miou) for s in result.scores)


def test_the_networks_of_the_recipe_are_those_of_section_4_4() -> None:
    config = resolve("lid").config
    with torch.device("meta"):
        classifier, segmenter = build_classifier(config.classifier, 200).eval(), build_segmenter(config.segmenter, 200)
        freeze(classifier, config.classifier)
        features = classifier.features(torch.zeros(1, 3, 448, 448))
        logits = segmenter.eval()(torch.zeros(1, 3, 321, 321))
    assert features.shape == (1, 4096, 56, 56)
    assert logits.shape == (1, 201, 321, 321)
    shapes = {name: tuple(p.shape) for name, p in classifier.named_parameters() if not name.startswith("backbone")}
    assert shapes == {
        "phi.weight": (200, 4096, 1, 1),
        "phi.bias": (200,),
        "w_p": (4096, 4096),
        "w_b.weight": (1, 4096, 1, 1),
        "correlation.f8_3.weight": (64, 512, 1, 1),
        "correlation.f8_4.weight": (128, 1024, 1, 1),
        "correlation.f9.weight": (192, 195, 1, 1),
    }
    frozen = {name.split(".")[2] for name, p in classifier.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1a", "b2", "b2_1", "b2_2"}, "as in the public code"


def test_missing_weights_that_cannot_be_downloaded_are_reported_before_the_run(tmp_path: Path) -> None:
    resolved = resolve("lid", options=draw_challenge(tmp_path, train=4, val=1))
    with pytest.raises(UserError, match="no pretrained weights of the backbone resnet38 to download") as raised:
        pipeline.check(resolved.config, Workspace(tmp_path / "workspace"), "run")
    assert "weights.classifier_backbone=PATH" in raised.value.remedy
