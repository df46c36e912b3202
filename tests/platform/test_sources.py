"""Combinations of sources run through the pipeline, and the index opens only new images."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import sources_of
from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.files import read_table
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.results import IndexResult, MasksResult, PredictResult, StageResult
from mcis.platform.runs.workspace import Workspace

TINY = (
    "classifier.epochs=1",
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "segmenter.channels=24",
    "segmenter.min_steps=4",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "localize.related=3",
    "pseudo_masks.min_foreground_fraction=0",
    "pseudo_masks.crf.iterations=1",
    "predict.crf.iterations=1",
    "report.panels=4",
    "compute.shard_rows=16",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listing]:
    root = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(root, train=20, val=4, size=64, classes=3)
    return root, list_voc(root, classes=root / "classes.txt")


def extra(folder: Path, drawn: tuple[Path, Listing], count: int) -> Path:
    """Writes <class>/<file>: synthetic training images, each with one pixel changed."""
    from PIL import Image

    root, listing = drawn
    for row in listing.table.slice(0, count).to_pylist():
        path = folder / listing.classes[row["tags"][0]] / f"{row['image_id']}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(root / "JPEGImages" / f"{row['image_id']}.jpg") as image:
            image.putpixel((0, 0), (1, 2, 3))
            image.save(path)
    return folder


def run(sources: str, workspace: Path, options: dict[str, Any], *overrides: str, until: str | None = None) -> Any:
    resolved = resolve(sources, "scratch", options, [*TINY, *overrides])
    return pipeline.run(resolved, Workspace(workspace), "run", until=until)


def test_sources_are_joined_by_plus() -> None:
    assert sources_of("voc") == ("voc",)
    assert sources_of("web+voc") == ("voc", "web")
    assert sources_of("tags+single+web") == ("tags", "single", "web")
    for sources in ("voc+tags", "voc+voc", "lid+voc+web"):
        with pytest.raises(UserError, match="sources"):
            sources_of(sources)
    with pytest.raises(UserError) as caught:
        sources_of("voc+wep")
    assert "did you mean voc+web?" in caught.value.remedy


@pytest.mark.parametrize("change", ["absent", "null"])
def test_a_source_without_a_value_in_a_column_is_an_error(
    drawn: tuple[Path, Listing], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A source of another package may not build its table by `listing_table`, which fills `is_negative`."""

    def list_without_negatives(**arguments: Any) -> Listing:
        listed = list_voc(**arguments)
        table = listed.table.drop(["is_negative"])
        if change == "null":
            table = table.append_column("is_negative", pa.nulls(len(table), pa.bool_()))
        return listed._replace(table=table)

    monkeypatch.setitem(SOURCES, "voc", dataclasses.replace(SOURCES["voc"], lister=list_without_negatives))
    root, _ = drawn
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    with pytest.raises(UserError, match="source voc lists images without a value in column is_negative") as caught:
        list_images(resolve("voc", "scratch", options, TINY).config)
    assert "listing_table" in caught.value.remedy


@pytest.mark.slow
def test_crawled_images_train_both_networks(ray_local: None, drawn: tuple[Path, Listing], tmp_path: Path) -> None:
    """A broken file is listed as rejected. Web images have no saliency map, so their masks use the CRF."""
    root, listing = drawn
    web = extra(tmp_path / "web", drawn, 6)
    broken = web / listing.classes[0] / "page.jpg"
    broken.write_text("<html>not found</html>")
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), "data.web.root": str(web)}
    result = run("voc+web", tmp_path / "workspace", options)

    index = result.context.result("index", IndexResult).counts
    assert index["domains"] == {"target": 24, "web": 6}
    assert index["rejected"] == {"not an image": 1}
    assert "1 images rejected: 1 x not an image" in result.context.folder.report.read_text()
    assert read_table(result.context.stage_outputs["index"] / "rejects.parquet")["uri"].to_pylist() == [str(broken)]

    table = read_table(result.context.stage_outputs["pseudo_masks"] / "masks").to_pylist()
    ignored = {row["image_id"]: row["ignored"] for row in table}
    masks = list(ignored)
    assert {(row["image_id"].startswith("web/"), row["cue"]) for row in table} == {(True, "crf"), (False, "saliency")}
    assert sum(name.startswith("web/") for name in masks) == 6
    assert len(masks) == 26

    masks_result = result.context.result("pseudo_masks", MasksResult)
    assert masks_result.background_cue == "saliency, crf for 6 of 26"
    assert masks_result.counts["masks by domain and cue"] == {"target, saliency": 20, "web, crf": 6}
    report = result.context.folder.report.read_text()
    assert "masks by domain and cue → web, crf" in report
    segmenter = result.context.result("train_segmenter", StageResult).counts
    assert segmenter["training images"] + segmenter["without a useful mask"] == 26

    scored = {s.output: s.images for s in result.scores}
    assert scored == {"localization_maps": 20, "pseudo_masks": 20, "baseline": 20, "segmentation": 4}
    scored_shares = [share for name, share in ignored.items() if not name.startswith("web/")]
    (share,) = (s.ignored_share for s in result.scores if s.output == "pseudo_masks")
    assert share == pytest.approx(sum(scored_shares) / 20, abs=1e-4)
    assert abs(share - sum(ignored.values()) / 26) > 1e-3, "the masks of web images have another share"


