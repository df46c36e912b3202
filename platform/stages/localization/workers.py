"""The workers of localization: images -> features and single-round maps; features -> maps; tables of rounds -> one."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_squares
from mcis.datasets.index import shown
from mcis.datasets.tables.backbone_outputs import Features
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_unit
from mcis.models.classifier import SELF_TRANSFORMS, pair_kinds, seen_from_n, transform
from mcis.models.localization import embed, released_map
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import load_classifier, move_channels_last
from mcis.platform.runs.output_tables import map_rows
from mcis.platform.stages.localization.features import FeatureFiles, write_features, write_runs


class _Kept(NamedTuple):
    """What a shard's images leave for those that relate images: their embeddings, and the maps of their self pairs by
    the number of an image's first map."""

    embeddings: list[NDArray[np.float16]]
    selves: dict[int, NDArray[np.float32]]


class Embed:
    """Image rows (`rounds.embed_rows`) -> single-round maps (MAPS_SCHEMA) of the rows that are `fresh`.

    Args:
        weights: folder of the trained classifier of `classes` classes.
        features: folder of the round's features, which the worker writes; None = they are not kept.
        selves: folder of the self pairs' maps, which the worker writes for the released maps; None = there are none.
        outputs: what the frozen backbone makes of the images, by the rows' `position`; None = it is not known.
    """

    def __init__(
        self,
        config: Config,
        weights: Path,
        classes: int,
        gpu: bool,
        features: Path | None,
        selves: Path | None,
        outputs: Features | None = None,
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        model = load_classifier(config.classifier, weights, classes)
        self.model = move_channels_last(model, self.device)
        self.features, self.selves, self.outputs = features, selves, outputs
        self.batch = min(config.localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        kept = _Kept([], {})
        parts = [self._batch(rows.slice(start, self.batch), kept) for start in range(0, len(rows), self.batch)]
        if self.features is not None:
            write_features(self.features, rows["slot"][0].as_py(), np.concatenate(kept.embeddings))
        if self.selves is not None:
            write_runs(self.selves, kept.selves)
        return pa.concat_tables(parts)

    def _batch(self, rows: pa.Table, kept: "_Kept") -> pa.Table:
        localize, known = self.config.localize, self._known(rows)
        if known is not None and not localize.extra_scales and self.selves is None:
            side = self.config.classifier.input_size
            images = torch.zeros(1, device=self.device).expand(self.batch, 3, side, side)  # of which nothing is read
        else:
            images = self._images(rows)
        refine, backbone = self.config.classifier.equivariant.weight > 0, self.model.backbone
        with backbone.watching(*(backbone.middle if refine else ())) as middle:
            embedding = embed(
                backbone,
                self.model.embedding,
                images,
                extra_scales=localize.extra_scales,
                mirror=localize.mirror,
                known=known,
            )
        if self.features is not None:
            kept.embeddings.append(self._sound(rows, embedding[: len(rows)].half()))
        activations = self.model.activations(embedding)
        ids, tags, maps = [], [], [activations[0, :0]]
        for n, row in enumerate(rows.select(["image_id", "tags", "domain", "first_map", "fresh"]).to_pylist()):
            if not row["fresh"]:
                continue
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
            own = activations[n, row["tags"]]
            if refine:  # image by image, so that no more than one affinity of all positions is laid out
                own = self.model.refined(images[n : n + 1], own[None], [m[n : n + 1] for m in middle])[0, 1:]
            maps.append(own)
            if self.selves is not None:
                kind = torch.tensor([int(row["domain"] == "source")], device=self.device)
                total = self._self_maps(images[n], embedding[n], row["tags"], kind)
                kept.selves[row["first_map"]] = total.cpu().numpy()
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
        return kept.cpu().numpy()

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


class _Target(NamedTuple):
    """An image whose maps are made, with what all its maps share.

    Attributes:
        embedding: (D, H, W).
        single_round: its single-round maps, (K, H, W).
        queries: for a related image of the target domain and one of the source, (2, HW, C'), or one for both, (1, HW,
            C').
    """

    embedding: Tensor
    single_round: Tensor
    queries: Tensor


class Relate:
    """Rows of images with their related images (`rounds.relate_rows`) -> multi-round maps (MAPS_SCHEMA).

    Where the configuration has several numbers of related images, the table has an image's maps of each of them, told
    apart by a further column `related`. Each pair is mapped once: maps of R are of the first R related images.

    Args:
        weights: folder of the trained classifier of `classes` classes.
        features: folder of the round's features.
        selves: folder of the self pairs' maps, for the released maps.
        source: whether each image in `features` is of the source domain, (N,).
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
    ):
        self.config, self.device = config, torch.device("cuda" if gpu else "cpu")
        self.source = torch.from_numpy(source).to(self.device)
        self.domains = torch.tensor([False, True] if source.any() else [False], device=self.device)
        model = load_classifier(config.classifier, weights, classes)
        self.model = move_channels_last(model, self.device)
        self.features, self.selves = FeatureFiles(features), FeatureFiles(selves) if selves else None
        self.numbers = [number for number in config.localize.numbers if number]

    def __call__(self, rows: pa.Table) -> pa.Table:
        images, numbers = rows.to_pylist(), self.numbers
        of_maps = [(row["image_id"], tag, number) for row in images for number in numbers for tag in row["tags"]]
        ids, tags, numbers = map(list, zip(*of_maps, strict=True))
        maps = torch.cat([self.maps(row).flatten(0, 1) for row in images])
        grid = self.model.backbone.layout.grid(self.config.classifier.input_size, maps.shape[1])
        table = map_rows(ids, tags, maps.cpu().numpy(), grid)
        return table.append_column("related", pa.array(numbers, pa.uint8())) if len(self.numbers) > 1 else table

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """The maps of one image's T tags for each of N numbers of related images, (N, T, H, W)."""
        target = self._target(row["slot"])
        of_maps = zip(row["tags"], row["maps"], row["related"], row["others"], row["ranks"], strict=True)
        return torch.stack([self._maps(target, tag, *of_map) for tag, *of_map in of_maps], dim=1)

    def _maps(
        self, target: _Target, tag: int, number: int, related: list[int], others: list[int], ranks: list[int]
    ) -> Tensor:
        """Maps of class `tag` for each number of related images, (N, H, W).

        Args:
            number: of the map.
            related, others: slots of related images, and of those for the contrastive part, which have `ranks`.
        """
        query = self._facing(target.queries, related)
        activations = self.model.co_maps(target.embedding, self._embeddings(related), tag, query=query)
        contrasted = activations[:0]
        if others:
            query = self._facing(target.queries, others)
            contrasted = self.model.contrastive_maps(target.embedding, self._embeddings(others), tag, query=query)
        selves = None
        if self.selves is not None:
            selves = torch.from_numpy(self.selves.rows([number])[0]).to(self.device)
        first = torch.tensor(ranks, device=self.device)
        return torch.stack(
            [self._map(activations[:r], contrasted[first < r], target.single_round[tag], selves) for r in self.numbers]
        )

    def _map(self, activations: Tensor, contrasted: Tensor, single_round: Tensor, selves: Tensor | None) -> Tensor:
        """One map, (H, W), of its activations with related images, (R, H, W), and contrastive ones, (Q, H, W)."""
        activation = activations.mean(dim=0)
        if len(contrasted):
            r, q = len(activations), len(contrasted)
            activation = (r * activation + q * contrasted.mean(dim=0)) / (r + q)
        if self.config.localize.method.averaged:
            activation = (activation + single_round) / 2
        if selves is not None:
            activation = ((selves + released_map(activation)) / 5 * 255).round() / 255
        return activation

    def _target(self, slot: int) -> _Target:
        embedding = self._embeddings([slot])[0]
        method = self.config.localize.method
        if method.affinity == "identity":
            queries = self.model.query(embedding, identity=True)[None]
        else:
            # F_n^T W_P depends on the other image's domain alone, so that all maps of an image share it.
            source = self.source[slot]
            kinds, target_is_n = pair_kinds(source, self.domains), seen_from_n(source, self.domains, method.target)
            queries = self.model.query(embedding, kind=kinds, target_is_n=target_is_n)
            queries = queries if queries.ndim == 3 else queries[None]  # the identity is the same for both
        return _Target(embedding, self.model.activations(embedding[None])[0], queries)

    def _facing(self, queries: Tensor, images: list[int]) -> Tensor:
        """The query for each of some other images, (R, HW, C'), or the only one there is, (HW, C')."""
        return queries[0] if len(queries) == 1 else queries[self.source[images].long()]

    def _embeddings(self, slots: list[int]) -> Tensor:
        """Embeddings of images, (N, D, H, W)."""
        return torch.from_numpy(self.features.rows(slots)).to(self.device)


class Pool:
    """Image rows -> of each its `vector`, (C',): the mean over its positions of what the affinity compares.

    Args:
        weights: folder of the trained classifier of `classes` classes.
        features: what its frozen backbone makes of the images, by the rows' `position`; None = the images are read.
    """

    def __init__(self, config: Config, weights: Path, classes: int, gpu: bool, features: Features | None):
        self.config, self.device, self.outputs = config, torch.device("cuda" if gpu else "cpu"), features
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


class Merge:
    """Image rows -> their maps (MAPS_SCHEMA), out of the tables of all rounds.

    Args:
        related: takes the maps of so many related images, where the tables have a column that says how many.
    """

    def __init__(self, tables: list[Shards], related: int):
        self.tables, self.related = tables, related

    def __call__(self, rows: pa.Table) -> pa.Table:
        ids = rows["image_id"].to_pylist()
        pairs = zip(ids, rows["tags"].to_pylist(), strict=True)
        wanted = {pair: n for n, pair in enumerate((i, tag) for i, tags in pairs for tag in tags)}
        # A table at a time, so that each shard is read once.
        parts = [found for table in self.tables for i in ids if (found := table.rows(i)) is not None]
        maps = pa.concat_tables(parts)
        if "related" in maps.column_names:
            maps = maps.filter(pc.equal(maps["related"], self.related)).drop_columns("related")
        order = [wanted[pair] for pair in zip(maps["image_id"].to_pylist(), maps["class"].to_pylist(), strict=True)]
        return maps.take(np.argsort(order))
