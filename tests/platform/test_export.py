"""What `mcis export` writes is what others read: torchvision, torch.export, VOC's server (maps: test_pipeline)."""

import csv
import gzip
import importlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.classes import VOC_CLASSES
from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels, encode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.platform.cli import app
from mcis.platform.networks.predictor import Predictor
from mcis.platform.outputs.tables import MASKS_SCHEMA, PREDICTIONS_SCHEMA
from mcis.platform.reporting import files
from mcis.platform.reporting.export import export
from mcis.platform.reporting.files import names_of
from mcis.platform.reporting.voc_server import submission_problems
from mcis.platform.runs.files import write_table
from mcis.platform.runs.results import IndexResult, PredictResult, write_result
from mcis.platform.runs.workspace import Workspace

FOLDER = "results/VOC2012/Segmentation/comp6_test_cls"


def image(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))


def labels(height: int, width: int, highest: int = 20) -> np.ndarray:
    return np.random.default_rng(width).integers(0, highest + 1, (height, width)).astype(np.uint8)


def made(workspace: Workspace, images: dict[str, Path], classes: tuple[str, ...], **tables: pa.Table) -> Workspace:
    """A run `made` with an index of these images, and with tables as its stages leave them."""
    rows = []
    for image_id, path in images.items():
        width, height = Image.open(path).size
        if Image.open(path).getexif().get(0x0112) == 6:
            height, width = width, height
        row = {"image_id": image_id, "uri": str(path), "domain": "target", "split": "test", "tags": [0]}
        rows.append(row | {"height": height, "width": width, "content_hash": image_id})
    index = workspace.output("index", "made")
    write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    write_table(index / "rejects.parquet", pa.table({"image_id": pa.array([], pa.string())}))
    write_result(index, IndexResult(classes=classes, counts={"images": {}}), key="made")
    outputs = {"index": index}
    for stage, table in tables.items():
        outputs[stage] = workspace.output(stage, "made")
        name = {"pseudo_masks": "masks", "predict": "predictions"}[stage]
        write_table(outputs[stage] / name / "part-00000000.parquet", table)
        write_result(outputs[stage], PredictResult(split="test"), key="made")
    workspace.run("made")
    workspace.record_outputs("made", outputs)
    return workspace


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    """By id: a JPEG, one that lies on its side, a PNG, a gray JPEG; ids are names, paths and URIs."""
    folder = tmp_path / "images"
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    image(60, 80).save(folder / "plain.jpg")
    image(50, 70).save(folder / "turned.jpg", exif=turned)
    image(40, 30).save(folder / "a.png")
    image(20, 30).convert("L").save(folder / "gray.jpg")
    return {
        "plain": folder / "plain.jpg",
        "s3://bucket/web/turned.jpg": folder / "turned.jpg",
        str(folder / "a.png"): folder / "a.png",
        "My photos/gray": folder / "gray.jpg",
    }