@pytest.mark.slow
def test_single_label_images_get_maps(ray_local: None, drawn: tuple[Path, Listing], tmp_path: Path) -> None:
    root, listing = drawn
    single = extra(tmp_path / "train", drawn, 9)
    table = tmp_path / "folders.txt"
    for number, name in enumerate(listing.classes):
        if (single / name).is_dir():
            (single / name).rename(single / f"n0000000{number}")
    table.write_text("".join(f"n0000000{n} {name}\n" for n, name in enumerate(listing.classes)))
    for path in single.glob("*/*.png"):
        path.rename(path.with_suffix(".JPEG"))
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), "data.single.root": str(single)}
    options |= {"data.single.classes": str(table)}
    result = run("voc+single", tmp_path / "workspace", options, "classifier.epoch_pairs=16", until="localize")
    maps = set(read_table(result.context.stage_outputs["localize"] / "maps")["image_id"].to_pylist())
    assert sum(name.startswith("single/") for name in maps) == 9


def test_a_table_without_masks_or_val_images_is_predicted_and_not_scored(
    ray_local: None, drawn: tuple[Path, Listing], tmp_path: Path
) -> None:
    _, listing = drawn
    rows = [r for r in listing.table.to_pylist() if r["split"] == "train"]
    table = tmp_path / "photos.parquet"
    tags = [[listing.classes[k] for k in row["tags"]] for row in rows]
    pq.write_table(pa.table({"image": [row["uri"] for row in rows], "tags": tags}), table)
    with pytest.raises(UserError, match=r"set data\.tags\.allow_absolute=true"):
        run("tags", tmp_path / "workspace", {"data.tags.table": str(table)}, "localize.related=1")
    trusted = {"data.tags.table": str(table), "data.tags.allow_absolute": True}
    result = run("tags", tmp_path / "workspace", trusted, "localize.related=1")
    assert result.scores == []
    assert result.context.classes == tuple(sorted(listing.classes))
    assert result.context.result("predict", PredictResult).split == "train"
    assert len(read_table(result.context.stage_outputs["predict"] / "predictions")) == len(rows)
    assert "no ground-truth masks" in " ".join(result.context.result("evaluate", StageResult).notes)
    assert result.context.folder.report.is_file()


