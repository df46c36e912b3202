"""Predictions of photographs: the command, its files, its peak memory, and the code in docs/howto/predict.md."""

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.images.label_masks import decode_labels
from mcis.platform.cli import app
from mcis.platform.networks.predictor import Predictor
from mcis.platform.networks.trained_segmenter import open_trained_segmenter

BROKEN = Path("/proc/self/mem")
"""A file that exists and cannot be read."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "predict.md"


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of several sizes and formats, two with the same name, one rotated by EXIF, and a file that is no image."""
    folder = tmp_path / "photos"
    (folder / "x").mkdir(parents=True)
    noise(40, 60).save(folder / "a.jpg")
    noise(70, 50).save(folder / "x" / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(48, 90).save(folder / "turned.jpg", exif=exif)
    noise(300, 200).convert("L").save(folder / "gray.png")
    (folder / "broken.jpg").write_text("no image")
    noise(40, 8).save(folder / "thin.png")
    return folder


def predict(run: Path, *arguments: str) -> tuple[int, str]:
    """Runs the command; returns its exit status and output."""
    workspace = ["--workspace", str(run.parent.parent), "--name", run.name]
    done = CliRunner().invoke(app, ["predict", *arguments, *workspace], env={"COLUMNS": "300"})
    return done.exit_code, done.output


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_masks_overlays_and_shares_of_photographs(trained: Callable[..., Path], photos: Path, tmp_path: Path) -> None:
    run = trained(3, "predict.crf.iterations=2")
    out = tmp_path / "out"
    status, output = predict(run, str(photos), "--out", str(out), "--set", "data.max_side=100")
    assert status == 1
    assert "predicted at up to 100 pixels" in output
    assert "4 photographs in" in output
    assert "rejected: 2" in output

    sizes = {"a": (40, 60), "gray": (300, 200), "turned": (90, 48), "x/a": (70, 50)}
    shares = rows(out / "shares.csv")
    assert [row["mask"] for row in shares] == [f"masks/{name}.png" for name in sizes]
    predictor = Predictor.load(run, ["data.max_side=100"])
    for row, (name, size) in zip(shares, sizes.items(), strict=True):
        mask = Image.open(out / row["mask"])
        labels = decode_labels((out / row["mask"]).read_bytes())
        assert (mask.mode, labels.shape) == ("P", size)
        assert (row["height"], row["width"]) == tuple(map(str, size))
        label_shares = [float(row[name]) for name in ("background", "class 0", "class 1", "class 2")]
        np.testing.assert_allclose(label_shares, np.bincount(labels.ravel(), minlength=4) / labels.size, atol=1e-6)
        np.testing.assert_array_equal(predictor(row["image"]), labels)
        overlay = Image.open(out / "overlays" / f"{name}.jpg")
        assert overlay.size == size[::-1]

    rejects = {Path(row["image"]).name: row["reason"] for row in rows(out / "rejects.csv")}
    assert rejects.keys() == {"broken.jpg", "thin.png"}
    assert rejects["broken.jpg"].startswith("not an image")
    assert rejects["thin.png"].startswith("too small")
    assert (out / "labels.csv").read_text().splitlines()[2] == "1,class 0,128,0,0"


def test_predictions_are_written_as_objects_of_a_smallest_area(
    trained: Callable[..., Path], photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--format", "coco", "--min-area", "30", "--out", str(out), "--set", "predict.crf.iterations=0"]
    status, output = predict(trained(3), str(photos), *options)
    assert status == 1  # two files are rejected
    assert "objects, connected regions of at least 30 pixels of a class" in output

    content = json.loads((out / "coco" / "annotations.json").read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    assert sorted(names.values()) == ["a.jpg", "gray.png", "turned.jpg", "x/a.png"]

    expected = Counter[tuple[str, int, int]]()
    for name in names.values():
        labels = decode_labels((out / "masks" / name).with_suffix(".png").read_bytes())
        for label in range(1, 4):
            regions, _ = ndimage.label(labels == label)
            areas = np.bincount(regions.ravel())[1:]
            expected.update((name, label, area) for area in areas.tolist() if area >= 30)
    written = ((names[item["image_id"]], item["category_id"], item["area"]) for item in content["annotations"])
    assert Counter(written) == expected
    assert expected

    status, output = predict(trained(3), str(photos), *options)
    assert (status, "coco contains files" in output) == (1, True)


@pytest.fixture
def tagged(trained: Callable[..., Path], photos: Path) -> tuple[Path, Predictor, int]:
    """A run, its predictor, and a class that is not the one predicted in a.jpg, which a table t.csv gives to a.jpg."""
    run = trained(3, "predict.crf.iterations=2")
    predictor = Predictor.load(run)
    predicted = int(predictor(photos / "a.jpg").max())
    assert predicted > 0, "the network predicts some class, which the tag then forbids"
    tag = predicted % 3
    (photos / "t.csv").write_text(f"image,tags\na.jpg,class {tag}\nx/a.png,\n")
    return run, predictor, tag


def test_pictures_of_pillow_are_predicted_like_files(trained: Callable[..., Path], tmp_path: Path) -> None:
    """Transparent pixels are white, whatever their hidden color."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 4), np.uint8)
    pixels[:, 16:, 3] = 255
    pixels[:, :16, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    predictor = Predictor.load(trained(3))
    np.testing.assert_array_equal(predictor(Image.open(tmp_path / "a.png")), predictor(tmp_path / "a.png"))


def test_a_table_of_tags_restricts_predictions(
    tagged: tuple[Path, Predictor, int], photos: Path, tmp_path: Path
) -> None:
    """Also after the CRF. Photographs outside of the table, or with an empty cell, may have any class."""
    run, predictor, tag = tagged
    out = tmp_path / "out"
    status, _ = predict(run, str(photos / "gray.png"), "--tags", str(photos / "t.csv"), "--out", str(out))
    assert status == 0

    masks = {name: np.asarray(Image.open(out / f"masks/{name}.png")) for name in ("a", "x/a", "gray")}
    assert set(np.unique(masks["a"]).tolist()) <= {0, tag + 1}
    np.testing.assert_array_equal(masks["x/a"], predictor(photos / "x/a.png"))
    np.testing.assert_array_equal(masks["gray"], predictor(photos / "gray.png"))
    np.testing.assert_array_equal(masks["a"], predictor(photos / "a.jpg", tags=[f"class {tag}"]))


def test_the_predictor_takes_files_pictures_and_arrays(tagged: tuple[Path, Predictor, int], photos: Path) -> None:
    _, predictor, tag = tagged
    picture = Image.open(photos / "a.jpg")
    labels = predictor(photos / "a.jpg", tags=[f"class {tag}"])
    np.testing.assert_array_equal(labels, predictor(picture, tags=f"class {tag}"))

    flipped = np.array(picture.convert("RGB"))[::-1]
    np.testing.assert_array_equal(predictor(flipped), predictor(flipped.copy()))
    with pytest.raises(TypeError, match="an image of type list"):
        predictor(cast(Any, [picture]))


def test_unknown_tags_are_refused(tagged: tuple[Path, Predictor, int], photos: Path, tmp_path: Path) -> None:
    run, predictor, _ = tagged
    table = photos / "t.csv"
    table.write_text("image,tags\na.jpg,clas 1\n")
    status, output = predict(run, "--tags", str(table), "--out", str(tmp_path / "out"))
    assert status == 1
    assert "1 tag(s) are not among the classes: clas 1" in output
    with pytest.raises(UserError, match="tags cow"):
        predictor(photos / "a.jpg", tags=["cow"])


def test_the_status_is_1_if_a_file_is_rejected(trained: Callable[..., Path], photos: Path, tmp_path: Path) -> None:
    run = trained(2)
    out = tmp_path / "out"
    arguments = [str(photos / "a.jpg"), "--out", str(out), "--set", "predict.crf.iterations=0"]
    assert predict(run, *arguments)[0] == 0
    assert rows(out / "rejects.csv") == []

    (out / "masks" / "a.png").write_bytes(b"old")
    status, output = predict(run, *arguments, str(tmp_path / "absent.jpg"))
    assert (status, (out / "masks" / "a.png").read_bytes()) == (1, b"old")
    assert "no file or folder" in output

    status, _ = predict(run, *arguments, str(photos / "broken.jpg"))
    assert (status, Image.open(out / "masks" / "a.png").size) == (1, (60, 40))
    assert rows(out / "rejects.csv")[0]["reason"].startswith("not an image")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.skipif(not BROKEN.exists(), reason="needs Linux")
def test_a_file_that_cannot_be_read_at_present_is_left_out(
    trained: Callable[..., Path], photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (photos / "away.jpg").symlink_to(BROKEN)
    files = [str(photos / name) for name in ("away.jpg", "a.jpg")]
    status, output = predict(trained(2), *files, "--out", str(out), "--set", "predict.crf.iterations=0")

    assert status == 1
    assert f"rejected: 1, see {out / 'rejects.csv'}" in output
    assert [Path(row["image"]).name for row in rows(out / "shares.csv")] == ["a.jpg"]
    (rejected,) = rows(out / "rejects.csv")
    assert Path(rejected["image"]).name == "away.jpg"
    assert rejected["reason"] == "cannot be read at present: Input/output error"


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.skipif(not BROKEN.exists(), reason="needs Linux")
@pytest.mark.parametrize(("number", "listed"), [(1, 1), (3, 3), (9, 6)])
def test_a_fault_of_all_files_ends_the_command_and_keeps_the_tables(
    trained: Callable[..., Path], tmp_path: Path, number: int, listed: int
) -> None:
    out = tmp_path / "out"
    files = [tmp_path / f"{file}.jpg" for file in range(number)]
    for file in files:
        file.symlink_to(BROKEN)
    status, output = predict(trained(2), *map(str, files), "--out", str(out), "--set", "predict.crf.iterations=0")

    assert status == 1
    assert f"error: {files[listed - 1]} cannot be read, after several attempts: Input/output error" in output
    assert [Path(row["image"]).name for row in rows(out / "rejects.csv")] == [file.name for file in files[:listed]]
    assert rows(out / "shares.csv") == []


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--set", "segmenter.width=3"], "keys predict.*, data.max_side, data.max_pixels, data.value_range or data"),
        (["--set", "predict.crop=no"], "predict.crop"),
        (["--name", "absent"], "has no trained segmentation network"),
        (["--min-area", "9"], "a smallest area of objects without a format"),
    ],
)
def test_wrong_options_are_refused(
    trained: Callable[..., Path], photos: Path, tmp_path: Path, arguments: list[str], found: str
) -> None:
    run = trained(2)
    given = ["predict", str(photos), "--out", str(tmp_path / "out"), "--name", run.name, *arguments]
    done = CliRunner().invoke(app, [*given, "--workspace", str(run.parent.parent)])
    assert done.exit_code == 1
    assert found in done.output
    assert not (tmp_path / "out").exists()


def test_gray_of_more_than_8_bits_is_predicted_in_its_value_range(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = trained(2)
    gray = np.asarray(noise(60, 90).convert("L"))
    (tmp_path / "photos").mkdir()
    Image.fromarray(gray).save(tmp_path / "photos/plain.png")
    Image.fromarray(gray.astype(np.uint16) * 16).save(tmp_path / "photos/deep.png")
    Image.fromarray(gray.astype(np.float32) * 16).save(tmp_path / "photos/float.tif")
    arguments = [str(tmp_path / "photos"), "--out", str(tmp_path / "out")]

    status, output = predict(run, *arguments)
    assert "note: 1 photograph(s) are almost black or white: deep. For gray of more than 8 bits, set" in output
    (rejected,) = rows(tmp_path / "out/rejects.csv")
    assert (status, Path(rejected["image"]).name) == (1, "float.tif")
    assert rejected["reason"].endswith("for example by data.value_range=0,3968")

    status, output = predict(run, *arguments, "data.value_range=0,4080")
    assert status == 0
    assert "almost black" not in output
    for folder, suffix in (("masks", "png"), ("overlays", "jpg")):
        plain, *others = (tmp_path / "out" / folder / f"{name}.{suffix}" for name in ("plain", "deep", "float"))
        for other in others:
            assert other.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize(
    ("sides", "given", "overrides", "side"),
    [
        ((), [], [], 1024),
        ((90, 96, 4000), [], [], 96),
        ((3000, 4000), [], [], 1024),
        ((300, 400), ["data.max_side=320"], [], 320),
        ((90, 96, 4000), [], ["data.max_side=700"], 700),
        ((90, 96, 4000), ["data.max_side=700"], ["data.max_side=null"], None),
        ((90, 96, 4000), ["data.max_side=700"], ["predict.hflip=true"], 96),
    ],
)
def test_photographs_are_predicted_at_the_size_of_the_training_images(
    trained: Callable[..., Path], sides: tuple[int, ...], given: list[str], overrides: list[str], side: int | None
) -> None:
    run = trained(2, *given, sides=sides)
    assert open_trained_segmenter(run, overrides).max_side == side
    assert Predictor.load(run, overrides).max_side == side


def test_the_code_in_the_docs_runs(trained: Callable[..., Path], photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(2)
    run.rename(run.with_name("mine"))
    monkeypatch.chdir(photos)
    (photos / "mcis-workspace").symlink_to(run.parent.parent)
    (photos / "a.jpg").rename(photos / "photo.jpg")
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(lines, names)
    assert isinstance(names["labels"], np.ndarray)
    assert names["labels"].shape == (40, 60)
    assert isinstance(names["names"], list)
    assert set(names["names"]) <= {"class 0", "class 1"}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_12_megapixels_take_two_gib(trained: Callable[..., Path], tmp_path: Path, processes: int) -> None:
    """Peak memory of this process and of the CRF's processes, for twenty classes and noise, the CRF's worst case."""
    run = trained(20, "data.max_side=384")
    noise(3000, 4000).save(tmp_path / "large.ppm")
    code = f"""if __name__ == "__main__":
    import resource
    from pathlib import Path
    from mcis.datasets.sources.photographs import Photograph
    from mcis.platform.networks.predictor import Predictor
    from mcis.platform.reporting.photographs import predict_photographs
    predictor = Predictor.load({str(run)!r}, processes={processes})
    large = [Photograph({str(tmp_path / "large.ppm")!r}, name) for name in "ab"[: {processes} + 1]]
    assert predict_photographs(predictor, large, Path({str(tmp_path / "out")!r}), {{}}) == []
    predictor.close()
    status = Path("/proc/self/status").read_text().splitlines()  # getrusage remembers the process that started this one
    ours = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    print(ours * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own_peak, crf_peak = map(int, done.stdout.splitlines()[-1].split())
    assert Image.open(tmp_path / "out" / "overlays" / "a.jpg").size == (1024, 768)
    assert Image.open(tmp_path / "out" / "masks" / f"{'ab'[processes]}.png").size == (4000, 3000)
    assert own_peak + (crf_peak if processes else 0) < 2.5 * 2**30