def test_pseudo_masks_are_a_devkit_that_torchvision_reads(images: dict[str, Path], tmp_path: Path) -> None:
    """Every image with its mask at its size, whatever size the mask was made at; a JPEG takes no space twice."""
    importlib.import_module("mcis.models.torchvision_ops")  # before torchvision, which it makes importable
    from torchvision.datasets import VOCSegmentation

    made_at = [(60, 80), (35, 25), (20, 15), (20, 30)]
    masks = [labels(*size, highest=2) for size in made_at]
    masks[0][:5] = 255
    table = pa.Table.from_pylist(
        [
            {"image_id": i, "labels": b"", "mask": encode_labels(m), "cue": "crf"}
            | dict.fromkeys(("ignored", "foreground", "by_maps"), 0.0)
            for i, m in zip(images, masks, strict=True)
        ],
        schema=MASKS_SCHEMA,
    )
    workspace = made(Workspace(tmp_path / "workspace"), images, ("cat", "dog"), pseudo_masks=table)
    for _ in range(2):  # what is there is replaced
        assert export(workspace, "made", "masks", tmp_path / "out").startswith("4 images and their pseudo masks in ")
    read = VOCSegmentation(str(tmp_path / "out"), year="2012", image_set="train", download=False)
    assert len(read) == 4
    for (shown, mask), (image_id, path), made_mask in zip(read, images.items(), masks, strict=True):
        size = (50, 70) if "turned" in image_id else Image.open(path).size
        assert shown.mode == "RGB"
        assert shown.size == mask.size == size
        nearest = Image.fromarray(made_mask).resize(size, Image.Resampling.NEAREST)
        np.testing.assert_array_equal(np.asarray(mask), np.asarray(nearest))
    devkit = tmp_path / "out" / "VOCdevkit" / "VOC2012"
    assert (devkit / "JPEGImages" / "plain.jpg").samefile(images["plain"])
    upright = np.asarray(Image.open(images["s3://bucket/web/turned.jpg"]).transpose(Image.Transpose.ROTATE_270))
    exported = np.asarray(Image.open(devkit / "JPEGImages" / "s3/bucket/web/turned.jpg.jpg"))
    assert np.abs(exported.astype(int) - upright).mean() < 4
    with (tmp_path / "out" / "cues.csv").open(newline="") as file:
        cues = list(csv.DictReader(file))
    assert [row["image"] for row in cues] == list(images)
    assert [row["name"] for row in cues] == (devkit / "ImageSets/Segmentation/train.txt").read_text().splitlines()
    assert (tmp_path / "out" / "labels.csv").read_text().splitlines()[2] == "1,cat,128,0,0"


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["a", "../b"], "lead out of"),
        (["s3://x/a", "s3/x/A"], "the file of another"),
        (["cat/1", "CAT/1"], "the file of another"),
        (["cat", "cat.png/1"], "below the file of another: 'cat.png/1'"),
        (["a\nb"], "line breaks"),
    ],
)
def test_ids_that_name_no_file_of_their_own_are_an_error(ids: list[str], found: str) -> None:
    with pytest.raises(UserError, match=found):
        names_of(ids, Path("out"))


def test_classes_whose_maps_would_be_one_file_are_named() -> None:
    with pytest.raises(UserError, match=r"class\(es\) that lead to the file of another: 'Sea lion'"):
        names_of(["sea lion", "cat", "Sea lion"], Path("out"), what="class(es)")


LOADS = """
import json, sys
sys.modules["mcis"] = None  # whatever imports the project fails
import numpy as np, torch
extra = {"about.json": ""}
network = torch.export.load(sys.argv[1], extra_files=extra).module()
for number, image in enumerate(np.load(sys.argv[2]).values()):
    np.save(f"{sys.argv[3]}-{number}.npy", network(torch.from_numpy(image)).argmax(0).to(torch.uint8).numpy())
print(extra["about.json"])
"""


BACKBONE = ("segmenter.backbone=timm/tf_efficientnet_lite0", "segmenter.stride=32", "segmenter.init=pretrained")


