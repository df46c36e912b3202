"""Configurations of studies and searches over a few drawn images."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import Resolved, resolve

TINY = (
    "classifier.channels=24", "classifier.input_size=64", "classifier.batch=8", "segmenter.channels=24",
    "pseudo_masks.smallest=0", "report.panels=2", "compute.threads=1", "compute.stop_if_nothing_is_learnt=false",
)  # fmt: skip


@pytest.fixture
def small_voc(tmp_path: Path) -> Callable[..., Resolved]:
    """Draws a devkit; its configuration by the recipe `small`, with networks as small as they go."""

    def build(*assignments: str, train: int = 16, val: int = 4, classes: int = 2, epochs: int = 1) -> Resolved:
        root = tmp_path / "VOC2012"
        synthetic.draw(root, train=train, val=val, size=64, classes=classes)
        options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
        return resolve("voc", "small", options, (*TINY, f"classifier.epochs={epochs}", *assignments))

    return build
