"""JPEG files of VOC's size for the benchmarks: 500 x 375 pixels, about 60 KB, with different content."""

import io
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

WIDTH = 500
HEIGHT = 375
_NOISE = ((4, 22), (16, 40), (64, 60))
"""Cell size in pixels and amplitude of the noise. The files then have as many bytes as photographs."""


def write_jpegs(folder: Path, count: int, *, seed: int = 0) -> list[str]:
    """Writes `count` JPEGs of noise and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    noise_sum = np.zeros((HEIGHT, WIDTH, 3))
    for cell, amplitude in _NOISE:
        shape = (HEIGHT // cell + 2, WIDTH // cell + 2, 3)
        noise = Image.fromarray(rng.integers(0, 256, shape, np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        noise_sum += (np.asarray(noise) - 127.5) * amplitude / 64

    base = 127.5 + noise_sum
    paths = []
    for number in range(count):
        picture = np.roll(base, rng.integers(0, (HEIGHT, WIDTH)), axis=(0, 1)) + rng.integers(-30, 30, 3)
        stream = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=88)
        path = folder / f"{number:06d}.jpg"
        path.write_bytes(stream.getvalue())
        paths.append(str(path))
    return paths


def file_rows(paths: list[str]) -> pa.Table:
    """Returns the columns `uri` and `content_hash` of an index, which readers of the files need."""
    hashes = [sha256(Path(path).read_bytes()).hexdigest() for path in paths]
    return pa.table({"uri": paths, "content_hash": hashes})
