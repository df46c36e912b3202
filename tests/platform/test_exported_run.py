"""Exports of a run of the whole pipeline."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.tables.shards import Shards
from mcis.platform.reporting.export import export
from mcis.platform.runs.files import read_table


@pytest.fixture(scope="module")
def out(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the exported maps, masks and predictions of a run."""
    folder = tmp_path_factory.mktemp("out")
    workspace = small.first.context.workspace
    for part in ("maps", "masks", "predictions"):
        export(workspace, "first", part, folder / part)
    return folder


def train_rows(small: Any) -> dict[str, dict[str, Any]]:
    index = read_table(small.first.context.stage_outputs["index"] / "index.parquet").to_pylist()
    return {row["image_id"]: row for row in index if row["split"] == "train"}


def test_an_export_says_how_much_it_wrote(small: Any, tmp_path: Path) -> None:
    workspace = small.first.context.workspace
    texts = [export(workspace, "first", part, tmp_path / part) for part in ("maps", "masks", "predictions")]
    num_maps = sum(len(row["tags"]) for row in train_rows(small).values())
    assert [text.split(" ")[0] for text in texts] == [str(num_maps), "24", "6"]


def test_maps_have_the_size_of_their_image(small: Any, out: Path) -> None:
    row = train_rows(small)["train_000000"]
    classes = [small.first.context.classes[tag] for tag in row["tags"]]
    files = list((out / "maps" / "train_000000").iterdir())
    assert {path.name for path in files} == {f"{name}{end}" for name in classes for end in (".png", ".overlay.jpg")}
    assert {Image.open(path).size for path in files} == {(row["width"], row["height"])}
    assert {Image.open(path).mode for path in files if path.suffix == ".png"} == {"L"}


def test_masks_are_those_of_the_stage(small: Any, out: Path) -> None:
    mask = Shards(small.first.context.stage_outputs["pseudo_masks"] / "masks").rows("train_000003")
    masks = out / "masks" / "VOCdevkit" / "VOC2012" / "SegmentationClass"
    assert (masks / "train_000003.png").read_bytes() == mask["mask"][0].as_py()
    assert (out / "predictions" / "labels.csv").read_text() == (out / "masks" / "labels.csv").read_text()


def test_unknown_parts_and_unfinished_runs_are_refused(small: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="export pictures"):
        export(small.workspace, "first", "pictures", tmp_path)
    small.run("short", until="index")
    with pytest.raises(UserError, match="has no masks: it has reached index"):
        export(small.workspace, "short", "masks", tmp_path)
