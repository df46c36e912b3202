"""Stage 3: classifier + index -> localization maps of every training image's tags, float16 (MAPS_SCHEMA).

A map holds class activations at feature resolution, unscaled; `models.localization.scale_maps` makes them comparable.
Two tables: `single` holds the single-round maps, `maps` those with related images (section 3.2). Each image is embedded
once; its features are kept in a memory-mapped file (N, C, H, W), float16, that all workers read, so that memory
stays bounded by what the operating system caches and a map costs attention alone.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.images import read_rgb
from mcis.datasets.maps import map_rows
from mcis.datasets.pairs import related_images
from mcis.datasets.tags import Members, Tags
from mcis.models.backbones import normalise, to_unit
from mcis.models.classifier import SELF_TRANSFORMS, pair_kinds, transform
from mcis.models.localization import embed, released_map, resize_maps, single_round
from mcis.platform.config import Config
from mcis.platform.context import RunContext
from mcis.platform.mapping import map_table
from mcis.platform.runtime import uses_gpu
from mcis.platform.stages.index import split_rows
from mcis.platform.stages.train_classifier import load_classifier
from mcis.platform.workspace import disk_errors


class Embed:
    """Image rows -> single-round maps; keeps the features and, as released, the sum of the self pairs' maps."""

    def __init__(self, config: Config, weights: Path, classes: int, folder: Path, multi: bool, gpu: bool):
        self.config, self.multi, self.device = config, multi, torch.device("cuda" if gpu else "cpu")
        self.model = load_classifier(config, weights, classes).to(self.device)
        self.features = np.load(folder / "features.npy", mmap_mode="r+")
        self.selves = np.load(folder / "selves.npy", mmap_mode="r+")

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        batch = self.config.localize.batch
        parts = [self._batch(rows.slice(start, batch)) for start in range(0, len(rows), batch)]
        return pa.concat_tables(parts)

    def _batch(self, rows: pa.Table) -> pa.Table:
        size = self.config.classifier.input_size
        pixels = np.stack([read_rgb(uri, size) for uri in rows["uri"].to_pylist()])
        images = normalise(to_unit(torch.from_numpy(pixels).to(self.device)))
        localize = self.config.localize
        features = embed(self.model.backbone, images, extra_scales=localize.extra_scales, mirror=localize.mirror)
        if self.multi:
            self.features[rows["position"].to_numpy()] = features.cpu().numpy().astype(np.float16)
        activations = single_round(features, self.model.phi.weight, self.model.phi.bias)
        ids, tags, maps = [], [], []
        for place, (image_id, image_tags) in enumerate(
            zip(rows["image_id"].to_pylist(), rows["tags"].to_pylist(), strict=True)
        ):
            ids += [image_id] * len(image_tags)
            tags += image_tags
            maps.append(activations[place, image_tags])
            if self.multi and self.config.localize.aggregation == "released":
                first = rows["first_map"][place].as_py()
                kind = torch.tensor([int(rows["domain"][place].as_py() == "source")], device=self.device)
                total = self._self_maps(images[place], features[place], image_tags, kind)
                self.selves[first : first + len(image_tags)] = total.cpu().numpy().astype(np.float16)
        return map_rows(ids, tags, torch.cat(maps).cpu().numpy())

    def _self_maps(self, image: Tensor, feature: Tensor, tags: list[int], kind: Tensor) -> Tensor:
        """Sum of the four maps of the self pairs (RECIPE, "Localization maps"), (T, H, W)."""
        total = torch.zeros(len(tags), *feature.shape[1:], device=self.device)
        for name in SELF_TRANSFORMS:
            other = self.model.backbone(transform(image[None], name))[0]
            seen = torch.stack(
                [
                    released_map(self.model.co_map(other, feature[None], tag, kind=kind, target_is_n=True))
                    for tag in tags
                ]
            )
            if name == "flip":
                own = [
                    released_map(self.model.co_map(feature, other[None], tag, kind=kind), always=True) for tag in tags
                ]
                total += torch.stack(own) + seen.flip(2)
            else:
                total += resize_maps(seen, *feature.shape[1:])
        return total


