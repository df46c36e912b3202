"""The cache of decoded images and features in a workspace: computed on first use, bounded, shared by all runs.

A cache belongs to a list of images. It copies the rows of images that an earlier cache holds, so that after photographs
were added only these are decoded and embedded.
"""

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
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.folders import remove
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.memory_mapped import Features, features_bytes
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import Worker, map_table
from mcis.platform.engine.reused_rows import ReuseRows, find_rows, record_images
from mcis.platform.engine.runtime import is_one_node
from mcis.platform.networks.features import MakeFeatures, features_shape
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import bytes_in, content_digest, disk_errors, fingerprint, rename_folder
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import CACHE, Workspace

_print_once = functools.cache(console.print)


def decoded_cache(
    rows: pa.Table, size: int, context: RunContext, compute: ComputeConfig, value_range: ValueRange | None = None
) -> Path | None:
    """Returns the folder with decoded images, which are decoded now if it does not exist.

    It holds the first images of `rows`, as many as `compute.cache_gb` allows. The least recently used caches are
    removed for it; their readers, if there are any, then decode from the files. What another run is writing stays, so
    the caches may exceed the limit while several runs write some.

    Args:
        rows: Rows of the index, in the order of the readers' positions.
        size: Side of the decoded squares, pixels.
        context: The context of the run.
        compute: The section `compute` of the configuration.
        value_range: See `read_rgb`.

    Returns:
        None if not a single image fits, or if the nodes share no disk.
    """
    max_images = int(compute.cache_gb * 2**30) // image_bytes(size)
    count = min(len(rows), max_images)
    if not count:
        return None

    rows = rows.slice(0, count)
    kind = f"squash{size}-{fingerprint(DECODER_VERSION, value_range)}"
    make_worker = functools.partial(make_squares, size, value_range)
    return _cached(
        kind, rows, (size, size, 3), make_worker, context, compute, count * image_bytes(size), label="decode"
    )


def features_cache(
    rows: pa.Table, config: Config, context: RunContext, *, views: int = 2, reserved_views: int = 0
) -> Features | None:
    """Returns the features that the classifier's pretrained backbone extracts from images, computed now if necessary.

    Args:
        rows: Rows of the index, in the order of the readers' positions.
        config: The configuration.
        context: The context of the run.
        views: 1: images; 2: images and their horizontal flips.
        reserved_views: Number of views of other images that are cached at the same time, so that neither displaces the
            other.

    Returns:
        None if the backbone starts without pretrained weights, if the features exceed `compute.cache_gb`, or if the
        nodes share no disk.
    """
    c = config.classifier
    compute = config.compute
    value_range = config.data.value_range
    pretrained = classifier_weights(config, context.workspace)
    if pretrained is None:
        return None

    shape = features_shape(c)
    needed_gb = (views * len(rows) + reserved_views) * features_bytes(shape) / 2**30
    if needed_gb > compute.cache_gb:
        _print_once(
            f"note: the backbone's features, {needed_gb:.3g} GiB, exceed compute.cache_gb and are computed in every "
            "epoch"
        )
        return None

    network = (views, c.backbone, c.channels, c.stride, c.input_size, content_digest(pretrained))
    decoding = (DECODER_VERSION, value_range)
    network_key = fingerprint(network, made_with(MakeFeatures.__module__, compute.device), decoding)
    kind = f"features-{network_key}"
    make_worker = functools.partial(MakeFeatures, c, pretrained, compute.gpu, views, value_range)
    size = views * len(rows) * features_bytes(shape)
    row_shape = (views, *shape)
    folder = _cached(kind, rows, row_shape, make_worker, context, compute, size, label="features", network=True)
    return Features(Texts(rows["uri"]), folder, shape, views) if folder else None


def _content(rows: pa.Table) -> str:
    """Returns a fingerprint of the images' content."""
    return fingerprint(rows["content_hash"].to_pylist())


def _cached(
    kind: str,
    rows: pa.Table,
    shape: tuple[int, ...],
    make_worker: Callable[[], Worker],
    context: RunContext,
    compute: ComputeConfig,
    size: int,
    **options: Any,
) -> Path | None:
    """Returns a folder of the cache, which `map_table` writes now if it does not exist.

    Args:
        kind: What a row holds; the name of the folder is `<kind>-<fingerprint of the images>`.
        rows: Rows of the index to map.
        shape: Shape of a row of the cache.
        make_worker: See `map_table`.
        context: The context of the run.
        compute: The section `compute` of the configuration.
        size: About how many bytes the folder takes.
        options: Further arguments of `map_table`.

    Returns:
        None if the nodes share no disk.
    """
    workspace = context.workspace
    folder = workspace.cache / f"{kind}-{_content(rows)}"
    may_have_several_nodes = "RAY_ADDRESS" in os.environ or not is_one_node()
    if workspace.uri and may_have_several_nodes:
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
            others = [path for path in workspace.cache.glob(f"{kind}-*") if path.suffix != ".part"]
            held = find_rows(sorted(others), set(rows["content_hash"].to_pylist()))
        if held:
            make_worker = functools.partial(ReuseRows, make_worker, shape, held)
            console.print(f"{options['label']}: {len(held)} of {len(rows)} images are copied from earlier caches")
        map_table(rows, part, make_worker=make_worker, compute=compute, suffix="arrow", **options)
        record_images(part, rows)
        with workspace.lock("cache", "size"):  # no folder is renamed while another run adds up sizes
            rename_folder(part, folder)
    return folder


def _evict(workspace: Workspace, max_bytes: int, part: Path) -> None:
    """Removes caches, the least recently used first, until the others take at most `max_bytes`.

    Unfinished caches are removed too, unless another run holds their lock because it is writing them.

    Args:
        part: A folder that is not counted and not removed.
    """
    folders = [path for path in workspace.cache.iterdir() if path.is_dir() and CACHE.fullmatch(path.name)]
    folders.sort(key=lambda path: path.stat().st_mtime)
    sizes = {path: bytes_in(path) for path in folders if path != part}

    total = sum(sizes.values())
    for folder, size in sizes.items():
        if total <= max_bytes:
            break
        with contextlib.suppress(Timeout), workspace.lock("cache", folder.stem).acquire(blocking=False):
            remove(folder)
            total -= size
