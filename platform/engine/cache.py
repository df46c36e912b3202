"""The cache of decoded images and features in a workspace: computed on first use, bounded, shared by all runs.

A cache belongs to a list of images, and holds the first of them if not all fit. It copies the rows of images that an
earlier cache holds, so that after photographs were added only these are decoded and embedded.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from filelock import Timeout
from numpy.typing import DTypeLike

from mcis.datasets.images.decode import DECODER_VERSION
from mcis.datasets.images.squares import add_squares, make_squares
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.folders import names_in, remove
from mcis.datasets.tables.large_tables import Texts, table_digest
from mcis.datasets.tables.memory_mapped import Features, features_bytes
from mcis.datasets.tables.spans import ShardSpans
from mcis.platform.config.compute import ComputeConfig, uses_cluster
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.reused_rows import ReuseRows, count_images, find_rows, num_found, record_images
from mcis.platform.engine.runtime import is_one_node
from mcis.platform.engine.shard_mapper import Worker
from mcis.platform.networks.features import MakeFeatures, features_shape
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import (
    bytes_in,
    content_digest,
    disk_errors,
    existing_parent,
    fingerprint,
    read_json,
    rename_folder,
    write_json,
)
from mcis.platform.runs.lifecycle import caches_in_use, reference_cache
from mcis.platform.runs.locks import hold_stage
from mcis.platform.runs.progress import console
from mcis.platform.runs.version import made_with
from mcis.platform.runs.workspace import CACHE, Workspace

_print_once = functools.cache(console.print)
_FREE_SHARE = 0.5
"""Share of the free disk space that the caches take by default."""
_PLANNED = "planned_bytes.json"
"""File in the folder of a cache that is being written, with the size that it will have."""
_GROWTH = 1.1
"""A cache with a part of the images grows if this many times as many fit."""
NUM_STATISTICS_IMAGES = 256
"""Maximum number of training images from which channel statistics are computed."""


def cache_limit(compute: ComputeConfig, workspace: Workspace) -> int:
    """Returns the size limit of the workspace's caches, bytes (`compute.cache_gb`)."""
    if compute.cache_gb is not None:
        return int(compute.cache_gb * 2**30)
    free_bytes = shutil.disk_usage(existing_parent(workspace.cache)).free
    cached_bytes = sum(bytes_in(folder) for folder in _folders(workspace))
    return int(_FREE_SHARE * (free_bytes + cached_bytes))


def decoded_cache(
    rows: pa.Table,
    size: int,
    context: RunContext,
    compute: ComputeConfig,
    value_range: ValueRange | None = None,
    *,
    reserved_images: int = 0,
    all_or_none: bool = False,
) -> Path | None:
    """Returns the folder with decoded images, which are decoded now if it does not exist.

    It holds the first images of `rows`, as many as fitted when it was made. The least recently used caches are
    removed for it. What another run reads or writes stays, and counts with the size that it will have.

    Args:
        rows: Rows of the index, in the order of the readers' positions.
        size: Side of the decoded squares, pixels.
        context: The context of the run.
        compute: The section `compute` of the configuration.
        value_range: See `read_rgb`.
        reserved_images: Number of other images that are cached at the same time, so that neither displaces the other.
        all_or_none: Whether there is no cache unless all images fit.

    Returns:
        None if not a single image fits, or if the nodes share no disk.
    """
    spec = _CacheSpec(
        kind=f"squash{size}-{fingerprint(DECODER_VERSION, value_range)}",
        dtype=np.uint8,
        shape=(size, size, 3),
        make_worker=functools.partial(make_squares, size, value_range),
        label="decode",
    )
    reserved_bytes = reserved_images * spec.row_bytes
    return _open_or_write(spec, rows, context, compute, reserved_bytes=reserved_bytes, all_or_none=all_or_none)


def training_features(rows: pa.Table, config: Config, context: RunContext) -> Features | None:
    """Returns the features of the training images that the classifier is trained on, which localization uses too.

    Space is left for the features of the val images and of the sample for channel statistics.

    Args:
        rows: Rows of the tagged training images and negatives.
        config: The configuration.
        context: The context of the run.

    Returns:
        See `features_cache`.
    """
    num_val = 0
    if config.classifier.val_every:
        num_val = len(split_rows(context, "val", tagged=True, negatives=True, columns=["image_id"]))
    num_sample = min(NUM_STATISTICS_IMAGES, len(rows))
    return features_cache(rows, config, context, reserved_views=num_val + num_sample)


