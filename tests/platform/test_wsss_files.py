"""Other repositories read exported maps and masks: each test repeats how one of them accesses the files."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.formats.map_files import find_map_files, read_map_files
from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.models.grids import Grid, Grids, pixel_grid
from mcis.models.localization import score_maps
from mcis.platform.cli import app
from mcis.platform.outputs.tables import MASKS_SCHEMA, map_rows
from mcis.platform.reporting.export import export
from mcis.platform.runs.files import write_table
from mcis.platform.runs.results import IndexResult, StageResult, write_result
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.localization.imported import read_maps

SIZES = {"2007_000032": (24, 24), "2007_000039": (30, 45)}
"""Height and width of the images."""
TAGS = {"2007_000032": [0, 2], "2007_000039": [1]}
CLASSES = ("aeroplane", "bicycle", "bird")
GRIDS = {"2007_000032": pixel_grid(24), "2007_000039": Grid(0.1, 0.2, 5)}
"""Positions of the maps: the pixels of the first image, and 5x5 positions of the second."""


def activations(image_id: str) -> NDArray[np.float16]:
    side = GRIDS[image_id].num_positions
    rng = np.random.default_rng(int(image_id[-2:]))
    return (4 * rng.random((len(TAGS[image_id]), side, side)) - 1).astype(np.float16)


def pseudo_mask(image_id: str) -> NDArray[np.uint8]:
    mask = np.random.default_rng(7).choice([0, 1, 2, 3, 255], SIZES[image_id])
    return mask.astype(np.uint8)


def make_run(folder: Path, ids: dict[str, str]) -> Workspace:
    """Makes a run `made` with an index, maps and pseudo masks of the images.

    Args:
        ids: Image id by the key of SIZES.
    """
    rows: list[dict[str, Any]] = []
    masks: list[dict[str, Any]] = []
    maps: list[pa.Table] = []
    for key, image_id in ids.items():
        height, width = SIZES[key]
        photograph = folder / f"{key}.jpg"
        Image.fromarray(np.full((height, width, 3), 99, np.uint8)).save(photograph)
        row: dict[str, Any] = {
            "image_id": image_id,
            "uri": str(photograph),
            "domain": "target",
            "split": "train",
            "tags": TAGS[key],
        }
        row |= {"is_negative": False, "height": height, "width": width}
        rows.append(row | {"content_hash": sha256(photograph.read_bytes()).hexdigest()})
        mask_row = dict.fromkeys(("labels", "mask"), encode_labels(pseudo_mask(key)))
        masks.append(mask_row | {"image_id": image_id, "cue": "crf", "ignored": 0.0, "foreground": 0.0})
        maps.append(map_rows([image_id] * len(TAGS[key]), TAGS[key], activations(key), GRIDS[key]))

    workspace = Workspace(folder / "workspace")
    outputs = {stage: workspace.output(stage, "made") for stage in ("index", "localize", "pseudo_masks")}
    write_table(outputs["index"] / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    write_table(outputs["index"] / "rejects.parquet", pa.table({"image_id": pa.array([], pa.string())}))
    write_result(outputs["index"], IndexResult(classes=CLASSES, counts={"images": {}}), key="made")
    shard = f"part-{0:08d}-{len(ids):08d}.parquet"
    write_table(outputs["localize"] / "maps" / shard, pa.concat_tables(maps))
    write_table(outputs["pseudo_masks"] / "masks" / shard, pa.Table.from_pylist(masks, schema=MASKS_SCHEMA))
    for stage in ("localize", "pseudo_masks"):
        write_result(outputs[stage], StageResult(), key="made")
    workspace.run("made")
    workspace.record_outputs("made", outputs)
    return workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_run(tmp_path_factory.mktemp("run"), {image_id: image_id for image_id in SIZES})


def expected_scores(image_id: str, height: int, width: int) -> NDArray[np.float32]:
    """The maps of an image at its pixels, divided by their maximum."""
    maps = torch.from_numpy(activations(image_id).astype(np.float32))
    grid = GRIDS[image_id]
    return np.asarray(score_maps(maps, Grids(grid, grid), "maximum", height, width).numpy())


def test_overlays_of_large_images_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their colors are computed in float64, in several threads."""
    monkeypatch.setitem(SIZES, "2007_000039", (30, 1100))
    export(make_run(tmp_path, {"2007_000039": "long"}), "made", "maps", tmp_path / "out")
    assert Image.open(tmp_path / "out/long/bicycle.png").size == (1100, 30)
    assert Image.open(tmp_path / "out/long/bicycle.overlay.jpg").size == (1024, 28)


