"""Masks that people correct: which to correct first, how they are named, and that they teach and are not scored."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from mcis.datasets.errors import UnreachableFile, UserError
from mcis.datasets.images.label_masks import decode_labels, encode_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.shards import Shards
from mcis.platform import pipeline
from mcis.platform.networks.predictor import Predictor
from mcis.platform.outputs.corrected_masks import CORRECTED, with_corrected
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.reporting.suggestions import suggest_images, write_suggestions
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.results import StageResult
from mcis.platform.stages import pseudo_masks


def computed(run: pipeline.RunResult) -> list[str]:
    return [stage for stage, is_computed in run.context.computed.items() if is_computed]


def test_a_mask_is_named_after_the_image_id_or_after_its_file_where_no_other_has_that_name(tmp_path: Path) -> None:
    rows = pa.table({"image_id": ["photos/a.jpg", "photos/b.jpg", "more/b.jpg", "/elsewhere/c.jpg"]})

    def matched_files(*names: str) -> list[str | None]:
        folder = tmp_path / "-".join(names).replace("/", "_")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        uris = with_corrected(rows, folder)[CORRECTED].to_pylist()
        return [uri and str(Path(uri).relative_to(folder)) for uri in uris]

    assert with_corrected(rows, None)[CORRECTED].null_count == 4
    with pytest.raises(UserError, match="no PNG in"):
        matched_files()
    assert matched_files("a.jpg.png", "c.png") == ["a.jpg.png", None, None, "c.png"]
    assert matched_files("photos/b.jpg.png", "a.png") == ["a.png", "photos/b.jpg.png", None, None]
    assert matched_files("a.PNG") == ["a.PNG", None, None, None]
    (tmp_path / "a.PNG" / "b.png").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"left out 1 link\(s\) .*"):
        with_corrected(rows, tmp_path / "a.PNG")
    assert matched_files("elsewhere/c.jpg.png") == [None, None, None, "elsewhere/c.jpg.png"]
    with pytest.raises(UserError, match=r"1 of 1 masks in .* match no training image with a tag, nor .*b\.png"):
        matched_files("b.png")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c.png").touch()
    with pytest.raises(UserError, match=r"1 of 1 masks in .* match no training image with a tag, nor .*c\.png"):
        with_corrected(rows, tmp_path / "c", [*rows["image_id"].to_pylist(), "val/c.jpg"])


def test_masks_with_the_labels_of_other_classes_show_before_the_trainings(small: Any, tmp_path: Path) -> None:
    for path in (small.root / "SegmentationClassAug").glob("train_*.png"):
        labels = decode_labels(path.read_bytes())
        other = np.where((labels > 0) & (labels < 255), labels % 3 + 1, labels).astype(np.uint8)
        (tmp_path / path.name).write_bytes(encode_labels(other))
    with pytest.raises(UserError, match="corrected masks contain none of the tags"):
        pipeline.check(small.settings(f"data.corrected_masks={tmp_path}").config, small.workspace, "any")


def test_an_image_with_a_corrected_mask_needs_no_saliency_map(small: Any, tmp_path: Path) -> None:
    image_id = "train_000003"
    truth = small.root / "SegmentationClassAug" / f"{image_id}.png"
    (tmp_path / truth.name).write_bytes(truth.read_bytes())
    config = small.settings("pseudo_masks.rule=saliency").config
    listed = list_images(config)
    table = listed.table
    is_other = pc.not_equal(table["image_id"], image_id)
    uris = pc.if_else(is_other, table["saliency_uri"], pa.scalar(None, pa.string()))
    column = table.column_names.index("saliency_uri")
    listed = listed._replace(table=table.set_column(column, "saliency_uri", uris))

    with pytest.raises(UserError, match=rf"1 of 24 tagged training images have no saliency map: {image_id}"):
        pseudo_masks.check(config, listed, small.workspace)
    corrected = small.settings("pseudo_masks.rule=saliency", f"data.corrected_masks={tmp_path}").config
    pseudo_masks.check(corrected, listed, small.workspace)


def test_masks_that_are_all_corrected_use_no_background_cue(small: Any, tmp_path: Path) -> None:
    corrected = tmp_path / "corrected"
    output = tmp_path / "output"
    corrected.mkdir()
    output.mkdir()
    for path in (small.root / "SegmentationClassAug").glob("train_*.png"):
        shutil.copy(path, corrected)
    config = small.settings("pseudo_masks.rule=auto", f"data.corrected_masks={corrected}").config
    result = pseudo_masks.run(config, dataclasses.replace(small.first.context, output=output))
    assert result.notes[0] == "no background cue is used, because all tagged images have corrected masks"


@pytest.mark.slow
def test_an_image_with_a_corrected_mask_is_scored_no_more_although_maps_stay(small: Any, tmp_path: Path) -> None:
    assert small.run("scored", until="localize").scores[0].images == 24
    name = "train_000003.png"
    (tmp_path / name).write_bytes((small.root / "SegmentationClassAug" / name).read_bytes())
    again = small.run("scored", f"data.corrected_masks={tmp_path}", until="localize")
    assert computed(again) == ["evaluate", "report"]
    assert again.scores[0].images == 23


def test_corrected_masks_teach_as_they_are_and_are_not_scored(small: Any, tmp_path: Path) -> None:
    """Of two images; one mask lacks classes that are tagged. A changed mask is another input, the index is not."""
    assert "train_classifier" in small.first.context.stage_outputs  # the run before
    truth = small.root / "SegmentationClassAug"
    folder = tmp_path / "corrected"
    folder.mkdir()
    names = [path.name for path in sorted(truth.glob("train_*.png"))[:2]]
    for name in names:
        mask = decode_labels((truth / name).read_bytes())
        mask[mask == 0] = 255
        (folder / name).write_bytes(encode_labels(mask))
    wrong = (mask < 255).astype(np.uint8)
    (folder / names[1]).write_bytes(encode_labels(wrong))
    values = (
        f"data.corrected_masks={folder}",
        "pseudo_masks.rule=affinity",
        "affinity_net.backbone=small",
        "affinity_net.min_steps=2",
        "affinity_net.batch=4",
        "affinity_net.crop=64",
        "affinity_net.trainable_stages=all",
        "segmenter.min_steps=2",
        "segmenter.min_epochs=0.5",
        "segmenter.batch=4",
        "predict.split=train",
    )
    result = small.run("corrected", *values)
    assert not {"index", "train_classifier", "localize"} & set(computed(result))
    assert result.scores[-1].trained_on == "pseudo masks with corrected masks"
    Predictor.load(result.context.folder.path).save_pretrained(tmp_path / "network")
    assert "image-level tags and pseudo masks with corrected masks." in (tmp_path / "network/README.md").read_text()
    for stage, table in (("pseudo_masks", "masks"), ("train_affinity", "labels")):
        rows = Shards(result.context.stage_outputs[stage] / table)
        for name in names:
            (mask,) = rows.rows(name.removesuffix(".png"))["mask"].to_pylist()
            np.testing.assert_array_equal(decode_labels(mask), decode_labels((folder / name).read_bytes()))
    masks_result = result.context.result("pseudo_masks", StageResult)
    assert sum(masks_result.counts["masks by domain and cue"].values()) == 24
    assert masks_result.counts["masks by domain and cue"]["target, corrected"] == 2
    assert any("contradict the tags" in note and names[1].removesuffix(".png") in note for note in masks_result.notes)
    assert {score.images for score in result.scores} == {22}
    assert {"pseudo_masks", "segmentation"} <= {score.output for score in result.scores}
    training_counts = result.context.result("train_segmenter", StageResult).counts
    assert training_counts["images of an epoch, rare classes and corrected masks repeated"] == 24 + 2 * 3
    assert training_counts["steps"] == 3, "as many as half of 24 images ask for, not of 30"
    (folder / "elsewhere.png").write_bytes((folder / names[0]).read_bytes())
    with pytest.raises(
        UserError, match=r"1 of 3 masks in .*corrected match no training image with a tag, nor a negative"
    ):
        pipeline.check(small.settings(*values).config, small.workspace, "any")


def test_the_masks_to_correct_first_are_those_that_the_network_contradicts(small: Any, tmp_path: Path) -> None:
    """Needs as a loop over pixels has them; the masks hold tags alone and are taken as corrected masks."""
    run = small.first.context
    out = tmp_path / "corrected"
    predictor = Predictor.load(run.folder.path)
    rows = split_rows(run, "train", tagged=True).to_pylist()
    masks = Shards(run.stage_outputs["pseudo_masks"] / "masks")
    masks_and_predictions = []
    for row in rows:
        (mask,) = masks.rows(row["image_id"])["labels"].to_pylist()
        masks_and_predictions.append((decode_labels(mask), predictor(row["uri"])))

    class_pixels = [sum(int((mask == k + 1).sum()) for mask, _ in masks_and_predictions) for k in range(3)]
    needs = [
        sum(int(((mask == k + 1) != (predicted == k + 1)).sum()) / max(class_pixels[k], 1) for k in row["tags"])
        for row, (mask, predicted) in zip(rows, masks_and_predictions, strict=True)
    ]
    suggestions, rejected = suggest_images(small.workspace, "first", predictor, 24)
    assert not rejected
    by_id = {row["image_id"]: need for row, need in zip(rows, needs, strict=True)}
    np.testing.assert_allclose([suggestion.need for suggestion in suggestions], sorted(needs, reverse=True))
    np.testing.assert_allclose(
        [suggestion.need for suggestion in suggestions],
        [by_id[suggestion.row["image_id"]] for suggestion in suggestions],
    )
    written = write_suggestions(small.workspace, "first", predictor, count=5, out=out, format="labelstudio")
    assert "objects" in written.description
    assert written.rejected == 0
    with pytest.raises(UserError, match="may contain corrected masks"):
        write_suggestions(small.workspace, "first", predictor, count=5, out=out)
    table = list(csv.DictReader((out / "suggested.csv").read_text().splitlines()))
    assert [line["image"] for line in table] == [suggestion.row["image_id"] for suggestion in suggestions[:5]]
    for suggestion, line in zip(suggestions, table, strict=False):
        labels = decode_labels((out / line["mask"]).read_bytes())
        assert set(np.unique(labels)) <= {0, *(k + 1 for k in suggestion.row["tags"])}
    page = (out / "suggested.html").read_text()
    tasks = json.loads((out / "labelstudio" / "tasks.json").read_text())
    shown = [page.index(f"<bdi>{line['image']}</bdi>") for line in table]
    assert (shown, page.count("<img")) == (sorted(shown), 3 * 5)
    assert [Path(task["data"]["image"]).stem for task in tasks] == [line["image"] for line in table]
    pipeline.check(small.settings(f"data.corrected_masks={out / 'masks'}").config, small.workspace, "any")


def test_an_image_that_cannot_be_read_at_present_is_not_suggested(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small.first.context
    unreachable = split_rows(run, "train", tagged=True).to_pylist()[0]["uri"]

    def read(uri: str, **options: Any) -> Any:
        if uri == unreachable:
            raise UnreachableFile(f"{uri} cannot be read", "a disk that responds", "repeat", "Input/output error")
        return read_rgb(uri, **options)

    monkeypatch.setattr("mcis.platform.reporting.suggestions.read_rgb", read)
    out = tmp_path / "out"
    written = write_suggestions(small.workspace, "first", Predictor.load(run.folder.path), count=24, out=out)

    assert written.rejected == 1
    (rejected,) = csv.DictReader((out / "rejects.csv").read_text().splitlines())
    assert rejected == {"image": unreachable, "reason": "cannot be read at present: Input/output error"}
    assert len((out / "suggested.csv").read_text().splitlines()) == 1 + 23


def test_the_suggested_images_are_listed_before_their_masks_are_decoded(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may not be enough for the page, and the folder is not written a second time."""
    out = tmp_path / "out"

    def decode(data: bytes) -> np.ndarray:
        if (out / "shares.csv").exists():  # the predictions are finished
            raise MemoryError
        return decode_labels(data)

    monkeypatch.setattr("mcis.platform.reporting.suggestions.decode_labels", decode)
    predictor = Predictor.load(small.first.context.folder.path)
    with pytest.raises(MemoryError):
        write_suggestions(small.workspace, "first", predictor, count=2, out=out)
    assert len((out / "suggested.csv").read_text().splitlines()) == 1 + 2
