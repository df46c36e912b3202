"""The workspace's cache of decoded images: built in parallel when first asked for, bounded, shared by all runs."""

import os
import shutil
from pathlib import Path

import pyarrow as pa

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
    folder = (
        workspace.cache / f"{'middle' if middle else 'squash'}{size}-{fingerprint(rows['content_hash'].to_pylist())}"
    )
    with workspace.lock("cache", folder.name), disk_errors(folder):
        if folder.exists():
            os.utime(folder)
            return folder
        _make_room(workspace.cache, bound - count * image_bytes(size))
        part = folder.with_suffix(".part")
        map_table(
            rows, MakeSquares, (size, middle), part, label="decode", shard_rows=compute.shard_rows, suffix="arrow"
        )
        part.rename(folder)
    return folder


def _make_room(cache: Path, allowed: int) -> None:
    """Removes whole caches, the one not used for longest first, until the rest takes no more than `allowed` bytes."""
    folders = sorted(
        (p for p in cache.iterdir() if p.is_dir() and p.suffix != ".part"), key=lambda p: p.stat().st_mtime
    )
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    while folders and sum(sizes) > allowed:
        shutil.rmtree(folders.pop(0), ignore_errors=True)
        sizes.pop(0)