def features_cache(
    rows: pa.Table,
    config: Config,
    context: RunContext,
    *,
    views: int = 2,
    reserved_views: int = 0,
    all_or_none: bool = False,
) -> Features | None:
    """Returns the features that the classifier's pretrained backbone extracts from images, computed now if necessary.

    They are those of the first images of `rows`, as many as fitted when the cache was made.

    Args:
        rows: Rows of the index, in the order of the readers' positions.
        config: The configuration.
        context: The context of the run.
        views: 1: images; 2: images and their horizontal flips.
        reserved_views: Number of views of other images that are cached at the same time, so that neither displaces the
            other.
        all_or_none: Whether there is no cache unless all images fit.

    Returns:
        None if the backbone starts without pretrained weights, if no image fits `compute.cache_gb`, or if the nodes
        share no disk.
    """
    compute = config.compute
    extraction = _Extraction.of_classifier(config, context, views)
    if extraction is None:
        return None

    spec = _CacheSpec(
        kind=extraction.kind,
        dtype=np.float16,
        shape=(views, *extraction.shape),
        make_worker=extraction.make_worker,
        read=extraction.read,
        label="features",
        network=True,
    )
    reserved_bytes = reserved_views * features_bytes(extraction.shape)
    folder = _open_or_write(spec, rows, context, compute, reserved_bytes=reserved_bytes, all_or_none=all_or_none)
    if folder is None:
        return None

    features = Features(Texts(rows["uri"]), folder, extraction.shape, views)
    num_cached = int(features.holds(np.arange(len(rows))).sum())
    if num_cached < len(rows):
        needed_gb = views * len(rows) * features_bytes(extraction.shape) / 2**30
        _print_once(
            f"note: the backbone's features of {len(rows)} images take {needed_gb:.3g} GiB; those of {num_cached} are "
            "cached (compute.cache_gb), the others are computed each time they are used"
        )
    return features


@contextlib.contextmanager
def temporary_features(rows: pa.Table, config: Config, context: RunContext) -> Iterator[Features]:
    """Yields the features of images, without flips, which are computed in the output of the stage and removed then.

    Args:
        rows: Rows of the index.
        config: The configuration. The classifier's backbone has pretrained weights.
        context: The context of the run.
    """
    extraction = _Extraction.of_classifier(config, context, views=1)
    assert extraction is not None
    folder = context.output / "features"
    map_table(
        rows,
        folder,
        make_worker=extraction.make_worker,
        read=extraction.read,
        label="features",
        compute=config.compute,
        network=True,
        suffix="arrow",
    )
    yield Features(Texts(rows["uri"]), folder, extraction.shape, views=1)
    remove(folder)


class _Extraction(NamedTuple):
    """How the features of images are computed.

    Attributes:
        kind: Name of their caches, which depends on everything but the images.
        shape: (C, H, W).
        make_worker: See `map_table`.
        read: See `map_table`.
    """

    kind: str
    shape: tuple[int, int, int]
    make_worker: Callable[[], Worker]
    read: Worker

    @classmethod
    def of_classifier(cls, config: Config, context: RunContext, views: int) -> "_Extraction | None":
        """Returns the extraction by the classifier's backbone, or None if it starts without pretrained weights."""
        classifier = config.classifier
        value_range = config.data.value_range
        pretrained = classifier_weights(config, context.workspace)
        if pretrained is None:
            return None

        features_identity = (
            views,
            classifier.backbone,
            classifier.channels,
            classifier.stride,
            classifier.input_size,
            content_digest(pretrained),
        )
        computed_with = made_with(MakeFeatures.__module__, config.compute.device)
        return cls(
            kind=f"features-{fingerprint(features_identity, computed_with, (DECODER_VERSION, value_range))}",
            shape=features_shape(classifier),
            make_worker=functools.partial(MakeFeatures, classifier, pretrained, config.compute.gpu, views, value_range),
            read=functools.partial(add_squares, classifier.input_size, value_range),
        )


