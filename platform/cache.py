"""The workspace's cache of decoded images: built in parallel when first asked for, bounded, shared by all runs."""

import os
import shutil
from pathlib import Path

import pyarrow as pa

from mcis.datasets.decode import RULES
from mcis.datasets.images import MakeSquares, image_bytes
from mcis.platform.config import ComputeConfig
from mcis.platform.context import RunContext
from mcis.platform.mapping import map_table
from mcis.platform.workspace import disk_errors, fingerprint

_GIB = 2**30


def decoded_cache(
    rows: pa.Table, size: int, context: RunContext, compute: ComputeConfig, *, middle: bool = False
) -> Path | None:
    """The folder with the first of these images at size x size pixels, as many as compute.cache_gb allows.

    Caches that were not used for longest make room. Their readers, if there are any, decode from the files instead.

    Args:
        rows: rows of the index, in the order that the readers' positions count.
    """
    bound = int(compute.cache_gb * _GIB)
    count = min(len(rows), bound // image_bytes(size))
    if not count:
        return None
    rows = rows.slice(0, count)
    workspace = context.workspace
    content = fingerprint(RULES, rows["content_hash"].to_pylist())
    folder = workspace.cache / f"{'middle' if middle else 'squash'}{size}-{content}"
    with workspace.lock("cache", folder.name), disk_errors(folder):
        if folder.exists():
            os.utime(folder)
            return folder
        part = folder.with_suffix(".part")
        with workspace.lock("cache", "room"):
            _make_room(workspace.cache, bound - count * image_bytes(size), part)
            part.mkdir(exist_ok=True)
        make = (MakeSquares, (size, middle))
        map_table(rows, *make, part, label="decode", shard_rows=compute.shard_rows, suffix="arrow")
        part.rename(folder)
    return folder


def _make_room(cache: Path, allowed: int, own: Path) -> None:
    """Removes whole caches, the one not used for longest first, until the others take no more than `allowed` bytes.

    A part that was left half made is one of them. A folder is renamed before it is removed: what has its name is whole.
    """
    folders = sorted((p for p in cache.iterdir() if p.is_dir() and p != own), key=lambda p: p.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    for place, folder in enumerate(folders):
        if sum(sizes[place:]) <= allowed and folder.suffix != ".gone":
            continue
        gone = folder.with_suffix(".gone")
        if gone != folder:
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
