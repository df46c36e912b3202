"""Workers of localization: images -> features and single-round maps; features -> maps with related images."""

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
    """Input of `Embed` for N images: their rows with `position` and the number of their first map, `first_map`."""
    num_maps = np.diff(rows["tags"].combine_chunks().offsets.to_numpy())
    table = rows.select(["image_id", "uri", "content_hash", "domain", "tags"])
    table = table.append_column("position", pa.array(np.arange(len(rows))))
    return table.append_column("first_map", pa.array(np.cumsum(num_maps) - num_maps))


def relate_rows(rows: pa.Table, relations: Relations, hops: int = 1) -> pa.Table:
    """Input of `Relate` for N images.

    Returns:
        Columns image_id, position and first_map, and lists with one entry per map: `tags`; `related` and `others`
        (positions of images); and, if there are several hops, `theirs` (numbers of the related images' maps of that
        tag, -1 for images without it).
    """
    related = relations.related
    theirs = relations.maps_of_related() if hops > 1 else related[:, :0]
    maps = np.arange(len(relations.tag) + 1)
    related_lists = _lists(maps * related.shape[1], related.reshape(-1))
    theirs_lists = _lists(maps * theirs.shape[1], theirs.reshape(-1))
    others_lists = _lists(relations.contrastive_start, relations.contrastive)
    return pa.table(
        {
            "image_id": rows["image_id"],
            "position": np.arange(len(rows)),
            "first_map": relations.start[:-1],
            "tags": _lists(relations.start, relations.tag),
            "related": _lists(relations.start, related_lists),
            "theirs": _lists(relations.start, theirs_lists),
            "others": _lists(relations.start, others_lists),
        }
    )


def write_rows(folder: Path, first: int, values: NDArray[Any]) -> None:
    """Writes consecutive rows of features, starting with row `first`, as a shard of `CachedRows`.

    The shard is on disk before the shard of maps that depends on it. If a process died and a shard was written twice in
    different parts, any part that holds a row can be read: they agree.
    """
    table = cache_table(np.ascontiguousarray(values))
    write_table(folder / f"part-{first:010d}-{first + len(values):010d}.arrow", table)


def _lists(starts: NDArray[np.int64], values: pa.Array | NDArray[np.int64]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))