@dataclass(frozen=True, kw_only=True)
class _CacheSpec:
    """What a cache holds, and how it is computed.

    Attributes:
        kind: What a row holds; the name of the folder is `<kind>-<fingerprint of the images>`.
        dtype: Type of the numbers in a row.
        shape: Shape of a row.
        make_worker: See `map_table`.
        read: See `map_table`.
        label: See `map_table`.
        network: See `map_table`.
    """

    kind: str
    dtype: DTypeLike
    shape: tuple[int, ...]
    make_worker: Callable[[], Worker]
    read: Worker | None = None
    label: str
    network: bool = False

    @property
    def row_bytes(self) -> int:
        """Size of a row, bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def _images_digest(rows: pa.Table) -> str:
    """Returns a digest of the images' content, which names their cache."""
    return table_digest([rows.select(["content_hash"])])


def _open_or_write(
    spec: _CacheSpec,
    rows: pa.Table,
    context: RunContext,
    compute: ComputeConfig,
    *,
    reserved_bytes: int,
    all_or_none: bool,
) -> Path | None:
    """Returns a folder of the cache, which is written now if it does not exist.

    It holds the rows that fit, from the first on. A folder that holds more is used as it is; rows are added to one that
    holds fewer.

    Args:
        spec: What the cache holds.
        rows: Rows of the index to map.
        context: The context of the run.
        compute: The section `compute` of the configuration.
        reserved_bytes: Number of bytes that are left for other caches.
        all_or_none: Whether there is no cache unless all rows fit.

    Returns:
        None if not a single image fits, or if the nodes share no disk.
    """
    workspace = context.workspace
    folder = workspace.cache / f"{spec.kind}-{_images_digest(rows)}"
    if workspace.uri and (uses_cluster() or not is_one_node()):
        console.print("note: the nodes share no disk, so images are decoded each time")
        return None

    unfinished_folder = folder.with_suffix(".part")
    with hold_stage(workspace, "cache", folder.name, run=context.name), disk_errors(folder):
        present_folder = folder if folder.exists() else unfinished_folder
        with workspace.lock("cache", "size"):  # one run at a time adds up sizes and reserves space
            (present_folder / _PLANNED).unlink(missing_ok=True)  # written by a run that was killed
            max_images = max(0, (_available_bytes(folder, context, compute) - reserved_bytes) // spec.row_bytes)
            if all_or_none and max_images < len(rows):
                return None
            fitting_rows = _rows_that_fit(rows, max_images, _shard_rows(present_folder, compute))
            if not len(fitting_rows) and present_folder != folder:
                return None

            context.caches.append(folder.name)
            reference_cache(workspace, context.name, folder.name)
            lacks_rows = present_folder != folder or len(fitting_rows) >= _GROWTH * count_images(folder)
            if lacks_rows:
                _reserve(present_folder, len(fitting_rows) * spec.row_bytes, context, compute)

        if present_folder == folder:
            os.utime(folder)  # marks the cache as the most recently used one
        if lacks_rows:
            _write_rows(spec, fitting_rows, present_folder, context, compute)
            with workspace.lock("cache", "size"):  # no folder is renamed while another run adds up sizes
                (present_folder / _PLANNED).unlink()
                if present_folder != folder:
                    rename_folder(unfinished_folder, folder)
    return folder


def _available_bytes(folder: Path, context: RunContext, compute: ComputeConfig) -> int:
    """Returns how many bytes the caches of a run may take: the limit minus the caches that only other runs use.

    A cache that another run is writing counts with its planned size. One whose run was killed does not count.

    Args:
        folder: The cache that the run asks for. It is not subtracted, because the run reads it from now on. Finished
            and unfinished folders of a cache have the same stem.
        context: The context of the run.
        compute: The section `compute` of the configuration.
    """
    taken = sum(_final_bytes(path) for path in _taken_folders(context) if path.stem != folder.stem)
    return max(0, cache_limit(compute, context.workspace) - taken)


def _final_bytes(folder: Path) -> int:
    """Returns the size of a cache, or the one that it will have, if a run is writing it. The caller holds `size`."""
    planned_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        planned_bytes = int(read_json(folder / _PLANNED))
    return max(planned_bytes, bytes_in(folder))


def _rows_that_fit(rows: pa.Table, max_images: int, shard_rows: int) -> pa.Table:
    """Returns the first rows, at most `max_images`: all, or whole shards, to which more can be added later."""
    if max_images < len(rows):
        max_images -= max_images % shard_rows
    return rows.slice(0, max_images)


def _shard_rows(folder: Path, compute: ComputeConfig) -> int:
    """Returns the number of rows of a shard in the folder of a cache, or the configured number if the cache is new.

    The shards of a cache stay as they are, because other runs may read them.
    """
    shards = ShardSpans(names_in(folder))
    if not len(shards) or shards.first[0] > 0:
        return compute.shard_rows
    return int(shards.stop[0])


def _write_rows(spec: _CacheSpec, rows: pa.Table, folder: Path, context: RunContext, compute: ComputeConfig) -> None:
    """Maps rows to the folder of a cache. Shards that it holds stay, and rows of earlier caches are copied.

    Args:
        spec: What the cache holds.
        rows: Rows of the index, all of which the folder holds afterwards.
        folder: A finished cache, or a folder with the suffix `.part`.
        context: The context of the run.
        compute: The section `compute` of the configuration.
    """
    workspace = context.workspace
    with workspace.lock("cache", "size"):  # no folder is renamed or removed meanwhile
        caches = sorted(workspace.cache.glob(f"{spec.kind}-*"))
        earlier_caches = [path for path in caches if path.suffix != ".part" and path != folder]
        rows = find_rows(earlier_caches, rows)

    make_worker = spec.make_worker
    read = spec.read
    num_copied = num_found(rows)
    if num_copied:
        make_worker = functools.partial(ReuseRows, spec.make_worker, spec.shape, earlier_caches)
        read = None  # copied rows need no images
        console.print(f"{spec.label}: {num_copied} of {len(rows)} images are copied from earlier caches")
    map_table(
        rows,
        folder,
        make_worker=make_worker,
        read=read,
        label=spec.label,
        compute=compute,
        network=spec.network,
        shard_rows=_shard_rows(folder, compute),
        suffix="arrow",
    )
    record_images(folder, rows)


def _reserve(folder: Path, size: int, context: RunContext, compute: ComputeConfig) -> None:
    """Makes the folder of a cache, and space for it within the limit. The caller holds the lock `size`.

    The folder holds the planned size until it is complete, so that runs that start meanwhile leave space for it.

    Args:
        folder: The folder, which may exist.
        size: Size of the cache when it is complete, bytes.
        context: The context of the run.
        compute: The section `compute` of the configuration.
    """
    max_other_bytes = _available_bytes(folder, context, compute) - size
    _evict(context, max_other_bytes, excluded=folder)
    folder.mkdir(exist_ok=True)
    write_json(folder / _PLANNED, size)


def _evict(context: RunContext, max_bytes: int, *, excluded: Path) -> None:
    """Removes caches, the least recently used first, until the others take at most `max_bytes`.

    Unfinished caches are removed too, unless another run holds their lock because it is writing them. Caches that other
    runs read are not removed. They are not counted either, unless this run reads them, too.

    Args:
        excluded: A folder that is not counted and not removed.
    """
    workspace = context.workspace
    kept = {excluded, *_taken_folders(context)}
    folders = sorted(_folders(workspace), key=lambda path: path.stat().st_mtime)
    sizes = {path: bytes_in(path) for path in folders if path not in kept}

    total = sum(sizes.values())
    for folder, size in sizes.items():
        if total <= max_bytes:
            break
        with contextlib.suppress(Timeout), workspace.lock("cache", folder.stem).acquire(blocking=False):
            if folder.stem not in caches_in_use(workspace, except_run=context.name):
                remove(folder)
                total -= size


def _taken_folders(context: RunContext) -> list[Path]:
    """Returns the folders of the caches that other runs read and this one does not."""
    taken = caches_in_use(context.workspace, except_run=context.name).difference(context.caches)
    return [folder for folder in _folders(context.workspace) if folder.stem in taken]


def _folders(workspace: Workspace) -> list[Path]:
    """Returns the folders of the caches, finished or not."""
    return [path for path in workspace.cache.glob("*") if path.is_dir() and CACHE.fullmatch(path.name)]
