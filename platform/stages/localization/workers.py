"""The workers of localization: images -> features and single-round maps; features -> maps of related images."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_squares
from mcis.datasets.index import shown
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES, Relations
from mcis.datasets.tables.memory_mapped import CachedRows, Features, cache_table
from mcis.models.backbones import to_float_images
from mcis.models.classifier import SELF_TRANSFORMS, transform
from mcis.models.coattention import pair_kinds, target_is_image_n
from mcis.models.localization import embed, released_map
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.networks.features import features_shape
from mcis.platform.outputs.relations import VECTORS
from mcis.platform.outputs.tables import map_rows
from mcis.platform.runs.files import write_table


def embed_rows(rows: pa.Table) -> pa.Table:
    """What `Embed` reads of N images: their rows with `position` and the number of their first map."""
    counts = np.diff(rows["tags"].combine_chunks().offsets.to_numpy())
    part = rows.select(["image_id", "uri", "content_hash", "domain", "tags"])
    columns = {"position": np.arange(len(rows)), "first_map": np.cumsum(counts) - counts}
    return pa.table({**{name: part[name] for name in part.column_names}, **columns})


def relate_rows(rows: pa.Table, relations: Relations, hops: int = 1) -> pa.Table:
    """What `Relate` reads of N images: image_id, position, first_map, and lists with an entry per map: tags, and
    `related` and `others`, lists of positions, and `theirs`, the numbers of the related images' maps of that tag, -1 of
    those without it, where there are several hops."""
    maps, related = np.arange(len(relations.tag) + 1), relations.related
    of_related = _lists(maps * related.shape[1], related.reshape(-1))
    theirs = relations.numbers() if hops > 1 else related[:, :0]
    of_theirs = _lists(maps * theirs.shape[1], theirs.reshape(-1))
    return pa.table(
        {
            "image_id": rows["image_id"],
            "position": np.arange(len(rows)),
            "first_map": relations.start[:-1],
            "tags": _lists(relations.start, relations.tag),
            "related": _lists(relations.start, of_related),
            "theirs": _lists(relations.start, of_theirs),
            "others": _lists(relations.start, _lists(relations.contrastive_start, relations.contrastive)),
        }
    )


def write_rows(folder: Path, first: int, values: NDArray[Any]) -> None:
    """Writes the rows `first`, `first + 1`, ... of features as a shard of `CachedRows`.

    They reach the disk before the shard of maps exists that says they are there. Where a shard was written in parts,
    because its process died, any that holds a row will do: they agree.
    """
    table = cache_table(np.ascontiguousarray(values))
    write_table(folder / f"part-{first:010d}-{first + len(values):010d}.arrow", table)


def _lists(starts: NDArray[np.int64], values: pa.Array | NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))


class Embed:
    """Rows of images (`embed_rows`) -> their single-round maps (MAPS_SCHEMA).

    Args:
        weights: folder of the trained classifier of `classes` classes.
        outputs: what the frozen backbone makes of the images, by the rows' `position`; None = it is not known.
        folder: where the worker writes what maps with related images are made of: the images' `features`; `selves`, the
            self pairs' maps, for the released maps; in VECTORS of each image the mean of its features as it is, (C,),
            where the nearest images are related.
    """

    def __init__(self, config: Config, weights: Path, classes: int, outputs: Features | None, folder: Path):
        self.config, self.device = config, torch.device(config.compute.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)
        self.outputs, self.folder, how = outputs, folder, config.localize
        self.features = how.related > 0
        self.selves = self.features and how.method.name == "released"
        self.vectors = self.features and RELATED_IMAGE_RULES[how.related_by].needs_vectors
        self.batch = min(how.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        kept: dict[str, list[NDArray[Any]]] = {"features": [], "selves": [], VECTORS: []}
        parts = [self._batch(rows.slice(start, self.batch), kept) for start in range(0, len(rows), self.batch)]
        first = rows["position"][0].as_py()
        if self.features:
            write_rows(self.folder / "features", first, np.concatenate(kept["features"]))
        if self.selves:
            write_rows(self.folder / "selves", rows["first_map"][0].as_py(), np.concatenate(kept["selves"]))
        if self.vectors:
            vectors = pa.table({"image_id": rows["image_id"], "vector": list(np.concatenate(kept[VECTORS]))})
            write_table(self.folder / VECTORS / f"part-{first:08d}-{first + len(rows):08d}.parquet", vectors)
        return pa.concat_tables(parts)

    def _batch(self, rows: pa.Table, kept: dict[str, list[NDArray[Any]]]) -> pa.Table:
        """Single-round maps of at most a batch of rows; appends what is kept of their images."""
        known = self._known(rows)
        if known and not self.config.localize.extra_scales and not self.selves:
            side = self.config.classifier.input_size
            images = torch.zeros(1, device=self.device).expand(self.batch, 3, side, side)  # of which nothing is read
        else:
            images = self._images(rows)
        refine, how, backbone = self.config.classifier.equivariant.weight > 0, self.config.localize, self.model.backbone
        with backbone.capture_outputs(*(backbone.correlation_layers if refine else ())) as middle:
            known = known or [backbone(images)]
            scales, mirror = how.extra_scales, how.hflip
            embedding = embed(backbone, self.model.standard, images, extra_scales=scales, hflip=mirror, known=known)
        if self.vectors:
            kept[VECTORS].append(self.model.standard(known[0])[: len(rows)].mean(dim=(2, 3)).cpu().numpy())
        if self.features:
            features = embedding[: len(rows)].half()
            if not features.isfinite().all():
                raise UserError(
                    f"features beyond float16's range among the images {shown(rows['image_id'].to_pylist())}",
                    "activations of a sound training",
                    "look at the training's loss curve, and repeat it with a lower learning rate",
                )
            kept["features"].append(features.cpu().numpy())
        activations = self.model.activations(embedding)
        ids, tags, maps = [], [], [activations[0, :0]]
        for n, row in enumerate(rows.select(["image_id", "tags", "domain"]).to_pylist()):
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
            own = activations[n, row["tags"]]
            if refine:  # image by image, so that no more than one affinity of all positions is laid out
                own = self.model.refined(images[n : n + 1], own[None], [m[n : n + 1] for m in middle])[0, 1:]
            maps.append(own)
            if self.selves:
                kind = torch.tensor([int(row["domain"] == "source")], device=self.device)
                kept["selves"].append(self._self_maps(images[n], embedding[n], row["tags"], kind).cpu().numpy())
        return map_rows(ids, tags, torch.cat(maps).cpu().numpy(), self.model.backbone.grids(images, embedding).rows)

    def _images(self, rows: pa.Table) -> Tensor:
        """Normalized images of a full batch, (batch, 3, S, S); the last image fills it up.

        Kernels are chosen by shape: with batches of one size, an image's features are the same to the bit whatever
        the other images of its batch.
        """
        pixels = read_squares(rows, self.config.classifier.input_size)
        pixels = pixels[np.minimum(np.arange(self.batch), len(rows) - 1)]
        return self.model.backbone.normalize(to_float_images(torch.from_numpy(pixels).to(self.device)))

    def _known(self, rows: pa.Table) -> list[Tensor]:
        """The backbone's outputs of a full batch and of its mirror images, where they were computed before."""
        if self.outputs is None:
            return []
        positions = rows["position"].to_numpy()[np.minimum(np.arange(self.batch), len(rows) - 1)]
        both = [self.outputs(positions, np.full(len(positions), mirrored)) for mirrored in (False, True)]
        return [torch.from_numpy(outputs).to(self.device).float() for outputs in both]

    def _self_maps(self, image: Tensor, embedding: Tensor, tags: list[int], kind: Tensor) -> Tensor:
        """Sum of the four maps of the self pairs (RELEASED_RECIPE, "Localization maps"), (T, H, W)."""
        backbone, target = self.model.backbone, self.model.backbone.grids(image, embedding)
        total = torch.zeros(len(tags), *embedding.shape[1:], device=self.device)
        for name in SELF_TRANSFORMS:
            seen = transform(image[None], name)
            transformed = self.model.features(seen)[0]
            grids = backbone.grids(seen, transformed)
            query = self.model.query(transformed, kind=kind, target_is_n=True)
            of_both = (self.model.co_maps(query, transformed, embedding[None], tag) for tag in tags)
            maps = torch.stack([released_map(own[0]) for own in of_both])
            if name == "hflip":
                query = self.model.query(embedding, kind=kind)
                of_image = (self.model.co_maps(query, embedding, transformed[None], tag) for tag in tags)
                total += torch.stack([released_map(own[0], always=True) for own in of_image])
                maps, grids = maps.flip(2), grids.hflipped()
            total += resample(maps, grids, target, "bicubic").clamp(0, 1)
        return total


