"""What is made of images that are read smaller: predictions of their files' size, pseudo masks of the smaller one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mcis.datasets.decode import decode_labels
from mcis.datasets.grids import pixels
from mcis.platform.config.resolve import resolve
from mcis.platform.networks import predictor
from mcis.platform.stages import predict, pseudo_masks


class Halves(nn.Module):
    """A segmenter of two labels that says 1 on the left half of its image; keeps the sizes that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(tuple(images.shape[2:]))
        left = torch.zeros(len(images), *images.shape[2:])
        left[..., : images.shape[3] // 2] = 9
        return torch.stack([torch.full_like(left, 4.0), left], dim=1)


@pytest.fixture
def rows(tmp_path: Path) -> pa.Table:
    Image.new("RGB", (80, 60), (200, 10, 10)).save(tmp_path / "a.png")
    saliency = np.zeros((60, 80), np.uint8)
    saliency[:, :40] = 255
    Image.fromarray(saliency).save(tmp_path / "saliency.png")
    row = {"image_id": "a", "uri": str(tmp_path / "a.png"), "height": 60, "width": 80, "tags": [0]}
    return pa.Table.from_pylist([row | {"saliency_uri": str(tmp_path / "saliency.png")}])


@pytest.mark.parametrize(("max_side", "seen"), [(None, (60, 80)), (40, (30, 40)), (80, (60, 80))])
def test_labels_come_back_at_the_files_size(
    rows: pa.Table, monkeypatch: pytest.MonkeyPatch, max_side: int | None, seen: tuple[int, int]
) -> None:
    model = Halves()
    monkeypatch.setattr(predictor, "load_segmenter", lambda *given: model)
    config = resolve("voc", "small", assignments=[f"data.max_side={max_side or 'null'}", "predict.mirror=false"]).config
    (row,) = predictor.Predictor(config, Path("none"), 1, gpu=False)(rows).to_pylist()
    assert model.seen == [seen]
    for column in ("plain", "crf"):
        labels = decode_labels(row[column])
        assert labels.shape == (60, 80)
        assert (labels[:, :40] == 1).all()
        assert (labels[:, 40:] == 0).all()


@pytest.mark.parametrize("background", ["saliency", "crf"])
def test_pseudo_masks_have_the_size_at_which_their_images_are_read(rows: pa.Table, background: str) -> None:
    assignments = ["data.max_side=40", f"pseudo_masks.background={background}", "pseudo_masks.crf.iterations=1"]
    config = resolve("voc", "small", assignments=assignments).config
    maps = np.zeros((1, 6, 8), np.float32)
    maps[..., :4] = 1000
    of_image = SimpleNamespace(maps=maps, grids=(pixels(6), pixels(8)), classes=np.array([0]))
    shards: Any = SimpleNamespace(maps=lambda image_id: of_image)
    (row,) = pseudo_masks.MakeMasks(config, shards, None, False)(rows).to_pylist()
    labels = decode_labels(row["labels"])
    assert labels.shape == (30, 40)
    assert (labels[:, :16] == 1).all()
    assert (labels[:, 24:] == 0).all()


def test_stages_depend_on_the_size_alone_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pseudo_masks, "split_rows", lambda *given, **named: pa.table({"saliency_uri": []}))
    context: Any = None
    for stage in (predict, pseudo_masks):
        plain, smaller = (
            stage.inputs(resolve("voc", "small", assignments=[f"data.max_side={side}"]).config, context)
            for side in ("null", 40)
        )
        assert plain is None
        assert smaller is not None