class Embed:
    """Makes single-round maps: rows of images (`embed_rows`) -> MAPS_SCHEMA.

    It also writes what maps with related images need: `features` of the images; `selves`, the maps of self pairs, for
    released maps; and, for nearest related images, the mean feature of each image (C,) to the folder VECTORS.

    Args:
        weights: folder of the trained classifier.
        classes: number of classes K.
        outputs: cached outputs of the frozen backbone, by position; None if there are none.
        folder: folder for intermediate results.
    """

    def __init__(self, config: Config, weights: Path, classes: int, outputs: Features | None, folder: Path):
        self.config = config
        self.device = torch.device(config.compute.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)
        self.outputs = outputs
        self.folder = folder
        localize = config.localize
        self.writes_features = localize.related > 0
        self.writes_selves = self.writes_features and localize.method.name == "released"
        self.writes_vectors = self.writes_features and RELATED_IMAGE_RULES[localize.related_by].needs_vectors
        self.refines = config.classifier.equivariant.weight > 0
        self.batch = min(localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        written: dict[str, list[NDArray[Any]]] = {"features": [], "selves": [], VECTORS: []}
        starts = range(0, len(rows), self.batch)
        parts = [self._batch(rows.slice(start, self.batch), written) for start in starts]

        first = rows["position"][0].as_py()
        if self.writes_features:
            write_rows(self.folder / "features", first, np.concatenate(written["features"]))
        if self.writes_selves:
            write_rows(self.folder / "selves", rows["first_map"][0].as_py(), np.concatenate(written["selves"]))
        if self.writes_vectors:
            vectors = pa.table({"image_id": rows["image_id"], "vector": list(np.concatenate(written[VECTORS]))})
            write_table(self.folder / VECTORS / f"part-{first:08d}-{first + len(rows):08d}.parquet", vectors)
        return pa.concat_tables(parts)

    def _batch(self, rows: pa.Table, written: dict[str, list[NDArray[Any]]]) -> pa.Table:
        """Single-round maps of at most one batch of rows; appends features, selves and vectors to `written`."""
        backbone = self.model.backbone
        localize = self.config.localize
        outputs = self._cached_outputs(rows)
        if outputs and not localize.extra_scales and not self.writes_selves:
            side = self.config.classifier.input_size
            images = torch.zeros(1, device=self.device).expand(self.batch, 3, side, side)  # only its shape is used
        else:
            images = self._images(rows)

        captured_layers = backbone.correlation_layers if self.refines else ()
        with backbone.capture_outputs(*captured_layers) as middle:
            outputs = outputs or [backbone(images)]
            embedding = embed(
                backbone,
                self.model.standardize,
                images,
                extra_scales=localize.extra_scales,
                hflip=localize.hflip,
                outputs=outputs,
            )
        if self.writes_vectors:
            vectors = self.model.standardize(outputs[0])[: len(rows)].mean(dim=(2, 3))
            written[VECTORS].append(vectors.cpu().numpy())
        if self.writes_features:
            written["features"].append(self._half_features(embedding[: len(rows)], rows))

        activations = self.model.activations(embedding)
        ids = []
        tags = []
        maps = [activations[0, :0]]
        for n, row in enumerate(rows.select(["image_id", "tags", "domain"]).to_pylist()):
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
            image_maps = activations[n, row["tags"]]
            if self.refines:  # one image at a time, so that only one affinity of all positions is in memory
                levels = [level[n : n + 1] for level in middle]
                image_maps = self.model.refined(images[n : n + 1], image_maps[None], levels)[0, 1:]
            maps.append(image_maps)
            if self.writes_selves:
                kind = torch.tensor([int(row["domain"] == "source")], device=self.device)
                selves = self._self_maps(images[n], embedding[n], row["tags"], kind)
                written["selves"].append(selves.cpu().numpy())
        return map_rows(ids, tags, torch.cat(maps).cpu().numpy(), backbone.grids(images, embedding).rows)

    def _half_features(self, features: Tensor, rows: pa.Table) -> NDArray[np.float16]:
        """Features as float16.

        Raises:
            UserError: a value exceeds the range of float16.
        """
        half = features.half()
        if not half.isfinite().all():
            raise UserError(
                f"features exceed the range of float16 for some of the images {shown(rows['image_id'].to_pylist())}",
                "activations of a sound training",
                "look at the loss curve of the training, and repeat it with a lower learning rate",
            )
        return half.cpu().numpy()

    def _images(self, rows: pa.Table) -> Tensor:
        """Normalized images of a full batch, (batch, 3, S, S); a shorter batch is padded with its last image.

        Kernels are chosen by shape. With a constant batch size, the features of an image are the same to the bit,
        whatever the other images of its batch are.
        """
        pixels = read_squares(rows, self.config.classifier.input_size)
        pixels = pixels[np.minimum(np.arange(self.batch), len(rows) - 1)]
        return self.model.backbone.normalize(to_float_images(torch.from_numpy(pixels).to(self.device)))

    def _cached_outputs(self, rows: pa.Table) -> list[Tensor]:
        """Cached backbone outputs of a full batch and of its horizontal flip; empty if there is no cache."""
        if self.outputs is None:
            return []
        positions = rows["position"].to_numpy()[np.minimum(np.arange(self.batch), len(rows) - 1)]
        views = [self.outputs(positions, np.full(len(positions), flipped)) for flipped in (False, True)]
        return [torch.from_numpy(view).to(self.device).float() for view in views]

    def _self_maps(self, image: Tensor, embedding: Tensor, tags: list[int], kind: Tensor) -> Tensor:
        """Sum of the four maps of the self pairs (paper-vs-code, "Localization maps"), (T, H, W)."""
        backbone = self.model.backbone
        target_grids = backbone.grids(image, embedding)
        total = torch.zeros(len(tags), *embedding.shape[1:], device=self.device)
        for name in SELF_TRANSFORMS:
            transformed_image = transform(image[None], name)
            transformed = self.model.features(transformed_image)[0]
            grids = backbone.grids(transformed_image, transformed)
            query = self.model.query(transformed, kind=kind, target_is_n=True)
            transformed_maps = (self.model.co_maps(query, transformed, embedding[None], tag) for tag in tags)
            maps = torch.stack([released_map(of_tag[0]) for of_tag in transformed_maps])
            if name == "hflip":
                query = self.model.query(embedding, kind=kind)
                original_maps = (self.model.co_maps(query, embedding, transformed[None], tag) for tag in tags)
                total += torch.stack([released_map(of_tag[0], always=True) for of_tag in original_maps])
                maps = maps.flip(2)
                grids = grids.hflipped()
            total += resample(maps, grids, target_grids, "bicubic").clamp(0, 1)
        return total


class Relate:
    """Makes maps with related images: rows of images (`relate_rows`) -> MAPS_SCHEMA.

    Args:
        weights: folder of the trained classifier.
        classes: number of classes K.
        folder: folder written by `Embed`. Maps of all hops but the last are also written there, for the next hop.
        source: whether each image belongs to the source domain, (N,).
        hop: number of the hop, from 1 to `localize.hops`.
    """

    def __init__(self, config: Config, weights: Path, classes: int, folder: Path, source: NDArray[np.bool_], hop: int):
        self.config = config
        self.device = torch.device(config.compute.device)
        self.source = torch.from_numpy(source).to(self.device)
        self.domains = torch.tensor([False, True] if source.any() else [False], device=self.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)

        shape = features_shape(config.classifier)
        is_released = config.localize.method.name == "released"
        self.features = CachedRows(folder / "features", shape)
        self.selves = CachedRows(folder / "selves", shape[1:]) if is_released else None
        self.previous_maps = CachedRows(folder / f"hop-{hop - 1}", shape[1:]) if hop > 1 else None
        self.next_folder = folder / f"hop-{hop}" if hop < config.localize.hops else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.to_pylist()
        ids = []
        tags = []
        for row in images:
            ids += [row["image_id"]] * len(row["tags"])
            tags += row["tags"]
        maps = torch.cat([self.maps(row) for row in images])
        if self.next_folder:
            write_rows(self.next_folder, images[0]["first_map"], maps.cpu().numpy())
        grid = self.model.backbone.layout.grid(self.config.classifier.input_size, maps.shape[1])
        return map_rows(ids, tags, maps.cpu().numpy(), grid)

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """Maps of the T tags of an image, (T, H, W)."""
        embedding = self._read(self.features, [row["position"]])[0]
        queries = self._queries(embedding, row["position"])
        maps = []
        for t, tag in enumerate(row["tags"]):
            related = row["related"][t]
            if self.previous_maps:
                maps.append(self._next_hop_map(embedding, queries, tag, related, row["theirs"][t]))
            else:
                number = row["first_map"] + t
                maps.append(self._map(embedding, queries, number, tag, related, row["others"][t]))
        return torch.stack(maps)

    def _queries(self, embedding: Tensor, position: int) -> Tensor:
        """F_n^T W_P of an image (Eq. 2), which depends on its related images only through their domain.

        Returns:
            (2, HW, C) for related images of the target and the source domain, or (1, HW, C) if both are equal.
        """
        method = self.config.localize.method
        if method.w_p == "identity":
            return self.model.query(embedding, identity=True)[None]
        source = self.source[position]
        kinds = pair_kinds(source, self.domains)
        target_is_n = target_is_image_n(source, self.domains, method.target)
        queries = self.model.query(embedding, kind=kinds, target_is_n=target_is_n)
        return queries if queries.ndim == 3 else queries[None]  # W_P = I has one query for both domains

    def _next_hop_map(
        self, embedding: Tensor, queries: Tensor, tag: int, related: list[int], theirs: list[int]
    ) -> Tensor:
        """Map of class `tag` in a later hop, (H, W), from the maps of the previous hop with the numbers `theirs`."""
        assert self.previous_maps
        maps = [None if number < 0 else self._read(self.previous_maps, [number])[0] for number in theirs]
        query = self._query_for(related, queries)
        features = self._read(self.features, related)
        return self.model.co_maps(query, embedding, features, tag, maps).mean(dim=0)

    def _map(
        self, embedding: Tensor, queries: Tensor, number: int, tag: int, related: list[int], others: list[int]
    ) -> Tensor:
        """Map of class `tag` in the first hop, (H, W).

        Args:
            number: number of the map.
            related: positions of related images.
            others: positions of images for the contrastive part; empty without it.
        """
        query = self._query_for(related, queries)
        activation = self.model.co_maps(query, embedding, self._read(self.features, related), tag).mean(dim=0)
        if others:
            query = self._query_for(others, queries)
            contrasted = self.model.contrastive_maps(query, embedding, self._read(self.features, others), tag)
            num_related = len(related)
            num_others = len(others)
            weighted_sum = num_related * activation + num_others * contrasted.mean(dim=0)
            activation = weighted_sum / (num_related + num_others)
        if self.selves is not None:
            selves = self._read(self.selves, [number])[0]
            activation = ((selves + released_map(activation)) / 5 * 255).round() / 255
        return activation

    def _query_for(self, images: list[int], queries: Tensor) -> Tensor:
        """Query for each of some images, (R, HW, C), or the common query, (HW, C)."""
        return queries[0] if len(queries) == 1 else queries[self.source[images].long()]

    def _read(self, cached: CachedRows, positions: list[int]) -> Tensor:
        """Embeddings of N images, (N, C, H, W), or N maps, (N, H, W)."""
        rows = []
        for position in positions:
            row = cached.row(position)
            assert row is not None, "intermediate results exist until all maps are finished"
            rows.append(row)
        return torch.from_numpy(np.stack(rows)).to(self.device).float()  # ten times as fast as conversion in NumPy