@pytest.mark.parametrize("network", ["largefov", "pyramid"])
def test_an_exported_network_gives_the_predictors_labels_without_the_project(
    trained: Callable[..., Path], tmp_path: Path, network: str
) -> None:
    """For images of any size, at one scale and without the CRF; both networks, and a backbone of timm."""
    run = trained(5, *(["segmenter.network=pyramid", *BACKBONE] if network == "pyramid" else []))
    said = export(Workspace(run.parent.parent), run.name, "network", tmp_path / "network.pt2")
    assert said.startswith("network of 5 classes in ")
    sizes = [(64, 80), (97, 33), (150, 211)]
    pictures = [np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8) for h, w in sizes]
    np.savez(tmp_path / "images.npz", *pictures)
    command = [sys.executable, "-c", LOADS, str(tmp_path / "network.pt2"), str(tmp_path / "images.npz")]
    done = subprocess.run([*command, str(tmp_path / "labels")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["classes"] == [f"class {k}" for k in range(5)]
    plain = ["predict.scales=[1.0]", "predict.mirror=false", "predict.crop=null", "predict.crf.iterations=0"]
    predictor = Predictor.load(run, plain)
    for number, picture in enumerate(pictures):
        wanted = predictor(picture)
        assert len(np.unique(wanted)) > 2
        got = np.load(tmp_path / f"labels-{number}.npy")
        assert got.shape == wanted.shape
        assert (got != wanted).mean() < 1e-3  # ties to rounding


@pytest.mark.parametrize("network", ["largefov", pytest.param("pyramid", marks=pytest.mark.slow)])
def test_an_onnx_network_gives_the_exported_ones_labels_at_any_size(
    trained: Callable[..., Path], tmp_path: Path, network: str
) -> None:
    run = trained(5, *([f"segmenter.network={network}", *BACKBONE] if network == "pyramid" else []))
    for what in ("network", "onnx"):
        export(Workspace(run.parent.parent), run.name, what, tmp_path / what)
    exported: Any = torch.export.load(tmp_path / "network").module()
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [f"class {k}" for k in range(5)]
    for h, w in [(64, 80), (97, 33), (150, 211)]:
        picture = np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8)
        wanted = exported(torch.from_numpy(picture)).argmax(0).numpy()
        (got,) = session.run(["probabilities"], {"image": picture})
        assert len(np.unique(wanted)) > 2
        assert (got.argmax(0) != wanted).mean() < 1e-3  # ties to rounding


def test_onnx_without_its_packages_says_how_to_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'mcis\[onnx\]'"):
        export(Workspace(tmp_path), "any", "onnx", tmp_path / "network.onnx")


@pytest.fixture
def submitted(tmp_path: Path) -> tuple[Path, Path, Path]:
    """An archive of the predictions of three images, the list of these, and their folder."""
    folder = tmp_path / "JPEGImages"
    folder.mkdir()
    sizes = {"2008_000001": (30, 40), "2008_000004": (25, 20), "2008_000006": (60, 30)}
    predictions = []
    for image_id, size in sizes.items():
        image(*size).save(folder / f"{image_id}.jpg")
        plain, crf = labels(*size), labels(*size, highest=7)
        predictions.append({"image_id": image_id, "plain": encode_labels(plain), "crf": encode_labels(crf)})
    table = pa.Table.from_pylist(predictions, schema=PREDICTIONS_SCHEMA)
    images = {image_id: folder / f"{image_id}.jpg" for image_id in sizes}
    workspace = made(Workspace(tmp_path / "workspace"), images, VOC_CLASSES, predict=table)
    said = export(workspace, "made", "voc-server", tmp_path / "results.tar.gz")
    assert said == f"3 predictions of split test in {tmp_path / 'results.tar.gz'}"
    (tmp_path / "test.txt").write_text("\n".join(sizes) + "\n")
    return tmp_path / "results.tar.gz", tmp_path / "test.txt", folder


def test_a_submission_is_what_the_server_takes(submitted: tuple[Path, Path, Path]) -> None:
    archive, ids, folder = submitted
    names = ids.read_text().split()
    with tarfile.open(archive) as opened:
        assert opened.getnames() == [f"{FOLDER}/{name}.png" for name in names]
        first = opened.extractfile(opened.getmembers()[0])
        assert first is not None
        np.testing.assert_array_equal(decode_labels(first.read()), labels(30, 40, highest=7))
    assert submission_problems(archive, ids=names, images=folder) == (3, [])
    counted = submission_problems(archive)
    assert counted == (3, ["3 masks; expected 1456, as many as VOC 2012 has images in that split"])
    arguments = ["check-voc-server", str(archive), "--ids", str(ids), "--images", str(folder)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.output.endswith("3 masks: names, palettes and labels are as the server takes them\n")
    failed = CliRunner().invoke(app, ["check-voc-server", str(archive)])
    assert failed.exit_code == 1
    assert "problems: 1" in failed.output


def test_a_run_of_other_classes_is_no_submission(tmp_path: Path, images: dict[str, Path]) -> None:
    table = PREDICTIONS_SCHEMA.empty_table()
    workspace = made(Workspace(tmp_path / "workspace"), images, ("cat", "dog"), predict=table)
    with pytest.raises(UserError, match="a run of the classes cat, dog"):
        export(workspace, "made", "voc-server", tmp_path / "results.tar.gz")
    assert not (tmp_path / "results.tar.gz").exists()


def png(array: np.ndarray, mode: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def rewritten(archive: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Writes the archive again with other members, by their names."""
    with tarfile.open(archive) as opened:
        members = {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]
    with tarfile.open(archive, "w:gz") as opened:
        for name, content in change(members).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))


def without_first(members: dict[str, bytes]) -> dict[str, bytes]:
    return dict(list(members.items())[1:])


ONE = f"{FOLDER}/2008_000001.png"
FILLED = {label: encode_labels(np.full((30, 40), label, np.uint8)) for label in (21, 255)}
FAULTS: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "an image without a mask": (without_first, r"no mask of 1 image\(s\): 2008_000001"),
    "another image": (lambda m: m | {f"{FOLDER}/2009_1.png": m[ONE]}, r"masks of 1 other image\(s\): 2009_1"),
    "another folder": (
        lambda m: {name.replace("comp6", "comp5"): content for name, content in m.items()},
        "stray member 'results/VOC2012/Segmentation/comp5_test_cls",
    ),
    "two splits": (
        lambda m: without_first(m) | {ONE.replace("test", "val"): m[ONE]},
        "masks of several splits: test, val",
    ),
    "a stray file": (lambda m: m | {"results/.DS_Store": b"x"}, r"stray member 'results/.DS_Store'"),
    "no palette": (lambda m: m | {ONE: png(labels(30, 40), "L")}, "2008_000001.png: no palette"),
    "colors": (lambda m: m | {ONE: png(labels(30, 40), "RGB")}, "2008_000001.png: unsupported: a mask of mode RGB"),
    "no picture": (lambda m: m | {ONE: b"no picture"}, "2008_000001.png: not an image"),
    "a cut picture": (lambda m: m | {ONE: m[ONE][:-40]}, "2008_000001.png: (truncated|corrupt)"),
    "another size": (lambda m: m | {ONE: encode_labels(labels(31, 40))}, "40x31 pixels; its image has 40x30"),
    "a label too many": (lambda m: m | {ONE: FILLED[21]}, "labels 21; expected 0..20"),
    "ignored pixels": (lambda m: m | {ONE: FILLED[255]}, "labels 255; expected 0..20"),
    "a huge picture": (
        lambda m: m | {ONE: encode_labels(np.zeros((2000, 2000), np.uint8))},
        "2008_000001.png: too large: 2000x2000 pixels",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_submission_is_the_one_problem_that_is_found(
    submitted: tuple[Path, Path, Path], fault: str
) -> None:
    archive, ids, folder = submitted
    change, expected = FAULTS[fault]
    rewritten(archive, change)
    _, problems = submission_problems(archive, ids=ids.read_text().split(), images=folder)
    assert [problem for problem in problems if re.search(expected, problem)], problems
    if fault != "another folder":  # whose masks are all missing
        assert len(problems) == 1


def test_a_mask_that_is_there_twice_is_found(submitted: tuple[Path, Path, Path]) -> None:
    archive, ids, _ = submitted
    with gzip.open(archive) as opened:
        unpacked = io.BytesIO(opened.read())
    with tarfile.open(fileobj=unpacked, mode="a") as appended:
        add(appended, ONE, encode_labels(labels(30, 40)))
    archive.write_bytes(gzip.compress(unpacked.getvalue()))
    assert submission_problems(archive, ids=ids.read_text().split()) == (3, [f"{ONE} is there twice"])


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **attributes: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    archive.addfile(member, io.BytesIO(content))


def bomb(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that says that a gigabyte follows, and zeros; tarfile would read an extended header whole."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, 2**30
    return gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(2**24))


def with_members(*names: str, **attributes: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name in names:
            add(archive, name, **attributes)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("results/../../x.png", {}),
        ("/tmp/x.png", {}),
        (ONE, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        (ONE, {"type": tarfile.CHRTYPE}),
    ],
    ids=["a path that climbs", "an absolute path", "a link", "a device"],
)
def test_a_member_that_is_no_mask_is_a_problem(name: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.tar.gz").write_bytes(with_members(name, **attributes))
    assert submission_problems(tmp_path / "results.tar.gz", ids=[]) == (0, [f"stray member {name!r}"])


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a member of a gigabyte": lambda: bomb(ONE),
    "a name of a gigabyte": lambda: bomb("././@LongLink", tarfile.GNUTYPE_LONGNAME),
    "too many bytes": lambda: gzip.compress(bytes(2**27 + 1), 1),
    "a cut archive": lambda: with_members(ONE)[:-9],
    "no archive": lambda: b"no archive",
    "an empty file": lambda: b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "results.tar.gz").write_bytes(HOSTILE[case]())
    with pytest.raises(UserError, match="cannot be read"):
        submission_problems(tmp_path / "results.tar.gz")


def test_pictures_are_taken_as_they_are_written() -> None:
    """Of a million rows some are in memory, never all."""
    taken: list[int] = []
    written: list[int] = []

    def rows() -> Iterator[int]:
        for row in range(200):
            taken.append(row)
            yield row

    def write(row: int) -> int:
        assert len(taken) - len(written) <= 5 * files._AT_ONCE + 1
        written.append(row)
        return 2

    assert files.write_all(rows(), write, label="pictures", total=200) == 400
    assert sorted(written) == taken
