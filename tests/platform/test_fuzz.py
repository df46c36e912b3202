"""Damaged files of every kind that a user hands over, but for images: each is taken, or refused by a documented error.

The files are opened in a process of their own, which this module is when it is run as a script: a reader that ends the
process, or needs more than 30 seconds for a file, is found too.
"""

import collections
import functools
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Open = Callable[[Path], object]
SECONDS = 30
MESSAGE = 3 * 4000 + 100
IMAGE_FUZZ = Path(__file__).parents[1] / "datasets" / "test_fuzz.py"
TOKENS = [b"", b"../../x", b"\0", b"1e999", b"-1", b"9" * 400, b"[" * 3000, b"{", b'"', b"\xef\xbb\xbf", b"\xff"]
TOKENS += [b"nan", b"null", b"'", b"\r", b"/etc/passwd", b"file:///etc/passwd", b"s3://[b/a", b"a" * 70_000, b";"]
TOKENS += [b"\xe2\x80\xae"]


# --- sound files, and what opens them: kind -> content, name, and the function that reads the file


def tables(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mcis.datasets.sources.tagged import list_tagged

    for n in range(6):
        (folder / f"{n}.png").touch()
    tags = ["potted plant", "cat;dog"] * 3
    rows = [{"image": f"{n}.jpg", "tags": tags[n], "mask": f"{n}.png", "split": "train", "id": n} for n in range(6)]
    csv = "image,tags,mask,split,id\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    parquet = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row | {"tags": str(row["tags"]).split(";")} for row in rows]), parquet)
    return {
        "table csv": (csv.encode(), "t.csv", list_tagged),
        "table jsonl": ("".join(json.dumps(row) + "\n" for row in rows).encode(), "t.jsonl", list_tagged),
        "table parquet": (parquet.getvalue(), "t.parquet", list_tagged),
    }


def lists(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    from mcis.datasets.classes import read_classes
    from mcis.datasets.sources.lid import list_lid
    from mcis.datasets.sources.single_label import list_single_label
    from mcis.datasets.sources.voc import list_voc

    names = [f"2007_{n:06d}" for n in range(6)]
    lid, voc, single = folder / "lid", folder / "voc", folder / "single"
    for name in names:
        for path in (lid / "img" / f"{name}.jpg", voc / "JPEGImages" / f"{name}.jpg", single / "n1" / f"{name}.jpg"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    sets, notes = voc / "ImageSets/Segmentation", voc / "Annotations"
    sets.mkdir(parents=True)
    notes.mkdir()
    classes, last = b"cat\ndog\ncow\n", names.pop()
    listed = "".join(f"img/{name}.jpg {n % 3} 1\n" for n, name in enumerate(names)).encode()
    words = "".join(f"{name}\n" for name in names).encode()
    tagged = "".join(f"{name} {n % 3}\n" for n, name in enumerate(names)).encode()
    for root in (lid, voc):
        (root / "classes.txt").write_bytes(classes)
    (lid / "val.txt").write_text(f"img/{last}.jpg 0\n")
    (sets / "v.txt").write_text(f"{last}\n")
    (sets / "v_cls.txt").write_text(f"{last} 0\n")
    for n, name in enumerate([*names, last]):
        thing = f"<object><name>{['cat', 'dog', 'cow'][n % 3]}</name><difficult>0</difficult></object>"
        (notes / f"{name}.xml").write_text(f"<annotation>{thing}</annotation>")

    def of_lid(path: Path) -> object:
        return list_lid(lid, train_list=path, val_list=Path("val.txt"), classes=Path("classes.txt"))

    def of_voc(path: Path, name: str = "t.txt", tags_from: str = "xml") -> object:
        (sets / "t.txt").write_bytes(words)
        (sets / name).write_bytes(path.read_bytes())
        return list_voc(voc, classes=voc / "classes.txt", train_list="t", val_list="v", tags_from=tags_from)

    def of_annotation(path: Path) -> object:
        return of_voc(path, f"../../Annotations/{names[0]}.xml")

    def of_single(path: Path) -> object:
        return list_single_label([single], ("cat", "dog", "cow"), classes=path)

    return {
        "list lid": (listed, "l.txt", of_lid),
        "list voc": (words, "l.txt", of_voc),
        "list tagged": (tagged, "l.txt", lambda path: of_voc(path, "t_cls.txt", "lists")),
        "annotation": ((notes / f"{names[0]}.xml").read_bytes(), "a.xml", of_annotation),
        "classes": (classes, "c.txt", read_classes),
        "classes text": (b"n1 cat\nn2 dog\n", "c.txt", of_single),
    }


def data_sets(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    """Files that `mcis import` reads. Their image is img.png."""
    from mcis.datasets.formats.importing import import_data_set

    (folder / "img.png").write_bytes(images_module().saved(images_module().GREY, "PNG"))
    square = [8.0, 8.0, 30.0, 8.0, 30.0, 30.0, 8.0, 30.0]
    corners = [[8.0, 8.0], [30.0, 8.0], [30.0, 30.0]]
    size = {"height": 40, "width": 48}
    coco = {
        "images": [{"id": 1, "file_name": "img.png", **size}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "segmentation": [square]},
            {"id": 2, "image_id": 1, "category_id": 2, "segmentation": {"size": [40, 48], "counts": [900, 1020]}},
        ],
    }
    shapes = [{"label": "cat", "points": corners, "shape_type": "polygon"}]
    labelme = {"flags": {"in": True}, "shapes": shapes, "imagePath": "img.png", "imageHeight": 40, "imageWidth": 48}
    results = [{"type": "polygonlabels", "value": {"points": corners, "polygonlabels": ["cat"]}}]
    tasks = [{"data": {"image": "/data/local-files/?d=img.png"}, "annotations": [{"result": results}]}]
    voc = b"<annotation><filename>img.png</filename><object><name>cat</name></object></annotation>"
    cvat = (
        b'<annotations><image name="img.png" width="48" height="40">'
        b'<polygon label="cat" points="8,8;30,8;30,30"/>'
        b'<mask label="dog" left="1" top="1" width="3" height="2" rle="2,4"/></image></annotations>'
    )

    def reader(format: str) -> Open:
        return lambda path: import_data_set(format, path, folder / "imported" / format, images=folder)

    return {
        "import coco": (json.dumps(coco).encode(), "coco.json", reader("coco")),
        "import labelme": (json.dumps(labelme).encode(), "labelme.json", reader("labelme")),
        "import labelstudio": (json.dumps(tasks).encode(), "tasks.json", reader("labelstudio")),
        "import vocxml": (voc, "voc.xml", reader("vocxml")),
        "import cvat": (cvat, "cvat.xml", reader("cvat")),
    }


def weights(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    import safetensors.torch
    import torch

    from mcis.models.pretrained import read_state_dict
    from mcis.platform.networks.weights_files import load_weights

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2))
    plain, with_about = io.BytesIO(), io.BytesIO()
    torch.save(network.state_dict(), plain)
    torch.save({"state_dict": network.state_dict(), "about": {"classes": ["cat"]}}, with_about)

    def read(path: Path) -> object:
        return read_state_dict(path, "name another file")

    return {
        "weights pth": (plain.getvalue(), "w.pth", read),
        "weights safetensors": (safetensors.torch.save(network.state_dict()), "w.safetensors", read),
        "checkpoint": (with_about.getvalue(), "c.pt", lambda path: load_weights(network, path)),
    }


def texts(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    from mcis.platform.config.experiment import experiment_text
    from mcis.platform.config.resolve import resolve
    from mcis.tuning.definition import LIBRARY, read_definition

    resolved = resolve("voc", "scratch", {"data.voc": str(folder)})
    short = experiment_text(resolved.config, resolved.origins).encode()
    return {
        "configuration": (short, "e.toml", lambda path: resolve(file=path)),
        "study": (min(LIBRARY.glob("*.toml")).read_bytes(), "s.toml", lambda path: read_definition(str(path))),
    }


def pictures(folder: Path) -> dict[str, tuple[bytes, str, Open]]:
    """Masks and saliency maps as stages read them."""
    import scipy.io

    from mcis.datasets.images.masks import read_saliency, read_truth

    def truth(path: Path) -> object:
        return read_truth(str(path), (40, 48), 20)

    image_fuzz = images_module()
    sbd_file = io.BytesIO()
    labels = np.zeros((40, 48), np.uint8)
    labels[10:30, 10:30] = 2
    content = {"GTcls": {"Boundaries": np.zeros((2, 1), object), "Segmentation": labels}}
    scipy.io.savemat(sbd_file, content, do_compression=True)
    saliency = image_fuzz.saved(image_fuzz.GREY, "PNG")
    return {
        "mask png": (image_fuzz.saved(labels, "PNG"), "m.png", truth),
        "mask mat": (sbd_file.getvalue(), "m.mat", truth),
        "saliency": (saliency, "s.png", lambda path: read_saliency(str(path), (40, 48))),
    }


@functools.cache
def images_module() -> Any:
    """The module that damages images, imported by path, because tests are not a package."""
    spec = importlib.util.spec_from_file_location("image_fuzz", IMAGE_FUZZ)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- damages


def swapped(data: bytes, draw: np.random.Generator) -> bytes:
    """Replaces some words of a text by others or by words that are difficult for parsers."""
    words = re.split(rb"([\s,;:\"\[\]{}=/<>]+)", data)
    for _ in range(draw.integers(1, 4)):
        at = int(draw.integers(len(words)))
        words[at] = TOKENS[draw.integers(len(TOKENS))] if draw.random() < 0.7 else words[draw.integers(len(words))]
    return b"".join(words)


def nudged(data: bytes, draw: np.random.Generator) -> bytes:
    """Changes one byte, or replaces one word by the one before it; small files do not survive more."""
    if draw.random() < 0.5:
        at = int(draw.integers(len(data)))
        return data[:at] + draw.bytes(1) + data[at + 1 :]
    words = re.split(rb"(\W+)", data)
    at = int(draw.integers(2, max(3, len(words))))
    return b"".join([*words[:at], words[at - 2], *words[at + 1 :]])


def with_valid_tar_checksums(data: bytes) -> bytes:
    """Corrects the checksums of a tar archive's headers, so that readers get past them."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def damage(data: bytes, draw: np.random.Generator) -> bytes:
    """Damages the content of a file once or twice. Most checksums are corrected, so that readers get past them."""
    image_fuzz = images_module()
    damages = [*image_fuzz.DAMAGES[:-1], nudged, nudged, nudged, swapped, swapped]
    damaged: bytes = damages[draw.integers(len(damages))](data, draw)
    if damaged and draw.random() < 0.2:
        damaged = damages[0](damaged, draw)
    if draw.random() < 0.8:
        damaged = with_valid_tar_checksums(image_fuzz.with_valid_checksums(damaged))
    return damaged


def outcome_of(read: Open, path: Path) -> str:
    """Opens a file: `taken`, `refused`, or `refused by` a message that is too long or not printable.

    Raises:
        Exception: The reader raised another error than the documented ones.
    """
    from mcis.datasets.errors import UserError

    try:
        read(path)
    except UserError as refused:
        text = str(refused)
        is_legible = len(text) < MESSAGE and re.sub(r"[\n\t]", " ", text).isprintable()
        return "refused" if is_legible else f"refused by {text[:300]!r}"
    return "taken"


def run(count: int, seed: int) -> dict[str, dict[str, int]]:
    """Damages and opens `count` files, each kind equally often; kind -> outcome -> number.

    Raises:
        SystemExit: A reader raised another error than the documented ones.
    """
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds: dict[str, tuple[bytes, str, Open]] = {}
        for make_files in (pictures, tables, lists, data_sets, weights, texts):
            kinds |= make_files(folder)
        for data, file, read in kinds.values():  # sound files are taken
            path = folder / file
            path.write_bytes(data)
            read(path)

        for number in range(count):
            kind = list(kinds)[number % len(kinds)]
            data, file, read = kinds[kind]
            path = folder / file
            path.write_bytes(damage(data, np.random.default_rng([seed, number])))
            print(f"{number} {kind}", file=sys.stderr)  # the last line says which file ended the process
            signal.alarm(SECONDS)
            try:
                outcomes[kind][outcome_of(read, path)] += 1
            except BaseException:
                traceback.print_exc()
                raise SystemExit(f"file {number}, {kind}") from None
            finally:
                signal.alarm(0)
    return {kind: dict(counts) for kind, counts in outcomes.items()}


def opened(count: int, seed: int) -> dict[str, dict[str, int]]:
    """Calls `run` in a separate process."""
    command = [sys.executable, __file__, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-4000:]}"
    outcomes: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    assert all(set(counts) <= {"taken", "refused"} for counts in outcomes.values()), f"illegible messages: {outcomes}"
    assert sum(sum(counts.values()) for counts in outcomes.values()) == count, "each has one outcome"
    return outcomes


def test_damaged_files_of_every_kind_are_read_or_refused() -> None:
    outcomes = opened(300, seed=1)
    assert len(outcomes) == 22
    total = collections.Counter[str]()
    for counts in outcomes.values():
        total.update(counts)
    assert min(total["taken"], total["refused"]) > 20, f"the damages differ in depth: {total}"


@pytest.mark.slow
def test_five_thousand_damaged_files_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = opened(5_000, seed=2)
    with capsys.disabled():
        print()
        for kind, counts in sorted(outcomes.items()):
            print(f"{kind:22}{counts.get('taken', 0):6} taken {counts.get('refused', 0):6} refused")
    for kind, counts in outcomes.items():
        assert counts.get("refused", 0) > 0, f"no damage reaches {kind}"


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
