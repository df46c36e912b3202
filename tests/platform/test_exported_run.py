"""What is exported of a run of the whole pipeline."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.tables.shards import Shards
from mcis.platform.reporting.export import export
from mcis.platform.runs.files import read_table


def test_maps_and_predictions_of_a_run_are_exported(small: Any, tmp_path: Path) -> None:
    context = small.first.context
    index = read_table(context.inputs["index"] / "index.parquet").to_pylist()
    rows = {row["image_id"]: row for row in index if row["split"] == "train"}
    said = [export(small.workspace, "first", what, tmp_path / what) for what in ("maps", "masks", "predictions")]
    assert [text.split(" ")[0] for text in said] == [str(sum(len(row["tags"]) for row in rows.values())), "24", "6"]
    row = rows["train_000000"]
    files = {f"{context.classes[tag]}{end}" for tag in row["tags"] for end in (".png", ".overlay.jpg")}
    folder = tmp_path / "maps" / "train_000000"
    assert {path.name for path in folder.iterdir()} == files
    assert {Image.open(path).size for path in folder.iterdir()} == {(row["width"], row["height"])}
    assert {Image.open(path).mode for path in folder.glob("*.png")} == {"L"}
    mask = Shards(context.inputs["pseudo_masks"] / "masks").rows("train_000003")
    masks = tmp_path / "masks" / "VOCdevkit" / "VOC2012" / "SegmentationClass"
    assert (masks / "train_000003.png").read_bytes() == mask["mask"][0].as_py()
    assert (tmp_path / "predictions" / "labels.csv").read_text() == (tmp_path / "masks" / "labels.csv").read_text()
    with pytest.raises(UserError, match="export pictures"):
        export(small.workspace, "first", "pictures", tmp_path)
    small.run("short", until="index")
    with pytest.raises(UserError, match="has no masks: it has come to index"):
        export(small.workspace, "short", "masks", tmp_path)
