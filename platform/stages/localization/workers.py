"""The workers of localization: images -> features and single-round maps; features -> maps of related images."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_squares
from mcis.datasets.index import shown
from mcis.datasets.sampling.related_images import Relations
from mcis.datasets.tables.backbone_outputs import Features
from mcis.models.backbones import to_unit
from mcis.models.classifier import SELF_TRANSFORMS, pair_kinds, seen_from_n, transform
from mcis.models.localization import embed, released_map
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier, move_channels_last
from mcis.platform.runs.output_tables import map_rows
from mcis.platform.stages.localization.features import FeatureFiles, write_features


def embed_rows(rows: pa.Table) -> pa.Table:
    """What `Embed` reads of N images: their rows with `position` and the number of their first map."""
    counts = np.diff(rows["tags"].combine_chunks().offsets.to_numpy())
    part = rows.select(["image_id", "uri", "content_hash", "domain", "tags"])
    columns = {"position": np.arange(len(rows)), "first_map": np.cumsum(counts) - counts}
    return pa.table({**{name: part[name] for name in part.column_names}, **columns})


def relate_rows(rows: pa.Table, relations: Relations) -> pa.Table:
    """What `Relate` reads of N images: image_id, position, first_map, and lists with an entry per map: tags, and
    `related` and `others`, lists of positions."""
    maps, related = np.arange(len(relations.tag) + 1), relations.related
    of_related = _lists(maps * related.shape[1], related.reshape(-1))
    return pa.table(
        {
            "image_id": rows["image_id"],
            "position": np.arange(len(rows)),
            "first_map": relations.start[:-1],
            "tags": _lists(relations.start, relations.tag),
            "related": _lists(relations.start, of_related),
            "others": _lists(relations.start, _lists(relations.others_start, relations.others)),
        }
    )


def _lists(starts: NDArray[np.int64], values: pa.Array | NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))


class Embed:
    """Rows of images (`embed_rows`) -> their single-round maps (MAPS_SCHEMA).

    Args:
        weights: folder of the trained classifier of `classes` classes.
        outputs: what the frozen backbone makes of the images, by the rows' `position`; None = it is not known.
        features: folder of the images' features, which the worker writes; None = they are not kept.
        selves: folder of the self pairs' maps, which the worker writes for the released maps; None = there are none.
    """

    def __init__(
        self,
        config: Config,
        weights: Path,
        classes: int,
        gpu: bool,
        outputs: Features | None,
        features: Path | None,
        selves: Path | None,
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        model = load_classifier(config.classifier, weights, classes)
        self.model = move_channels_last(model, self.device)
        self.features, self.selves, self.outputs = features, selves, outputs
        self.batch = min(config.localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        embeddings: list[NDArray[np.float16]] = []
        selves: list[NDArray[np.float32]] = []
        parts = [
            self._batch(rows.slice(start, self.batch), embeddings, selves) for start in range(0, len(rows), self.batch)
        ]
        if self.features is not None:
            write_features(self.features, rows["position"][0].as_py(), np.concatenate(embeddings))
        if self.selves is not None:
            write_features(self.selves, rows["first_map"][0].as_py(), np.concatenate(selves))
        return pa.concat_tables(parts)

    def kept(self, rows: pa.Table) -> NDArray[np.float16]:
        """What is kept of the images of at most a batch of rows, (N, D, H, W)."""
        return self._sound(rows, self._embedding(self._images(rows), self._known(rows))[: len(rows)].half())

    def _embedding(self, images: Tensor, known: tuple[Tensor, Tensor] | None) -> Tensor:
        localize, model = self.config.localize, self.model
        scales, mirror = localize.extra_scales, localize.mirror
        return embed(model.backbone, model.embedding, images, extra_scales=scales, mirror=mirror, known=known)

    def _batch(
        self, rows: pa.Table, embeddings: list[NDArray[np.float16]], selves: list[NDArray[np.float32]]
    ) -> pa.Table:
        """Single-round maps of at most a batch of rows; appends what is kept of their images."""
        known = self._known(rows)
        if known is not None and not self.config.localize.extra_scales and self.selves is None:
            side = self.config.classifier.input_size
            images = torch.zeros(1, device=self.device).expand(self.batch, 3, side, side)  # of which nothing is read
        else:
            images = self._images(rows)
        refine, backbone = self.config.classifier.equivariant.weight > 0, self.model.backbone
        with backbone.watching(*(backbone.middle if refine else ())) as middle:
            embedding = self._embedding(images, known)
        if self.features is not None:
            embeddings.append(self._sound(rows, embedding[: len(rows)].half()))
        activations = self.model.activations(embedding)
        ids, tags, maps = [], [], [activations[0, :0]]
        for n, row in enumerate(rows.select(["image_id", "tags", "domain"]).to_pylist()):
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
            own = activations[n, row["tags"]]
            if refine:  # image by image, so that no more than one affinity of all positions is laid out
                own = self.model.refined(images[n : n + 1], own[None], [m[n : n + 1] for m in middle])[0, 1:]
            maps.append(own)
            if self.selves is not None:
                kind = torch.tensor([int(row["domain"] == "source")], device=self.device)
                selves.append(self._self_maps(images[n], embedding[n], row["tags"], kind).cpu().numpy())
        return map_rows(ids, tags, torch.cat(maps).cpu().numpy(), self.model.backbone.grids(images, embedding).rows)

    def _images(self, rows: pa.Table) -> Tensor:
        """Normalized images of a full batch, (batch, 3, S, S); the last image fills it up.

        Kernels are chosen by shape: with batches of one size, an image's features are the same to the bit whatever
        the other images of its batch.
        """
        pixels = read_squares(rows, self.config.classifier.input_size)
        pixels = pixels[np.minimum(np.arange(self.batch), len(rows) - 1)]
        return self.model.backbone.normalize(to_unit(torch.from_numpy(pixels).to(self.device)))

    def _known(self, rows: pa.Table) -> tuple[Tensor, Tensor] | None:
        """The backbone's outputs of a full batch and of its mirror images, where they were computed before."""
        if self.outputs is None:
            return None
        positions = rows["position"].to_numpy()[np.minimum(np.arange(self.batch), len(rows) - 1)]
        both = [self.outputs(positions, np.full(len(positions), mirrored)) for mirrored in (False, True)]
        plain, mirrored = (torch.from_numpy(outputs).to(self.device).float() for outputs in both)
        return plain, mirrored

    def _sound(self, rows: pa.Table, kept: Tensor) -> NDArray[np.float16]:
        """What is kept of the images of some rows, float16."""
        if not kept.isfinite().all():
            raise UserError(
                f"features beyond float16's range among the images {shown(rows['image_id'].to_pylist())}",
                "activations of a sound training",
                "look at the training's loss curve, and repeat it with a lower learning rate",
            )
        return np.ascontiguousarray(kept.cpu().numpy())  # of one layout, kept or not, so that sums are the same

    def _self_maps(self, image: Tensor, embedding: Tensor, tags: list[int], kind: Tensor) -> Tensor:
        """Sum of the four maps of the self pairs (RELEASED_RECIPE, "Localization maps"), (T, H, W)."""
        backbone, target = self.model.backbone, self.model.backbone.grids(image, embedding)
        total = torch.zeros(len(tags), *embedding.shape[1:], device=self.device)
        for name in SELF_TRANSFORMS:
            seen = transform(image[None], name)
            transformed = self.model.embed(seen)[0]
            grids = backbone.grids(seen, transformed)
            maps = torch.stack(
                [
                    released_map(self.model.co_maps(transformed, embedding[None], tag, kind=kind, target_is_n=True)[0])
                    for tag in tags
                ]
            )
            if name == "flip":
                of_image = [
                    released_map(self.model.co_maps(embedding, transformed[None], tag, kind=kind)[0], always=True)
                    for tag in tags
                ]
                total += torch.stack(of_image)
                maps, grids = maps.flip(2), grids.mirrored()
            total += resample(maps, grids, target, "bicubic").clamp(0, 1)
        return total


