"""Stage 3: classifier + index -> localization maps of every training image's tags, float16 (MAPS_SCHEMA).

A map holds class activations at feature resolution, unscaled; `models.localization.scale_maps` makes them comparable.
Two tables: `single` holds the single-round maps, `maps` those with related images (section 3.2). Each image is embedded
once; its features are kept in a memory-mapped file (N, C, H, W), float16, that all workers read, so that memory
stays bounded by what the operating system caches and a map costs attention alone.

Where the features of all images exceed `localize.features_gb`, the classes are worked off in rounds, each with a file
of the features that its maps need, and an image is embedded once in every round that needs it. The maps are the same.
"""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mcis.datasets.errors import UserError
from mcis.datasets.images import read_rgb
from mcis.datasets.index import Listing, shown
from mcis.datasets.maps import Shards, map_rows
from mcis.datasets.relations import Relations, feature_rounds
from mcis.datasets.tags import Tags
from mcis.models.backbones import normalize, to_unit
from mcis.models.classifier import SELF_TRANSFORMS, pair_kinds, transform
from mcis.models.evidence import Bank
from mcis.models.localization import (
    embed,
    released_map,
    resize_maps,
    single_round,
)
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import Worker, map_table, shards_of
from mcis.platform.engine.runtime import uses_gpu
from mcis.platform.networks.build import load_classifier
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import of_split, split_rows
from mcis.platform.runs.relations import draw_relations
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace, disk_errors, read_json, write_json

_GIB = 2**30


