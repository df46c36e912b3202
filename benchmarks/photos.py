"""Files of VOC's size for the benchmarks: 500 x 375 pixels, about 60 KB, each another picture."""

import io
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

WIDTH, HEIGHT = 500, 375


def make(folder: Path, count: int, *, seed: int = 0) -> list[str]:
    """Writes `count` JPEGs and returns their paths: noise of several grains, of as many bytes as a photo."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    grains = [np.zeros((HEIGHT, WIDTH, 3))]
    for cell, weight in ((4, 22), (16, 40), (64, 60)):
        shape = (HEIGHT // cell + 2, WIDTH // cell + 2, 3)
        noise = Image.fromarray(rng.integers(0, 256, shape, np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        grains.append((np.asarray(noise) - 127.5) * weight / 64)
    base = 127.5 + sum(grains)
    paths = []
    for number in range(count):
        picture = np.roll(base, rng.integers(0, (HEIGHT, WIDTH)), axis=(0, 1)) + rng.integers(-30, 30, 3)
        stream = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=88)
        path = folder / f"{number:06d}.jpg"
        path.write_bytes(stream.getvalue())
        paths.append(str(path))
    return paths


def rows(paths: list[str]) -> pa.Table:
    """What of an index reads the files: columns `uri` and `content_hash`."""
    return pa.table({"uri": paths, "content_hash": [sha256(Path(path).read_bytes()).hexdigest() for path in paths]})