def test_irn_reads_maps(workspace: Workspace, tmp_path: Path) -> None:
    assert export(workspace, "made", "maps", tmp_path, "irn").startswith("3 maps of 2 images below ")
    for image_id, (height, width) in SIZES.items():
        cam_dict = np.load(tmp_path / f"{image_id}.npy", allow_pickle=True).item()
        keys = np.pad(cam_dict["keys"] + 1, (1, 0), mode="constant")
        assert keys.tolist() == [0, *(tag + 1 for tag in TAGS[image_id])]
        assert keys.dtype == np.int64

        cams = cam_dict["high_res"]
        np.testing.assert_array_equal(cams, expected_scores(image_id, height, width))
        assert cams.dtype == np.float32
        assert cams.max(axis=(1, 2)).tolist() == [1.0] * len(TAGS[image_id])
        cams = np.pad(cams, ((1, 0), (0, 0), (0, 0)), mode="constant", constant_values=0.3)
        assert set(np.unique(keys[np.argmax(cams, axis=0)])) <= {0, *(tag + 1 for tag in TAGS[image_id])}

        strided = cam_dict["cam"].cpu()  # .cuda() in IRN
        assert strided.shape == (len(TAGS[image_id]), (height - 1) // 4 + 1, (width - 1) // 4 + 1)
        assert strided.dtype == torch.float32
        np.testing.assert_array_equal(strided.numpy(), expected_scores(image_id, *strided.shape[1:]))


def test_maps_at_the_pixels_keep_their_values(workspace: Workspace, tmp_path: Path) -> None:
    export(workspace, "made", "maps", tmp_path, "irn")
    stored = activations("2007_000032").astype(np.float32).clip(0)
    read = np.load(tmp_path / "2007_000032.npy", allow_pickle=True).item()["high_res"]
    np.testing.assert_array_equal(read, stored / stored.max(axis=(1, 2), keepdims=True))


def test_psa_reads_maps(workspace: Workspace, tmp_path: Path) -> None:
    export(workspace, "made", "maps", tmp_path, "psa")
    for image_id, (height, width) in SIZES.items():
        cam = np.load(tmp_path / f"{image_id}.npy", allow_pickle=True).item()
        cam_full_arr = np.zeros((len(CLASSES) + 1, height, width), np.float32)
        for k, v in cam.items():
            cam_full_arr[k + 1] = v
        cam_full_arr[0] = (1 - np.max(cam_full_arr[1:], (0), keepdims=False)) ** 16

        assert list(cam) == TAGS[image_id]
        labels = np.array(TAGS[image_id]) + 1
        np.testing.assert_array_equal(cam_full_arr[labels], expected_scores(image_id, height, width))


def test_clip_es_reads_maps(workspace: Workspace, tmp_path: Path) -> None:
    export(workspace, "made", "maps", tmp_path, "clip-es")
    for image_id, (height, width) in SIZES.items():
        cam_dict = np.load(tmp_path / f"{image_id}.npy", allow_pickle=True).item()
        cams = cam_dict["attn_highres"]
        background = np.power(1 - np.max(cams, axis=0, keepdims=True), 1)
        keys = np.pad(cam_dict["keys"] + 1, (1, 0), mode="constant")

        assert np.concatenate((background, cams), axis=0).shape == (len(keys), height, width)
        assert cams.dtype == np.float16
        np.testing.assert_array_equal(cams, expected_scores(image_id, height, width).astype(np.float16))


def test_l2g_reads_maps(workspace: Workspace, tmp_path: Path) -> None:
    export(workspace, "made", "maps", tmp_path, "png")
    for image_id, (height, width) in SIZES.items():
        scores = expected_scores(image_id, height, width)
        for k, expected in zip(TAGS[image_id], scores, strict=True):
            att = np.asarray(Image.open(tmp_path / f"{image_id}_{k}.png").convert("L")) / 255.0
            assert np.abs(att - expected).max() <= 0.5 / 255 + 1e-6
    assert len(list(tmp_path.glob("*.png"))) == 3


@pytest.mark.parametrize(
    ("format", "tolerance"), [("irn", 0.0), ("psa", 0.0), ("clip-es", 2**-11), ("png", 0.5 / 255 + 1e-6)]
)
def test_exported_maps_are_imported_again(workspace: Workspace, tmp_path: Path, format: str, tolerance: float) -> None:
    export(workspace, "made", "maps", tmp_path, format)
    files = find_map_files(tmp_path, format)
    assert set(files) == set(SIZES)
    for image_id, size in SIZES.items():
        read = read_map_files(files[image_id], format, len(CLASSES))
        assert read.classes.tolist() == TAGS[image_id]
        np.testing.assert_allclose(read.maps, expected_scores(image_id, *size), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, NDArray[np.float32]]]:
    """A run with maps of another program, and these maps by image. Their maximum is 0.5."""
    folder = tmp_path_factory.mktemp("imported")
    workspace = make_run(folder, {image_id: image_id for image_id in SIZES})
    maps_by_image: dict[str, NDArray[np.float32]] = {}
    rows: list[dict[str, Any]] = []
    for image_id, size in SIZES.items():
        maps = (np.random.default_rng(3).random((len(TAGS[image_id]), *size)) / 2).astype(np.float32)
        maps[:, 0, 0] = 0.5
        np.save(folder / image_id, {"keys": np.array(TAGS[image_id]), "high_res": maps})  # type: ignore[arg-type]
        rows.append({"image_id": image_id, "tags": TAGS[image_id], "files": [f"{folder}/{image_id}.npy"]})
        maps_by_image[image_id] = maps

    (shard,) = (workspace.outputs("made")["localize"] / "maps").iterdir()
    write_table(shard, read_maps("irn", len(CLASSES), pa.Table.from_pylist(rows)))
    return workspace, maps_by_image