def test_only_new_and_changed_images_are_opened(ray_local: None, drawn: tuple[Path, Listing], tmp_path: Path) -> None:
    root, listing = drawn
    folder = tmp_path / "photos"
    folder.mkdir()
    names = [row["image_id"] for row in listing.table.slice(0, 8).to_pylist()]
    for name in names:
        shutil.copy(root / "JPEGImages" / f"{name}.jpg", folder)
    table, workspace = tmp_path / "photos.csv", tmp_path / "workspace"
    (folder / f"{names[7]}.jpg").write_bytes(b"")

    def index(image_ids: list[str], *overrides: str) -> tuple[int, pa.Table, pa.Table]:
        lines = [f"photos/{name}.jpg,{'cat' if n % 2 else 'dog'}" for n, name in enumerate(image_ids)]
        table.write_text("\n".join(["image,tags", *lines]) + "\n")
        result = run("tags", workspace, {"data.tags.table": str(table)}, *overrides, until="index")
        found = open_index(Workspace(workspace), "run")
        assert len(found.index) + len(found.rejects) == len(image_ids), "every image is in one of the two tables"
        return result.context.result("index", IndexResult).counts["opened"], found.index, found.rejects

    opened, _, rejects = index(names[:6])
    assert (opened, len(rejects)) == (6, 0)
    opened, before, rejects = index(names)
    assert (opened, rejects["reason"].to_pylist()) == (2, ["empty: 0 bytes"])
    assert index(names[1:])[0] == 0, "a shorter list is another index of the same files"
    left = {path.name for folder in Workspace(workspace).store.glob("index-*") for path in folder.iterdir()}
    assert left == {"index.parquet", "rejects.parquet", "summary.json"}

    changed = folder / f"{names[2]}.jpg"
    shutil.copy(root / "JPEGImages" / f"{listing.table['image_id'][9].as_py()}.jpg", changed)
    opened, after, rejects = index(names)
    assert (opened, len(rejects)) == (1, 1), "the verdict on the broken file is stored too"
    uris = before["uri"].to_pylist()
    assert after["uri"].to_pylist() == uris
    hashes = list(zip(before["content_hash"].to_pylist(), after["content_hash"].to_pylist(), strict=True))
    assert [uri for uri, (one, other) in zip(uris, hashes, strict=True) if one != other] == [str(changed)]
    sizes = zip(after["height"].to_pylist(), after["width"].to_pylist(), strict=True)
    shorter_sides = sorted(min(size) for size in sizes)
    opened, accepted, rejects = index(names, f"data.min_side={shorter_sides[-1]}")
    assert opened == 0, "another limit on sizes opens nothing"
    assert len(accepted) == shorter_sides.count(shorter_sides[-1])
    assert sum("too small" in reason for reason in rejects["reason"].to_pylist()) == 7 - len(accepted)

    shutil.copy(root / "JPEGImages" / f"{names[7]}.jpg", folder)
    opened, accepted, rejects = index(names)
    assert (opened, len(accepted), len(rejects)) == (1, 8, 0)


def test_copies_leave_train(ray_local: None, drawn: tuple[Path, Listing], tmp_path: Path) -> None:
    _, listing = drawn
    rows = listing.table.slice(0, 6).to_pylist()
    for number in (0, 1, 2):
        shutil.copy(rows[number]["uri"], tmp_path / f"copy{number}.jpg")
    table = tmp_path / "photos.parquet"
    tags = [[listing.classes[k] for k in row["tags"]] for row in rows]
    columns = {
        "image": [*(row["uri"] for row in rows), *(str(tmp_path / f"copy{number}.jpg") for number in (0, 1, 2))],
        "tags": [*tags, tags[0], tags[1], tags[2]],
        "split": [*["train"] * 6, "val", "train", "test"],
    }
    pq.write_table(pa.table(columns), table)
    trusted = {"data.tags.table": str(table), "data.tags.allow_absolute": True}
    result = run("tags", tmp_path / "workspace", trusted, until="index")
    index = result.context.result("index", IndexResult)
    notes = " ".join(index.notes)
    copies = "1 exact copies of other training images (0 with other tags) and 1 exact copies of val images"
    assert f"left out of train: {copies}: " in notes
    assert "data.keep_copies=true keeps them" in notes
    assert "1 image(s) are in more than one split with the same content" in notes  # of test, which are only named
    assert index.images == {"train": 5, "val": 1, "test": 1}
    assert index.counts["rejected"] == {"copy of a training image": 1, "copy of a val image": 1}

    result = run("tags", tmp_path / "workspace", trusted, "data.keep_copies=true", until="index")
    index = result.context.result("index", IndexResult)
    assert index.images == {"train": 7, "val": 1, "test": 1}
    assert "2 image(s) are in more than one split with the same content" in " ".join(index.notes)

    with pytest.raises(UserError, match="no run 'other' with an index"):
        open_index(Workspace(tmp_path / "workspace"), "other")
    assert not (tmp_path / "workspace" / "runs" / "other").exists()
