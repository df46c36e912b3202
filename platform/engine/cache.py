"""The workspace's cache of decoded images and features: made in parallel when first asked for, bounded, of all runs."""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import Timeout

from mcis.datasets.images.decode import DECODER_VERSION
from mcis.datasets.images.squares import image_bytes, make_squares
from mcis.datasets.storage.folders import remove
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.memory_mapped import Features, features_bytes
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import Worker, map_table
from mcis.platform.engine.runtime import is_one_node
from mcis.platform.networks.features import MakeFeatures, features_shape
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import bytes_in, content_digest, disk_errors, fingerprint, rename_folder
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import CACHE, Workspace

_say_once = functools.cache(console.print)


def decoded_cache(rows: pa.Table, size: int, context: RunContext, compute: ComputeConfig) -> Path | None:
    """The folder with the first of these images at size x size pixels, as many as compute.cache_gb allows.

    The least recently used caches are removed for it. Their readers, if there are any, decode from the files instead.
    What another run is making stays, so for as long as several make caches they may take more.

    Args:
        rows: rows of the index, in the order that the readers' positions count.
        size: side of the decoded squares, pixels.

    Returns:
        None where not a single image fits, or the nodes share no disk.
    """
    bound = int(compute.cache_gb * 2**30)
    count = min(len(rows), bound // image_bytes(size))
    if not count:
        return None
    rows = rows.slice(0, count)
    name = f"squash{size}-{_content(rows)}"
    make_worker = functools.partial(make_squares, size)
    return _cached(name, rows, make_worker, context, compute, count * image_bytes(size), label="decode")


def features_cache(
    rows: pa.Table, config: Config, context: RunContext, *, views: int = 2, beside: int = 0
) -> Features | None:
    """What the classifier's backbone, as it starts, makes of these images and, as the second view, of their mirror
    images.

    Args:
        views: 1 where nobody asks for mirror images.
        beside: views of other images that are kept at the same time, so that none displace others.

    Returns:
        None where it starts without pretrained weights, those do not fit compute.cache_gb, or the nodes share no disk.
    """
    c, compute, pretrained = config.classifier, config.compute, classifier_weights(config, context.workspace)
    if pretrained is None:
        return None
    shape = features_shape(c)
    gb = (views * len(rows) + beside) * features_bytes(shape) / 2**30
    if gb > compute.cache_gb:
        _say_once(f"note: the backbone's outputs, {gb:.3g} GiB, exceed compute.cache_gb and are computed each time")
        return None
    network = (views, c.backbone, c.channels, c.stride, c.input_size, content_digest(pretrained))
    of_network = fingerprint(network, made_with(MakeFeatures.__module__, compute.device))
    name = f"features-{of_network}-{_content(rows)}"
    make_worker = functools.partial(MakeFeatures, c, pretrained, compute.gpu, views)
    size = views * len(rows) * features_bytes(shape)
    folder = _cached(name, rows, make_worker, context, compute, size, label="features", network=True)
    return Features(Texts(rows["uri"]), folder, shape, views) if folder else None


def _content(rows: pa.Table) -> str:
    return fingerprint(DECODER_VERSION, rows["content_hash"].to_pylist())


def _cached(
    name: str,
    rows: pa.Table,
    make_worker: Callable[[], Worker],
    context: RunContext,
    compute: ComputeConfig,
    size: int,
    **options: Any,
) -> Path | None:
    """A folder of the cache, of about `size` bytes, that `map_table` writes now if there is none; None where the nodes
    share no disk."""
    workspace, folder = context.workspace, context.workspace.cache / name
    if workspace.uri and ("RAY_ADDRESS" in os.environ or not is_one_node()):  # nodes may come later
        console.print("note: the nodes share no disk, so images are decoded each time")
        return None
    context.caches.append(folder.name)
    with hold_stage(workspace, "cache", folder.name, run=context.name), disk_errors(folder):
        if folder.exists():
            os.utime(folder)
            return folder
        part = folder.with_suffix(".part")
        with workspace.lock("cache", "size"):
            _evict(workspace, int(compute.cache_gb * 2**30) - size, part)
            part.mkdir(exist_ok=True)
        map_table(rows, part, make_worker=make_worker, compute=compute, suffix="arrow", **options)
        with workspace.lock("cache", "size"):  # names change while nobody adds up sizes
            rename_folder(part, folder)
    return folder


def _evict(workspace: Workspace, allowed: int, part: Path) -> None:
    """Removes whole caches, the least recently used first, until those beside `part` take at most `allowed` bytes.

    A part that was left half made is one of them, but not one whose lock is held: another run is making it.
    """
    caches = (path for path in workspace.cache.iterdir() if path.is_dir() and CACHE.fullmatch(path.name))
    sizes = {path: bytes_in(path) for path in sorted(caches, key=lambda path: path.stat().st_mtime) if path != part}
    left = sum(sizes.values())
    for folder, size in sizes.items():
        if left > allowed:
            with contextlib.suppress(Timeout), workspace.lock("cache", folder.stem).acquire(blocking=False):
                remove(folder)
                left -= size
