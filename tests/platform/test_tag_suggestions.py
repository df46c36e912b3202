"""`mcis suggest --tags`, the images that it leaves out, and near-duplicates on the page of an index."""

import csv
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import api
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.index_page import browse_page
from mcis.platform.reporting.near_duplicates import NearDuplicate, NearDuplicates, near_duplicates
from mcis.platform.reporting.tag_suggestions import RankedTags, write_tag_suggestions
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.workspace import Workspace

QUICK = {
    "classifier.input_size": 96,
    "classifier.min_steps": 60,
    "classifier.epochs": 4,
    "localize.related": 2,
    "compute.stop_if_not_learning": False,
}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_local")
def test_a_wrong_tag_is_listed_and_can_be_left_out(tmp_path: Path) -> None:
    """Trains on scenes and on single-label images of two classes, one of which has the wrong tag."""
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=40, val=8, size=96, classes=2)
    listed = list_voc(root, classes=root / "classes.txt")
    single = tmp_path / "single"
    names = listed.classes
    rows = [row for row in listed.table.to_pylist() if row["split"] == "train" and len(row["tags"]) == 1][:12]
    for number, row in enumerate(rows):
        folder = single / names[row["tags"][0] if number else 1 - row["tags"][0]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(Path(row["uri"]).read_bytes() + b" ")  # no exact copy
    overrides = {**QUICK, "data.classes": str(root / "classes.txt")}
    workspace = tmp_path / "workspace"
    api.run(
        "voc+single",
        name="one",
        recipe="photos_fast",
        workspace=workspace,
        until="localize",
        overrides=overrides,
        voc=root,
        single=single,
    )

    words = ["suggest", "--tags", "--name", "one", "--out", str(tmp_path / "out"), "--rank", "0.05"]
    done = CliRunner().invoke(app, [*words, "--workspace", str(workspace)])
    assert done.exit_code == 0, done.output
    with (tmp_path / "out/doubtful_tags.csv").open() as file:
        doubtful = list(csv.DictReader(file))
    assert len(doubtful) < 6
    assert doubtful[0]["image"].endswith("/0.jpg")
    assert doubtful[0]["tag"] == names[1 - rows[0]["tags"][0]]
    assert doubtful[0]["most likely class"] == names[rows[0]["tags"][0]]
    assert doubtful[0]["image"] in (tmp_path / "out/doubtful_tags.html").read_text()

    left_out = overrides | {"data.leave_out": str(tmp_path / "out/leave_out.txt")}
    options = {"data.voc": str(root), "data.single.root": str(single)}
    without = list_images(resolve("voc+single", "photos_fast", options, left_out).config)
    assert len(without.table) == 48 + 12 - len(doubtful)

    found = near_duplicates(Workspace(workspace), "one")
    assert found is not None
    assert {pair.first.rpartition("/")[2] for pair in found.pairs} >= {f"{number}.jpg" for number in range(12)}
    assert all(0.95 <= pair.similarity <= 1 for pair in found.pairs)


def photos(folder: Path) -> Path:
    for number in range(4):
        Image.fromarray(np.full((40, 40, 3), number * 9, np.uint8)).save(folder / f"{number}.png")
    (folder / "t.csv").write_text("image,tags,split\n0.png,a,train\n1.png,b,train\n2.png,a,val\n3.png,b,train\n")
    return folder / "t.csv"


def test_listed_images_leave_train(tmp_path: Path) -> None:
    options = {"data.tags.table": str(photos(tmp_path))}
    file = tmp_path / "ids.txt"
    file.write_text("1.png\n2.png\nother.png\n")
    listed = list_images(resolve("tags", "scratch", options, {"data.leave_out": str(file)}).config)
    assert listed.table["image_id"].to_pylist() == ["0.png", "2.png", "3.png"]  # an image of val stays
    assert f"left out 1 training images that {file} names; 2 further ids are no training images" in listed.notes

    file.write_text("other.png\n")
    with pytest.raises(UserError, match=r"none of the 1 ids in .* is a training image"):
        list_images(resolve("tags", "scratch", options, {"data.leave_out": str(file)}).config)


def test_without_doubtful_tags_no_image_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"image_id": ["a", "b"], "domain": ["target"] * 2, "uri": ["a.jpg", "b.jpg"]})
    ranked = RankedTags(rows, np.array([[0.1, np.nan], [np.nan, 0.2]]), np.array([0, 1]), ("cat", "dog"))
    monkeypatch.setattr("mcis.platform.reporting.tag_suggestions.rank_tags", lambda *_: ranked)
    index = SimpleNamespace(value_range=None)
    monkeypatch.setattr("mcis.platform.reporting.tag_suggestions.open_index", lambda *_: index)
    (tmp_path / "leave_out.txt").write_text("of an earlier call\n")
    text = write_tag_suggestions(Workspace(tmp_path / "w"), "run", tmp_path, min_rank=0.25, count=5)
    assert text.startswith("0 of 2 tags are doubtful")
    assert "leave_out" not in text
    assert not (tmp_path / "leave_out.txt").exists()


def test_a_run_without_a_classifier_ranks_no_tags(tmp_path: Path) -> None:
    Workspace(tmp_path)
    words = ["suggest", "--tags", "--name", "none", "--out", str(tmp_path / "out"), "--workspace", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "run 'none' has no trained classifier" in done.output


@pytest.mark.parametrize("options", [["--tags", "--format", "coco"], ["--tags", "--min-area", "50"], ["--rank", "0.1"]])
def test_options_that_would_have_no_effect_are_refused(tmp_path: Path, options: list[str]) -> None:
    words = ["suggest", *options, "--name", "none", "--out", str(tmp_path / "out"), "--workspace", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == 2


def test_the_page_lists_near_duplicates(tmp_path: Path) -> None:
    from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA

    pages = []
    found = (None, NearDuplicates(0, []), NearDuplicates(7, [NearDuplicate("a<b", "c", 0.97)]))
    for pairs in found:
        tables = (INDEX_SCHEMA.empty_table(), REJECTS_SCHEMA.empty_table())
        pages.append(browse_page(*tables, ("cat",), notes=(), title="t", near_duplicates=pairs))
    assert "similarity" not in pages[0]
    assert "No two training images have features" in pages[1]
    assert "a&lt;b" in pages[2]
    assert "0.970" in pages[2]
    assert "7 pairs of training images" in pages[2]
    assert "The 1 most similar pairs" in pages[2]