class Relate:
    """Image rows with their related images -> maps of the multi-round inference."""

    def __init__(self, config: Config, weights: Path, classes: int, folder: Path, gpu: bool, source: NDArray[np.bool_]):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.source = torch.from_numpy(source).to(self.device)
        self.model = load_classifier(config, weights, classes).to(self.device)
        self.features = np.load(folder / "features.npy", mmap_mode="r")
        self.selves = np.load(folder / "selves.npy", mmap_mode="r")

    def _features(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.features[positions].astype(np.float32)).to(self.device)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        ids, tags, maps = [], [], []
        for row in rows.to_pylist():
            target = self._features(np.array([row["position"]]))[0]
            for place, (tag, related) in enumerate(zip(row["tags"], row["related"], strict=True)):
                own, others = self.source[row["position"]], self.source[torch.tensor(related)]
                raw = self.model.co_map(
                    target,
                    self._features(np.array(related)),
                    tag,
                    kind=pair_kinds(own, others),
                    target_is_n=own & ~others,
                )
                if self.config.localize.aggregation == "released":
                    selves = torch.from_numpy(self.selves[row["first_map"] + place].astype(np.float32)).to(self.device)
                    one = ((selves + released_map(raw)) / 5 * 255).round() / 255
                else:
                    one = raw
                ids.append(row["image_id"])
                tags.append(tag)
                maps.append(one)
        return map_rows(ids, tags, torch.stack(maps).cpu().numpy())


def with_related(rows: pa.Table, config: Config, tags: Tags) -> pa.Table:
    """Adds to image rows: position, first_map (place of the image's first map among all) and related (T lists of R)."""
    start, positions, count = tags.start.astype(np.int64), np.arange(len(rows)), config.localize.related
    related = related_images(
        Members.of(tags),
        np.repeat(positions, np.diff(start)),
        tags.values.astype(np.int64),
        count,
        seed=config.seed,
        may_repeat=config.localize.related_may_repeat,
    )
    of_tags = pa.LargeListArray.from_arrays(np.arange(len(related) + 1) * count, related.reshape(-1))
    rows = rows.append_column("position", pa.array(positions, pa.int64()))
    rows = rows.append_column("first_map", pa.array(start[:-1], pa.int64()))
    return rows.append_column("related", pa.LargeListArray.from_arrays(start, of_tags))


def make_feature_files(config: Config, weights: Path, classes: int, rows: pa.Table, folder: Path) -> list[Path]:
    """Makes the memory-mapped files of features and self pairs' maps, unless they are there; empty for R = 0."""
    size = config.classifier.input_size
    with torch.inference_mode():
        blank = torch.zeros(1, 3, size, size)
        shape = tuple(load_classifier(config, weights, classes).backbone(blank).shape[1:])
    multi = config.localize.related > 0
    maps = sum(map(len, rows["tags"].to_pylist()))
    files = {"features.npy": (len(rows) if multi else 0, *shape), "selves.npy": (maps if multi else 0, *shape[1:])}
    with disk_errors(folder):
        for name, dimensions in files.items():
            if not (folder / name).exists():
                aside = folder / f".{name}"
                np.lib.format.open_memmap(aside, mode="w+", dtype=np.float16, shape=dimensions).flush()
                with aside.open("r+b") as file:  # a full disk shows here, not as a fault in some worker's memory
                    os.posix_fallocate(file.fileno(), 0, aside.stat().st_size)
                aside.rename(folder / name)
    return [folder / name for name in files]


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Writes the localization maps of all tagged training images; after a kill only missing shards are computed."""
    compute, classes, weights = config.compute, len(context.classes), context.inputs["train_classifier"]
    rows = split_rows(context, "train", tagged=True)
    rows = with_related(rows, config, Tags.of_index(rows["tags"], classes))
    gpu = uses_gpu(compute)
    multi = config.localize.related > 0
    files = make_feature_files(config, weights, classes, rows, context.part)
    embedded = map_table(
        rows,
        Embed,
        (config, weights, classes, context.part, multi, gpu),
        context.part / "single",
        label="embed",
        shard_rows=compute.shard_rows,
        gpus=compute.workers if gpu else 0,
    )
    busy = embedded.busy
    if multi:
        busy += map_table(
            rows,
            Relate,
            (config, weights, classes, context.part, gpu, np.array(rows["domain"].to_pylist()) == "source"),
            context.part / "maps",
            label="localize",
            shard_rows=compute.shard_rows,
            gpus=compute.workers if gpu else 0,
        ).busy
    else:
        shutil.copytree(context.part / "single", context.part / "maps", dirs_exist_ok=True)
    for path in files:
        path.unlink()
    repeated = sum(
        len(set(related)) < config.localize.related for image in rows["related"].to_pylist() for related in image
    )
    return {
        "busy": busy,
        "counts": {
            "images": len(rows),
            "maps": sum(map(len, rows["tags"].to_pylist())),
            "maps whose related images repeat": repeated if multi else 0,
        },
        "notes": [f"{repeated} map(s) of classes with too few images repeat related images"]
        if multi and repeated
        else [],
    }