class Embed:
    """Image rows -> single-round maps; keeps the features and, as released, the sum of the self pairs' maps.

    Maps are made of the rows that are `fresh`, that is embedded for the first time.

    Args:
        features: file of the round's features, None = they are not kept.
        selves: file of the self pairs' maps, None = there are none.
    """

    def __init__(
        self, config: Config, weights: Path, classes: int, gpu: bool, features: Path | None, selves: Path | None
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.model = load_classifier(config, weights, classes).to(self.device)
        self.features, self.selves = features, selves
        self.batch = min(config.localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        parts = [self._batch(rows.slice(start, self.batch)) for start in range(0, len(rows), self.batch)]
        return pa.concat_tables(parts)

    def _batch(self, rows: pa.Table) -> pa.Table:
        size = self.config.classifier.input_size
        pixels = np.stack([read_rgb(uri, size) for uri in rows["uri"].to_pylist()])
        # Kernels are chosen by shape: a batch is always filled up, so that an image's features are bit for bit the
        # same whatever company its round gives it.
        pixels = pixels[np.minimum(np.arange(self.batch), len(rows) - 1)]
        images = normalize(to_unit(torch.from_numpy(pixels).to(self.device)))
        localize = self.config.localize
        with self.model.backbone.watching_textures() as seen:
            features = embed(self.model.backbone, images, extra_scales=localize.extra_scales, mirror=localize.mirror)
        if self.features is not None:
            kept = [features]
            if localize.evidence:  # textures of the image as it is: the first pass
                kept.append(functional.adaptive_avg_pool2d(seen[0], (features.shape[2], features.shape[3])))
            together = torch.cat(kept, dim=1)[: len(rows)].half()
            if not together.isfinite().all():
                raise UserError(
                    f"features beyond float16's range among the images {shown(rows['image_id'].to_pylist())}",
                    "activations of a sound training",
                    "look at the training's loss curve, and repeat it with a lower learning rate",
                )
            overwrite(self.features, rows["slot"][0].as_py(), together.cpu().numpy())
        activations = single_round(features, self.model.phi.weight, self.model.phi.bias)
        ids, tags, maps = [], [], [activations[0, :0]]
        for place, row in enumerate(rows.select(["image_id", "tags", "domain", "first_map", "fresh"]).to_pylist()):
            if not row["fresh"]:
                continue
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
            maps.append(activations[place, row["tags"]])
            if self.selves is not None:
                kind = torch.tensor([int(row["domain"] == "source")], device=self.device)
                total = self._self_maps(images[place], features[place], row["tags"], kind)
                first = row["first_map"]
                overwrite(self.selves, first, total.cpu().numpy())
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
    """Image rows with their related images -> maps of the multi-round inference.

    Args:
        source: of the images in `features`, (N,), whether they are of the domain source.
        bank: slots of the bank's images (B,) and their tags (B, K), where evidence is asked for.
    """

    def __init__(
        self,
        config: Config,
        weights: Path,
        classes: int,
        gpu: bool,
        features: Path,
        selves: Path | None,
        source: NDArray[np.bool_],
        bank: tuple[NDArray[np.int64], NDArray[np.bool_]] | None,
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.source = torch.from_numpy(source).to(self.device)
        self.domains = torch.tensor([False, True] if source.any() else [False], device=self.device)
        self.model = load_classifier(config, weights, classes).to(self.device)
        self.features, self.selves = features, selves
        self.bank = None if bank is None else self._bank(*bank)

    def _features(self, slots: list[int]) -> Tensor:
        """Features (N, C, H, W), and behind them textures, where evidence is asked for.

        The file is opened each time: what a process holds open keeps its room on the disk after it was removed.
        """
        kept = np.load(self.features, mmap_mode="r")[slots]
        return torch.from_numpy(kept.astype(np.float32)).to(self.device)

    @torch.inference_mode()
    def _bank(self, slots: NDArray[np.int64], tags: NDArray[np.bool_]) -> Bank:
        kept, c = self._features(slots.tolist()), self.model.backbone.channels
        activations = single_round(kept[:, :c], self.model.phi.weight, self.model.phi.bias)
        return Bank(kept[:, c:], torch.from_numpy(~tags).to(self.device), activations)

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.to_pylist()
        ids = [row["image_id"] for row in images for _ in row["tags"]]
        maps = torch.cat([self.maps(row) for row in images])
        return map_rows(ids, [tag for row in images for tag in row["tags"]], maps.cpu().numpy())

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """The maps of one image's tags, (T, H, W)."""
        localize, c = self.config.localize, self.model.backbone.channels
        kept = self._features([row["slot"]])[0]
        target = kept[:c]
        co_attention = localize.aggregation != "evidence"
        if co_attention:
            # F_n^T W_P depends on the other image's domain alone: all maps of an image share it.
            own = self.source[row["slot"]].expand(len(self.domains))
            queries = self.model.query(target, kind=pair_kinds(own, self.domains), target_is_n=own & ~self.domains)
        single = single_round(target[None], self.model.phi.weight, self.model.phi.bias)[0]
        if self.bank:
            vectors = self.bank.of(kept[c:])
            elsewhere = self.bank.match(vectors)  # shared by all maps of the image
        maps = []
        for tag, number, related, others in zip(row["tags"], row["maps"], row["related"], row["others"], strict=True):
            near = self._features(related)
            if co_attention:
                one = self.model.co_map(target, near[:, :c], tag, query=self._facing(queries, related))
            else:
                one = single[tag]
            if others:
                facing, far = self._facing(queries, others), self._features(others)[:, :c]
                contrastive = self.model.contrastive_map(target, far, tag, query=facing)
                one = (len(related) * one + len(others) * contrastive) / (len(related) + len(others))
            fellows = [place for place, slot in enumerate(related) if slot != row["slot"]]
            if self.bank and fellows:  # an image finds itself again everywhere, which tells nothing
                evidence = self.bank.evidence(vectors, elsewhere, near[fellows, c:], tag)
                one = one + localize.evidence * evidence.view(one.shape)
            if self.selves is not None:
                selves = torch.from_numpy(np.load(self.selves, mmap_mode="r")[number].copy())
                one = ((selves.to(self.device) + released_map(one)) / 5 * 255).round() / 255
            maps.append(one)
        return torch.stack(maps)

    def _facing(self, queries: Tensor, others: list[int]) -> Tensor:
        """The query that each of the other images meets, (R, HW, C), or the only one, (HW, C)."""
        return queries[0] if len(queries) == 1 else queries[self.source[others].long()]


class Merge:
    """Image rows -> their maps, from the tables of all rounds."""

    def __init__(self, tables: list[Shards]):
        self.tables = tables

    def __call__(self, rows: pa.Table) -> pa.Table:
        ids = rows["image_id"].to_pylist()
        pairs = zip(ids, rows["tags"].to_pylist(), strict=True)
        wanted = {pair: n for n, pair in enumerate((i, tag) for i, tags in pairs for tag in tags)}
        # A table at a time, so that each shard is read once.
        parts = [found for table in self.tables for i in ids if (found := table.rows(i)) is not None]
        maps = pa.concat_tables(parts)
        place = [wanted[pair] for pair in zip(maps["image_id"].to_pylist(), maps["class"].to_pylist(), strict=True)]
        return maps.take(np.argsort(place))


def check_domain(config: Config, source: NDArray[np.bool_]) -> None:
    """Whether there are images of the domain that related images are to be of.

    Raises:
        UserError: there are none.
    """
    domain = config.localize.related_from
    if domain != "both" and not (source == (domain == "source")).any():
        raise UserError(
            f"localize.related_from is {domain}, but no tagged training image of setting {config.setting} is of it",
            "single-label images beside a setting's own" if domain == "source" else "images of the setting's own",
            "set localize.related_from=both, or a setting such as voc+single",
        )


def _nested(starts: NDArray[np.int64], values: pa.Array | NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))


def embed_rows(
    rows: pa.Table, start: NDArray[np.int64], images: NDArray[np.int64], fresh: NDArray[np.bool_]
) -> pa.Table:
    """What `Embed` reads: the rows of some images, each with its `slot` in the features, first map, and `fresh`."""
    columns = {"slot": np.arange(len(images)), "first_map": start[images], "fresh": fresh}
    part = rows.select(["image_id", "uri", "domain", "tags"]).take(pa.array(images))
    return pa.table({**{name: part[name] for name in part.column_names}, **columns})


def relate_rows(rows: pa.Table, relations: Relations, classes: Sequence[int], images: NDArray[np.int64]) -> pa.Table:
    """What `Relate` reads: the images that have any of some classes, with their maps of these, and places in `images`.

    Columns: image_id, slot, and a list of T entries each: tags, maps (their numbers), related, others (lists of slots).
    """
    maps = np.flatnonzero(np.isin(relations.tag, classes))
    own, first = np.unique(relations.image[maps], return_index=True)
    start = np.append(first, len(maps))
    counts = np.diff(relations.others_start)
    of_others = np.repeat(np.isin(relations.tag, classes), counts)
    related = np.searchsorted(images, relations.related[maps])
    others = np.searchsorted(images, relations.others[of_others])
    by_map = np.arange(len(maps) + 1) * related.shape[1], np.concatenate([[0], np.cumsum(counts[maps])])
    return pa.table(
        {
            "image_id": rows["image_id"].take(pa.array(own)),
            "slot": np.searchsorted(images, own),
            "tags": _nested(start, relations.tag[maps]),
            "maps": _nested(start, maps),
            "related": _nested(start, _nested(by_map[0], related.reshape(-1))),
            "others": _nested(start, _nested(by_map[1], others)),
        }
    )


def feature_shape(config: Config, weights: Path, classes: int) -> tuple[int, int, int]:
    """C, H, W of what is kept of an image: features, and textures where evidence is asked for."""
    size = config.classifier.input_size
    with torch.inference_mode():
        backbone = load_classifier(config, weights, classes).backbone
        c, h, w = backbone(torch.zeros(1, 3, size, size)).shape[1:]
    return c + (backbone.textures[1] if config.localize.evidence else 0), h, w


def overwrite(path: Path, first: int, values: NDArray[Any]) -> None:
    """Writes rows `first` .. of an array's file, and on to its disk.

    As bytes rather than through a memory map, whose pages neighbours on other nodes would write back as well; and
    before the shard is there that vouches for them.
    """
    with path.open("r+b") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        file.seek(first * values[0].nbytes, os.SEEK_CUR)
        file.write(np.ascontiguousarray(values).tobytes())
        file.flush()
        os.fsync(file.fileno())


def make_file(path: Path, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> None:
    """A memory-mapped file of zeros, with all its room on the disk."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}")
        np.lib.format.open_memmap(aside, mode="w+", dtype=dtype, shape=shape).flush()
        with aside.open("r+b") as file:  # a full disk shows here, not as a fault in some worker's memory
            os.posix_fallocate(file.fileno(), 0, aside.stat().st_size)
        aside.rename(path)


class Plan(NamedTuple):
    """The rounds: classes of each, and images whose features each keeps, positions that ascend.

    Attributes:
        shape: of an image's features, (C, H, W).
        gib: of the largest round's features.
    """

    classes: list[list[int]]
    images: list[NDArray[np.int64]]
    shape: tuple[int, int, int]
    gib: float


def plan_rounds(
    config: Config, needs: Sequence[NDArray[np.int64]], shape: tuple[int, int, int], names: Sequence[str]
) -> Plan:
    """The rounds that keep `localize.features_gb`, for features of some shape (C, H, W) and class names.

    Raises:
        UserError: a class alone needs more.
    """
    bound, image_bytes = config.localize.features_gb, 2 * math.prod(shape)
    largest = max(range(len(needs)), key=lambda k: len(needs[k]))
    try:
        plan = feature_rounds(needs, int(bound * _GIB // image_bytes))
    except ValueError:
        gib = len(needs[largest]) * image_bytes / _GIB
        raise UserError(
            f"the maps of class {names[largest]} need the features of {len(needs[largest])} images, {gib:.3g} GiB",
            f"at most localize.features_gb={bound:g} GiB a class",
            f"set localize.features_gb={1.01 * gib:.3g} or more, or a smaller classifier.input_size",
        ) from None
    images = [np.unique(np.concatenate([needs[k] for k in group])) for group in plan]
    return Plan(plan, images, shape, max(map(len, images)) * image_bytes / _GIB)


def _missing(rows: pa.Table, folder: Path, config: Config) -> bool:
    return any(not (folder / name).exists() for name in shards_of(len(rows), config.compute.shard_rows))


def _map(
    config: Config, worker: Callable[..., Worker], arguments: tuple[Any, ...], folder: Path, rows: pa.Table, label: str
) -> float:
    """Maps the rows on the GPUs, where they are used, and returns the busy seconds."""
    gpu = worker is not Merge and uses_gpu(config.compute)
    shard_rows = config.compute.shard_rows
    return map_table(rows, worker, arguments, folder, label=label, shard_rows=shard_rows, gpu=gpu).busy


def _single_round_alone(config: Config, context: RunContext, rows: pa.Table) -> float:
    """Without related images: the single-round maps are the maps."""
    arguments = config, context.inputs["train_classifier"], len(context.classes), uses_gpu(config.compute), None, None
    start = np.zeros(len(rows), np.int64)
    of_rows = embed_rows(rows, start, np.arange(len(rows)), np.ones(len(rows), bool))
    busy = _map(config, Embed, arguments, context.part / "single", of_rows, "embed")
    shutil.copytree(context.part / "single", context.part / "maps", dirs_exist_ok=True)
    return busy


def _in_rounds(
    config: Config, context: RunContext, rows: pa.Table, tags: Tags, relations: Relations, plan: Plan
) -> float:
    """Both tables by way of features; what an interrupted call has finished is not done again. Returns busy seconds."""
    part, source, busy = context.part, np.array(rows["domain"].to_pylist()) == "source", 0.0
    shared = config, context.inputs["train_classifier"], len(context.classes), uses_gpu(config.compute)
    selves = part / "selves.npy" if config.localize.aggregation == "released" else None
    folders = [part / f"round-{n}" for n in range(len(plan.classes))] if len(plan.classes) > 1 else [part]
    if _missing(rows, part / "single", config) or _missing(rows, part / "maps", config):
        _start_afresh_unless_it_fits(part, plan, selves, (len(relations.tag), *plan.shape[1:]))
        seen = np.zeros(len(rows), bool)
        for number, (folder, group, images) in enumerate(zip(folders, plan.classes, plan.images, strict=True), 1):
            to_embed = embed_rows(rows, relations.start, images, ~seen[images])
            to_relate = relate_rows(rows, relations, group, images)
            seen[images] = True
            features, of = folder / "features.npy", f" {number}/{len(folders)}" * (len(folders) > 1)
            if _missing(to_embed, folder / "single", config) or _missing(to_relate, folder / "maps", config):
                if not features.exists():  # then whatever was embedded is of no more use
                    shutil.rmtree(folder / "single", ignore_errors=True)
                    make_file(features, (len(images), *plan.shape), np.float16)
                paths = features, selves
                busy += _map(config, Embed, (*shared, *paths), folder / "single", to_embed, f"embed{of}")
                bank = None
                if len(relations.bank):
                    bank = np.searchsorted(images, relations.bank), tags.matrix(relations.bank)
                arguments = *shared, *paths, source[images], bank
                busy += _map(config, Relate, arguments, folder / "maps", to_relate, f"localize{of}")
            features.unlink(missing_ok=True)
        if len(folders) > 1:
            for name in ("single", "maps"):
                tables = [Shards(folder / name) for folder in folders]
                busy += _map(config, Merge, (tables,), part / name, rows, f"merge {name}")
    for folder in part.glob("round-*"):
        shutil.rmtree(folder)
    for path in part.glob("*.npy"):
        path.unlink()
    return busy


def _start_afresh_unless_it_fits(part: Path, plan: Plan, selves: Path | None, shape: tuple[int, ...]) -> None:
    """Removes what an earlier call left if it was made by other rounds, or without the self pairs' maps it needs."""
    made = part / "plan.json"
    if not made.exists() or read_json(made) != plan.classes or (selves and not selves.exists()):
        shutil.rmtree(part)
        write_json(made, plan.classes)
        if selves:
            make_file(selves, shape, np.float32)  # the released sum is rounded to 8 bit: one more rounding would show


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where related images are to be of a domain that no tagged training image is of."""
    if config.localize.related:
        train = of_split(listing.table, "train", tagged=True)
        check_domain(config, np.array(train["domain"].to_pylist()) == "source")


def inputs(config: Config, context: RunContext) -> None:
    """The images are the index's; they depend on nothing else outside."""


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the localization maps of all tagged training images; after a kill only missing shards are computed.

    Raises:
        UserError: no training image has a tag, or none is of the domain that related images are to be of, or the
            features of a class exceed their bound.
    """
    localize, names = config.localize, context.classes
    rows, all_images = split_rows(context, "train", tagged=True), len(split_rows(context, "train"))
    counts: dict[str, Any] = {"images": len(rows), "images without tags": all_images - len(rows)}
    if not len(rows):
        raise UserError(f"none of {all_images} training images has a tag", "tagged images to localize", "add tags")
    if not localize.related:
        counts["maps"] = sum(map(len, rows["tags"].to_pylist()))
        return StageResult(busy=_single_round_alone(config, context, rows), counts=counts)
    source = np.array(rows["domain"].to_pylist()) == "source"
    domain = localize.related_from
    check_domain(config, source)
    tags = Tags.of_index(rows["tags"], len(names))
    relations = draw_relations(localize, config.seed, tags, source)
    shape = feature_shape(config, context.inputs["train_classifier"], len(names))
    plan = plan_rounds(config, relations.needs(len(names)), shape, names)
    busy = _in_rounds(config, context, rows, tags, relations, plan)

    ordered = np.sort(relations.related, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ordered == relations.image[:, None]).any(axis=1)
    counts |= {"maps": len(relations.tag), "maps whose related images repeat": int(repeats.sum())}
    notes = []
    if repeats.any() and not localize.related_may_repeat:
        notes.append(
            f"{repeats.sum()} map(s) of classes with too few images repeat related images; that of a class's only "
            "image is related to itself"
        )
    if domain != "both":
        moved = int((source[relations.related] != (domain == "source")).any(axis=1).sum())
        counts["maps whose related images are of the other domain"] = moved
        if moved:
            notes.append(
                f"{moved} map(s) have related images of both domains: their class has no other of the {domain}"
            )
    if localize.evidence:
        alone = int((relations.related == relations.image[:, None]).all(axis=1).sum())
        counts["maps without evidence, of a class's only image"] = alone
        everywhere = np.flatnonzero(tags.matrix(relations.bank).all(axis=0))
        counts["maps without unrelated images in the bank"] = missing = int(np.isin(relations.tag, everywhere).sum())
        if missing:
            notes.append(f"{missing} map(s) have no evidence: every image of the bank has their class")
    if localize.contrastive:
        counts["maps with a contrastive part"] = int((np.diff(relations.others_start) > 0).sum())
    embedded = sum(map(len, plan.images))
    counts |= {"rounds": len(plan.classes), "images embedded": embedded, "GiB of features": round(plan.gib, 3)}
    if len(plan.classes) > 1:
        notes.append(
            f"features are kept in {len(plan.classes)} rounds to hold localize.features_gb={localize.features_gb:g}: "
            f"{embedded} embeddings of {len(rows)} images"
        )
    return StageResult(busy=busy, counts=counts, notes=tuple(notes))