class _EmbeddedAnew:
    """Embeds images whenever they are asked for, as their features are not kept; the last ones are at hand.

    Args:
        rows: of all images.
    """

    def __init__(self, embed: Embed, rows: pa.Table):
        self.embed, self.images = embed, embed_rows(rows)
        self.last: LRUCache[int, NDArray[np.float16]] = LRUCache(8 * embed.batch)

    def rows(self, positions: list[int]) -> NDArray[np.float32]:
        """As `FeatureFiles.rows`."""
        found = {position: self.last[position] for position in positions if position in self.last}
        missing = [position for position in dict.fromkeys(positions) if position not in found]
        for first in range(0, len(missing), self.embed.batch):
            some = missing[first : first + self.embed.batch]
            found |= zip(some, self.embed.kept(self.images.take(pa.array(some))), strict=True)
        self.last.update(found)
        return np.stack([found[position] for position in positions]).astype(np.float32)


class _Target(NamedTuple):
    """An image whose maps are made, with what all its maps share.

    Attributes:
        embedding: (D, H, W).
        queries: for a related image of the target domain and one of the source, (2, HW, C'), or one for both, (1, HW,
            C').
    """

    embedding: Tensor
    queries: Tensor


class Relate:
    """Rows of images with their related images (`relate_rows`) -> multi-round maps (MAPS_SCHEMA).

    Args:
        weights, classes, outputs: as of `Embed`.
        features: folder of the images' features; None = they are not kept, and images are embedded anew.
        selves: folder of the self pairs' maps, for the released maps.
        rows: of all images, and whether each is of the source domain, (N,).
    """

    def __init__(
        self,
        config: Config,
        weights: Path,
        classes: int,
        gpu: bool,
        outputs: Features | None,
        features: Path | None,
        selves: Path | None,
        rows: pa.Table,
        source: NDArray[np.bool_],
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.source = torch.from_numpy(source).to(self.device)
        self.domains = torch.tensor([False, True] if source.any() else [False], device=self.device)
        embed = Embed(config, weights, classes, gpu, outputs, None, None)
        self.model = embed.model
        self.features = FeatureFiles(features) if features else _EmbeddedAnew(embed, rows)
        self.selves = FeatureFiles(selves) if selves else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.to_pylist()
        ids, tags = map(list, zip(*((row["image_id"], tag) for row in images for tag in row["tags"]), strict=True))
        maps = torch.cat([self.maps(row) for row in images])
        grid = self.model.backbone.layout.grid(self.config.classifier.input_size, maps.shape[1])
        return map_rows(ids, tags, maps.cpu().numpy(), grid)

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """The maps of one image's T tags, (T, H, W)."""
        target = self._target(row["position"])
        of_maps = enumerate(zip(row["tags"], row["related"], row["others"], strict=True), row["first_map"])
        return torch.stack([self._map(target, number, *of_map) for number, of_map in of_maps])

    def _map(self, target: _Target, number: int, tag: int, related: list[int], others: list[int]) -> Tensor:
        """The map of class `tag`, (H, W).

        Args:
            number: of the map.
            related, others: positions of related images, and of those for the contrastive part.
        """
        query = self._facing(target.queries, related)
        activation = self.model.co_maps(target.embedding, self._embeddings(related), tag, query=query).mean(dim=0)
        if others:
            query = self._facing(target.queries, others)
            contrasted = self.model.contrastive_maps(target.embedding, self._embeddings(others), tag, query=query)
            r, q = len(related), len(others)
            activation = (r * activation + q * contrasted.mean(dim=0)) / (r + q)
        if self.selves is not None:
            selves = torch.from_numpy(self.selves.rows([number])[0]).to(self.device)
            activation = ((selves + released_map(activation)) / 5 * 255).round() / 255
        return activation

    def _target(self, position: int) -> _Target:
        embedding = self._embeddings([position])[0]
        method = self.config.localize.method
        if method.affinity == "identity":
            queries = self.model.query(embedding, identity=True)[None]
        else:
            # F_n^T W_P depends on the other image's domain alone, so that all maps of an image share it.
            source = self.source[position]
            kinds, target_is_n = pair_kinds(source, self.domains), seen_from_n(source, self.domains, method.target)
            queries = self.model.query(embedding, kind=kinds, target_is_n=target_is_n)
            queries = queries if queries.ndim == 3 else queries[None]  # the identity is the same for both
        return _Target(embedding, queries)

    def _facing(self, queries: Tensor, images: list[int]) -> Tensor:
        """The query for each of some other images, (R, HW, C'), or the only one there is, (HW, C')."""
        return queries[0] if len(queries) == 1 else queries[self.source[images].long()]

    def _embeddings(self, positions: list[int]) -> Tensor:
        """Embeddings of images, (N, D, H, W)."""
        return torch.from_numpy(self.features.rows(positions)).to(self.device)


class Pool:
    """Image rows -> of each its `vector`, (C',): the mean over its positions of what the affinity compares.

    Args:
        weights: folder of the trained classifier of `classes` classes.
        outputs: what its frozen backbone makes of the images, by the rows' `position`; None = the images are read.
    """

    def __init__(self, config: Config, weights: Path, classes: int, gpu: bool, outputs: Features | None):
        self.config, self.device, self.outputs = config, torch.device("cuda" if gpu else "cpu"), outputs
        self.model = load_classifier(config.classifier, weights, classes).to(self.device)
        self.batch = min(config.localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        parts = [self._vectors(rows.slice(start, self.batch)) for start in range(0, len(rows), self.batch)]
        vectors = torch.cat(parts).cpu().numpy()
        return pa.table({"image_id": rows["image_id"], "vector": list(vectors)})

    def _vectors(self, rows: pa.Table) -> Tensor:
        if self.outputs:
            outputs = torch.from_numpy(self.outputs(rows["position"].to_numpy())).to(self.device).float()
        else:
            size = self.config.classifier.input_size
            pixels = read_squares(rows, size)
            images = to_unit(torch.from_numpy(pixels).to(self.device))
            outputs = self.model.backbone(self.model.backbone.normalize(images))
        return self.model.keys(self.model.embedding(outputs)).mean(dim=(2, 3))