@pytest.mark.parametrize(
    ("format", "tolerance"), [("irn", 0.0), ("psa", 0.0), ("clip-es", 2**-12), ("png", 0.5 / 255 + 1e-6)]
)
def test_maps_of_another_program_are_exported_as_given(
    imported: tuple[Workspace, dict[str, NDArray[np.float32]]], tmp_path: Path, format: str, tolerance: float
) -> None:
    workspace, maps_by_image = imported
    export(workspace, "made", "maps", tmp_path, format)
    files = find_map_files(tmp_path, format)
    for image_id, maps in maps_by_image.items():
        read = read_map_files(files[image_id], format, len(CLASSES))
        assert read.classes.tolist() == TAGS[image_id]
        np.testing.assert_allclose(read.maps, maps, rtol=0, atol=tolerance)


def test_pictures_of_maps_of_another_program_are_as_given(
    imported: tuple[Workspace, dict[str, NDArray[np.float32]]], tmp_path: Path
) -> None:
    workspace, maps_by_image = imported
    export(workspace, "made", "maps", tmp_path)
    for image_id, maps in maps_by_image.items():
        for tag, scores in zip(TAGS[image_id], maps, strict=True):
            picture = np.array(Image.open(tmp_path / image_id / f"{CLASSES[tag]}.png"))
            np.testing.assert_array_equal(picture, (scores * 255).round())


@pytest.mark.parametrize("format", ["irn", "psa", "clip-es"])
def test_numpy_1_finds_the_modules_that_pickles_name(workspace: Workspace, tmp_path: Path, format: str) -> None:
    export(workspace, "made", "maps", tmp_path, format)
    content = (tmp_path / "2007_000032.npy").read_bytes()
    assert b"numpy.core.multiarray" in content
    assert b"numpy._core" not in content


def test_second_stages_read_masks_lists_and_tags(workspace: Workspace, tmp_path: Path) -> None:
    text = export(workspace, "made", "masks", tmp_path, "wsss")
    assert text.startswith("2 images, their pseudo masks and their tags below ")

    root = tmp_path / "VOC2012"  # deeplab-pytorch
    lines = (root / "ImageSets/SegmentationAug/train_aug.txt").read_text().splitlines()
    file_list = [line.rstrip().split(" ") for line in lines]
    files, labels = list(zip(*file_list, strict=True))
    for image_id, file, label in zip(SIZES, files, labels, strict=True):
        assert file.split("/")[-1].split(".")[0] == image_id
        mask = np.asarray(Image.open(root / label[1:]), dtype=np.int32)
        np.testing.assert_array_equal(mask, pseudo_mask(image_id))
        assert Image.open(root / file[1:]).size == mask.shape[::-1]

    names = [line.split(" ")[0][-15:-4] for line in lines]  # PSA
    cls_labels_dict = np.load(tmp_path / "cls_labels.npy", allow_pickle=True).item()
    by_name = np.array([cls_labels_dict[name] for name in names])
    assert by_name.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert by_name.dtype == np.float32

    numbers = [int(line) for line in (tmp_path / "train_aug.txt").read_text().splitlines()]  # IRN
    assert [str(number)[:4] + "_" + str(number)[4:] for number in numbers] == list(SIZES)
    np.testing.assert_array_equal([cls_labels_dict[number] for number in numbers], by_name)


def test_ids_of_other_data_sets_are_keys_of_text_only(tmp_path: Path) -> None:
    ids = dict(zip(SIZES, ("photos/a.jpg", "12"), strict=True))
    export(make_run(tmp_path, ids), "made", "masks", tmp_path / "out", "wsss")
    assert list(np.load(tmp_path / "out/cls_labels.npy", allow_pickle=True).item()) == ["photos/a", "12"]


def test_ids_with_spaces_are_refused_where_spaces_separate_columns(tmp_path: Path) -> None:
    workspace = make_run(tmp_path, dict(zip(SIZES, ("my photo", "b"), strict=True)))
    with pytest.raises(UserError, match="1 of 2 image ids have a space: my photo"):
        export(workspace, "made", "masks", tmp_path / "out", "wsss")


def test_commands_write_the_formats_and_name_them(workspace: Workspace, tmp_path: Path) -> None:
    words = ["--name", "made", "--workspace", str(workspace.root), "--out", str(tmp_path / "cams")]
    done = CliRunner().invoke(app, ["export", "maps", *words, "--format", "psa"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "cams" / "labels.csv").exists()

    done = CliRunner().invoke(app, ["export", "maps", *words, "--format", "coco"])
    assert done.exit_code == 1
    assert "one of irn, psa, clip-es, png" in done.output
