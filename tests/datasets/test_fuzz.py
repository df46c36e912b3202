"""Fuzz tests of the index: each damaged file is accepted or rejected with a reason, and none ends a run."""

import collections
import io
import re
import resource
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.images.decode import MAX_PIXELS, RejectedImage, decode_picture
from mcis.datasets.images.value_range import likely_range
from mcis.datasets.index import LISTING_SCHEMA, check_images
from mcis.platform.cli import app
from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.workspace import Workspace

FILES = 2500
H = 40
W = 48
PIXELS = np.random.default_rng(1).integers(0, 256, (H, W, 3), np.uint8)
PIXELS[10:30, 10:30] = (200, 30, 30)  # compressible

RANGE = (0.0, 1.0)
"""Values of `data.value_range`."""

Damage = Callable[[bytes, np.random.Generator], bytes]


def saved(image: Image.Image | np.ndarray, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a description"
    return exif


GREY = PIXELS[..., 0]
RGB = Image.fromarray(PIXELS)
FRAMES = {"save_all": True, "append_images": [RGB.rotate(180)]}
SEEDS = {
    "jpeg": saved(RGB, "JPEG"),
    "jpeg progressive": saved(RGB, "JPEG", progressive=True),
    "jpeg turned": saved(RGB, "JPEG", exif=turned()),
    "jpeg cmyk": saved(RGB.convert("CMYK"), "JPEG"),
    "jpeg gray": saved(GREY, "JPEG"),
    "mpo": saved(RGB, "MPO", **FRAMES),
    "png": saved(RGB, "PNG", exif=turned()),
    "png 16": saved(GREY.astype(np.uint16) * 257, "PNG"),
    "png palette": saved(RGB.quantize(16), "PNG", transparency=3),
    "png hidden": saved(np.dstack([PIXELS, np.zeros((H, W), np.uint8)]), "PNG"),
    "png alpha": saved(RGB.convert("RGBA"), "PNG"),
    "png animated": saved(RGB, "PNG", **FRAMES),
    "gif": saved(RGB, "GIF", **FRAMES),
    "bmp": saved(RGB, "BMP"),
    "bmp palette": saved(RGB.quantize(16), "BMP"),
    "webp": saved(RGB, "WEBP"),
    "webp lossless": saved(RGB.convert("RGBA"), "WEBP", lossless=True, exif=turned()),
    "webp animated": saved(RGB, "WEBP", **FRAMES),
    "tiff": saved(RGB, "TIFF"),
    "tiff lzw": saved(RGB, "TIFF", compression="tiff_lzw"),
    "tiff jpeg": saved(RGB, "TIFF", compression="jpeg"),
    "tiff 16": saved(GREY.astype(np.uint16) * 257, "TIFF"),
    "tiff 32": saved(GREY.astype(np.int32) * 9 - 70, "TIFF"),
    "tiff float": saved(GREY.astype(np.float32) / 255, "TIFF"),
    "ppm": saved(RGB, "PPM"),
    "avif": saved(RGB, "AVIF"),
    "avif animated": saved(RGB, "AVIF", **FRAMES),
    "jp2": saved(RGB, "JPEG2000"),
    "jp2 16": saved(GREY.astype(np.uint16) * 16, "JPEG2000"),
    "jp2 alpha": saved(RGB.convert("RGBA"), "JPEG2000"),
    "pgm plain": b"P2 40 40 255\n" + b" ".join(str(v).encode() for v in GREY[:40, :40].ravel()),
}


# --- damages


def flip_bits(data: bytes, draw: np.random.Generator) -> bytes:
    out = bytearray(data)
    near_start = draw.random() < 0.5
    for _ in range(draw.integers(1, 20)):
        out[draw.integers(min(len(out), 120) if near_start else len(out))] ^= 1 << draw.integers(8)
    return bytes(out)


def truncate(data: bytes, draw: np.random.Generator) -> bytes:
    return data[: draw.integers(len(data))]


def set_extreme_fields(data: bytes, draw: np.random.Generator) -> bytes:
    """Sets some fields of 2 or 4 bytes, mostly in the header, to extreme values."""
    out = bytearray(data)
    for _ in range(draw.integers(1, 4)):
        kind = draw.choice(["<H", ">H", "<I", ">I"])
        value = draw.choice([0, 1, 255, 32767, 32768, 65000, 65535] + [2**31 - 1, 2**31, 2**32 - 1] * ("I" in kind))
        offset = draw.integers(min(len(out), 160 if draw.random() < 0.8 else len(out)) - 4)
        struct.pack_into(str(kind), out, int(offset), int(value))
    return bytes(out)


def join_files(data: bytes, draw: np.random.Generator) -> bytes:
    other = list(SEEDS.values())[draw.integers(len(SEEDS))]
    return data[: draw.integers(len(data) + 1)] + other[draw.integers(len(other)) * draw.integers(2) :]


def insert_bytes(data: bytes, draw: np.random.Generator) -> bytes:
    offset = int(draw.integers(len(data)))
    size = int(draw.integers(1, 200))
    more = draw.bytes(size) if draw.random() < 0.5 else bytes(size)
    return data[:offset] + more + data[offset + (size if draw.random() < 0.3 else 0) :]


def remove_bytes(data: bytes, draw: np.random.Generator) -> bytes:
    offset = draw.integers(len(data))
    return data[:offset] + data[offset + draw.integers(1, 60) :]


def change_size(data: bytes, draw: np.random.Generator) -> bytes:
    sizes = (0, 1, 31, 47, 500, 1000, 20000, 65000, 65535)
    return with_size(data, int(draw.choice(sizes)), int(draw.choice(sizes)))


DAMAGES: tuple[Damage, ...] = (
    flip_bits,
    truncate,
    set_extreme_fields,
    join_files,
    insert_bytes,
    remove_bytes,
    change_size,
)


def with_size(data: bytes, width: int, height: int) -> bytes:
    """Returns the file with another size in its header."""
    out = bytearray(data)
    if data.startswith(b"\x89PNG"):
        struct.pack_into(">II", out, 16, width, height)
    elif data.startswith(b"GIF"):
        struct.pack_into("<HH", out, 6, width, height)
    elif data.startswith(b"BM"):
        struct.pack_into("<ii", out, 18, width, height)
    elif data.startswith(b"\xff\xd8"):
        for frame in re.finditer(rb"\xff[\xc0\xc2]\x00.\x08", data, re.DOTALL):
            struct.pack_into(">HH", out, frame.end(), height, width)
    elif data.startswith(b"II*\0"):
        start = struct.unpack_from("<I", data, 4)[0]
        for offset in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", data, start)[0], 12):
            tag = struct.unpack_from("<H", data, offset)[0]
            if tag in (256, 257, 278):  # ImageWidth, ImageLength, RowsPerStrip
                struct.pack_into("<HII", out, offset + 2, 4, 1, width if tag == 256 else height)
    elif data[8:16] == b"WEBPVP8X":
        out[24:30] = (width - 1 & 0xFFFFFF).to_bytes(3, "little") + (height - 1 & 0xFFFFFF).to_bytes(3, "little")
    elif data[8:16] == b"WEBPVP8 ":
        struct.pack_into("<HH", out, 26, width & 0x3FFF, height & 0x3FFF)
    elif data[8:16] == b"WEBPVP8L":
        struct.pack_into("<I", out, 21, (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14)
    elif data[4:12] == b"ftypavif" or data[4:12] == b"ftypavis":
        for box in re.finditer(rb"ispe\0{4}", data):  # image spatial extents
            struct.pack_into(">II", out, box.end(), width, height)
    elif data[4:8] == b"jP  ":
        struct.pack_into(">II", out, data.index(b"ihdr") + 4, height, width)
        struct.pack_into(">II", out, data.index(b"\xff\x51") + 6, width, height)  # Xsiz and Ysiz of the codestream
    else:
        return re.sub(rb"(?<=P[256][ \n])\d+ \d+", f"{width} {height}".encode(), data, count=1)
    return with_valid_checksums(bytes(out))


def with_valid_checksums(data: bytes) -> bytes:
    """Returns a PNG with corrected checksums, so that decoders read the damaged parts; other formats unchanged."""
    if not data.startswith(b"\x89PNG"):
        return data
    out = bytearray(data)
    offset = 8
    while offset + 12 <= len(out):
        end = offset + 8 + struct.unpack_from(">I", out, offset)[0]
        if end + 4 > len(out):
            break
        struct.pack_into(">I", out, end, zlib.crc32(out[offset + 4 : end]))
        offset = end + 4
    return bytes(out)


def damaged_files(count: int) -> dict[str, bytes]:
    """Returns damaged files by name. Each seed and kind of damage is equally frequent; some files are damaged twice."""
    names = list(SEEDS)
    files = {}
    for i in range(count):
        draw = np.random.default_rng([7, i])
        name = names[i % len(names)]
        damage = DAMAGES[i // len(names) % len(DAMAGES)]
        data = damage(SEEDS[name], draw)
        if data and draw.random() < 0.2:
            data = flip_bits(data, draw)
        files[f"{i:05d} {name} {damage.__name__}"] = with_valid_checksums(data) if draw.random() < 0.8 else data
    return files


# --- results


def write_files(folder: Path, files: dict[str, bytes]) -> pa.Table:
    rows = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        row = {"image_id": name, "uri": str(folder / name), "domain": "web", "split": "train", "tags": []}
        rows.append(row | {"is_negative": False})
    return pa.Table.from_pylist(rows, schema=LISTING_SCHEMA)


def range_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Returns a range for an image that needs one."""
    return likely_range(row["pixels"], row["low"], row["high"]) if row["pixels"] in ("integers", "floats") else None


def is_valid_reason(reason: str) -> bool:
    return 0 < len(reason) < 500 and reason.isprintable() and bool(reason.encode("utf-8"))


def test_damaged_files_are_accepted_or_rejected_with_a_reason(tmp_path: Path) -> None:
    files = damaged_files(FILES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = write_files(tmp_path, files)
        found = pa.concat_tables(check_images(table.slice(start, 250)) for start in range(0, len(table), 250))

    assert found["image_id"].to_pylist() == list(files), "each exactly once, in order"
    kinds: collections.Counter[str] = collections.Counter()
    for row in found.to_pylist():
        reason = row["reason"]
        if reason is not None:
            assert is_valid_reason(reason), (row["image_id"], reason)
            assert (row["height"], row["width"]) == (0, 0)
            kinds[reason.partition(":")[0]] += 1
            continue
        rgb = decode_picture(files[row["image_id"]], value_range=range_of(row)).rgb
        assert rgb.dtype == np.uint8
        assert rgb.shape == (row["height"], row["width"], 3)
        assert min(rgb.shape[:2]) >= 32
        assert row["height"] * row["width"] <= MAX_PIXELS
        kinds["accepted"] += 1
    often = ("accepted", "not an image", "too large", "too small", "truncated", "corrupt")

    assert set(kinds) <= {*often, "empty", "unsupported"}
    assert min(kinds[kind] for kind in often) > FILES / 50, f"the damages differ in depth: {kinds}"


@pytest.mark.slow
def test_an_index_of_damaged_files_lists_each_of_them(ray_local: None, tmp_path: Path) -> None:
    """Runs `mcis index tags` on a folder of files and a table, and reads the index."""
    files = damaged_files(4 * FILES) | {"whole": SEEDS["jpeg"], "nothing": b""}
    images = tmp_path / "images"
    images.mkdir()
    write_files(images, files)
    (images / "folder").mkdir()
    names = [*files, "folder", "absent"]
    lines = [f"images/{name},{'cat' if n % 2 else 'dog'}" for n, name in enumerate(names)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,tags", *lines]) + "\n")
    workspace = ["--workspace", str(tmp_path / "workspace")]
    value_range = "data.value_range={},{}".format(*RANGE)
    done = CliRunner().invoke(app, ["index", "tags", str(tmp_path / "photos.csv"), value_range, *workspace])

    assert done.exit_code == 0, done.output

    found = open_index(Workspace(tmp_path / "workspace"), "index-tags")
    accepted = found.index["uri"].to_pylist()
    rejected = found.rejects["uri"].to_pylist()
    assert sorted(accepted + rejected) == sorted(str(images / name) for name in names), "each in one of them, once"

    reasons = dict(zip((Path(uri).name for uri in rejected), found.rejects["reason"].to_pylist(), strict=True))
    assert all(map(is_valid_reason, reasons.values()))
    assert {"nothing", "folder", "absent"} <= set(reasons)
    assert str(images / "whole") in accepted
    assert min(len(accepted), len(rejected)) > len(names) / 20
    assert f"rejected: {len(rejected)}" in done.output

    for row in found.index.to_pylist():
        rgb = decode_picture(files[Path(row["uri"]).name], value_range=RANGE).rgb
        assert rgb.shape == (row["height"], row["width"], 3)
    browsed = CliRunner().invoke(app, ["index", "browse", "--name", "index-tags", *workspace])
    assert browsed.exit_code == 0, browsed.output


@pytest.mark.parametrize("name", SEEDS)
def test_a_size_in_a_header_allocates_no_memory(tmp_path: Path, name: str) -> None:
    side = 16383 if name.startswith("webp") and "VP8X" not in str(SEEDS[name][:20]) else 65000
    table = write_files(tmp_path, {name: with_size(SEEDS[name], side, side)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (reason,) = check_images(table)["reason"].to_pylist()

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert reason is not None
    assert is_valid_reason(reason)

    if not name.startswith(("webp", "avif")):  # their libraries compare the sizes of a file's parts first
        assert reason.startswith("too large: "), reason


def test_messages_of_decoders_become_one_printable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise ValueError("a\nb\x00\x1b[31m\u202e\udcff 'secret'" + "x" * 10_000 + ": secret")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)

    with pytest.raises(RejectedImage) as caught:
        decode_picture(SEEDS["png"])
    assert is_valid_reason(caught.value.reason)
    assert caught.value.reason.startswith("corrupt: ValueError: a b??[31m?? ...x")


def test_invalid_paths_are_rejected(tmp_path: Path) -> None:
    rows = [
        {"image_id": str(i), "uri": uri, "domain": "web", "split": "train", "tags": []}
        for i, uri in enumerate(["a\0b", "", str(tmp_path), str(tmp_path / ("x" * 5000)), "nowhere://a/b.jpg"])
    ]
    for reason in check_images(pa.Table.from_pylist(rows, schema=LISTING_SCHEMA))["reason"].to_pylist():
        assert reason.startswith("cannot be read: ")
        assert is_valid_reason(reason)
        assert not reason.endswith("None")