class Relate:
    """Rows of images with their related images (`relate_rows`) -> multi-round maps (MAPS_SCHEMA).

    Args:
        weights, classes: as of `Embed`.
        folder: as `Embed` has filled it; maps of a hop that is not the last are left there for the next.
        source: whether each image is of the source domain, (N,).
        hop: of `localize.hops`, from 1.
    """

    def __init__(self, config: Config, weights: Path, classes: int, folder: Path, source: NDArray[np.bool_], hop: int):
        self.config, self.device = config, torch.device(config.compute.device)
        self.source = torch.from_numpy(source).to(self.device)
        self.domains = torch.tensor([False, True] if source.any() else [False], device=self.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)
        shape = features_shape(config.classifier)
        self.features = CachedRows(folder / "features", shape)
        released = config.localize.method.name == "released"
        self.selves = CachedRows(folder / "selves", shape[1:]) if released else None
        self.before = CachedRows(folder / f"hop-{hop - 1}", shape[1:]) if hop > 1 else None
        self.after = folder / f"hop-{hop}" if hop < config.localize.hops else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.to_pylist()
        ids, tags = map(list, zip(*((row["image_id"], tag) for row in images for tag in row["tags"]), strict=True))
        maps = torch.cat([self.maps(row) for row in images])
        if self.after:
            write_rows(self.after, images[0]["first_map"], maps.cpu().numpy())
        grid = self.model.backbone.layout.grid(self.config.classifier.input_size, maps.shape[1])
        return map_rows(ids, tags, maps.cpu().numpy(), grid)

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """The maps of one image's T tags, (T, H, W)."""
        embedding = self._rows(self.features, [row["position"]])[0]
        queries = self._queries(embedding, row["position"])
        numbers = range(row["first_map"], row["first_map"] + len(row["tags"]))
        if self.before:
            passed = zip(row["tags"], row["related"], row["theirs"], strict=True)
            return torch.stack([self._passed_on(embedding, queries, *each) for each in passed])
        of_maps = zip(numbers, row["tags"], row["related"], row["others"], strict=True)
        return torch.stack([self._map(embedding, queries, *of_map) for of_map in of_maps])

    def _queries(self, embedding: Tensor, position: int) -> Tensor:
        """F_n^T W_P of an image as its related images meet it; it depends on their domain alone, so that all maps of
        the image share it: for one of the target and one of the source, (2, HW, C), or one for both, (1, HW, C)."""
        method, source = self.config.localize.method, self.source[position]
        if method.w_p == "identity":
            return self.model.query(embedding, identity=True)[None]
        kinds, target_is_n = pair_kinds(source, self.domains), target_is_image_n(source, self.domains, method.target)
        queries = self.model.query(embedding, kind=kinds, target_is_n=target_is_n)
        return queries if queries.ndim == 3 else queries[None]  # the identity is the same for both

    def _passed_on(self, embedding: Tensor, queries: Tensor, tag: int, related: list[int], theirs: list[int]) -> Tensor:
        """The map of class `tag` in a further hop, (H, W), of the maps that the related images had before, `theirs`."""
        assert self.before
        passed = [None if number < 0 else self._rows(self.before, [number])[0] for number in theirs]
        query, features = self._query_for(related, queries), self._rows(self.features, related)
        return self.model.co_maps(query, embedding, features, tag, passed).mean(dim=0)

    def _map(
        self, embedding: Tensor, queries: Tensor, number: int, tag: int, related: list[int], others: list[int]
    ) -> Tensor:
        """Map `number`, of class `tag`, (H, W), by the positions of related images and, for contrast, of `others`."""
        query = self._query_for(related, queries)
        activation = self.model.co_maps(query, embedding, self._rows(self.features, related), tag).mean(dim=0)
        if others:
            query = self._query_for(others, queries)
            contrasted = self.model.contrastive_maps(query, embedding, self._rows(self.features, others), tag)
            r, q = len(related), len(others)
            activation = (r * activation + q * contrasted.mean(dim=0)) / (r + q)
        if self.selves is not None:
            selves = self._rows(self.selves, [number])[0]
            activation = ((selves + released_map(activation)) / 5 * 255).round() / 255
        return activation

    def _query_for(self, images: list[int], queries: Tensor) -> Tensor:
        """The query for each of some other images, (R, HW, C), or the only one there is, (HW, C)."""
        return queries[0] if len(queries) == 1 else queries[self.source[images].long()]

    def _rows(self, cached: CachedRows, positions: list[int]) -> Tensor:
        """Embeddings of N images, (N, C, H, W), or N maps of self pairs, (N, H, W)."""
        found = [row for position in positions if (row := cached.row(position)) is not None]
        assert len(found) == len(positions), "the stage keeps what it embeds until its maps are made"
        return torch.from_numpy(np.stack(found)).to(self.device).float()  # which numpy takes ten times as long for
