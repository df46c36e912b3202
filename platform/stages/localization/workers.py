"""Workers of localization: images -> features and single-round maps; features -> maps with related images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcis.datasets.images.squares import add_squares, read_squares
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES, Relations
from mcis.datasets.tables.memory_mapped import CachedRows, Features, cache_table
from mcis.datasets.tables.quantized import dequantize, quantize, quantized_bytes
from mcis.models.backbones import to_float_images
from mcis.models.classifier import SELF_TRANSFORMS, transform
from mcis.models.coattention import pair_domains, target_is_image_n
from mcis.models.localization import embed, released_map
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.networks.features import check_half_range, features_shape, forward_images, half_features
from mcis.platform.outputs.relations import VECTORS
from mcis.platform.outputs.tables import map_rows
from mcis.platform.runs.files import write_table


def hop_table(hop: int) -> str:
    """Name of the table with the maps of a hop that is not the last (MAPS_SCHEMA)."""
    return f"maps-{hop}"


def hop_activations(hop: int) -> str:
    """Name of the folder with the activations of a hop's maps, which the next hop maps into memory (`write_rows`)."""
    return f"hop-{hop}"


def embed_rows(rows: pa.Table, cached: NDArray[np.int64] | None = None) -> pa.Table:
    """Makes the input of `Embed` for N images: columns of their rows, their `position`, and `first_map`, the number of
    the image's first map among all maps.

    Args:
        cached: (N,) positions of the images in the cache of the backbone's outputs, for the column `cached`. None: the
            same as `position`.
    """
    num_maps = np.diff(rows["tags"].combine_chunks().offsets.to_numpy())
    table = rows.select(["image_id", "uri", "content_hash", "domain", "tags"])
    table = table.append_column("position", pa.array(np.arange(len(rows))))
    table = table.append_column("cached", table["position"] if cached is None else pa.array(cached))
    return table.append_column("first_map", pa.array(np.cumsum(num_maps) - num_maps))


def relate_rows(rows: pa.Table, relations: Relations, hops: int = 1) -> pa.Table:
    """Makes the input of `Relate` for N images.

    Returns:
        Table with a row per image and the columns `image_id`, `position` and `first_map` (see `embed_rows`), and lists
        with one entry per map of the image: `tags`; `related` and `contrastive`, positions of images; and
        `related_maps`, the numbers of the related images' maps of the same tag, -1 for images without the tag, or
        nothing for a single hop.
    """
    related = relations.related
    related_maps = relations.maps_of_related() if hops > 1 else related[:, :0]
    maps = np.arange(len(relations.tag) + 1)
    related_lists = _lists(maps * related.shape[1], related.reshape(-1))
    related_maps_lists = _lists(maps * related_maps.shape[1], related_maps.reshape(-1))
    contrastive_lists = _lists(relations.contrastive_start, relations.contrastive)
    return pa.table(
        {
            "image_id": rows["image_id"],
            "position": np.arange(len(rows)),
            "first_map": relations.start[:-1],
            "tags": _lists(relations.start, relations.tag),
            "related": _lists(relations.start, related_lists),
            "related_maps": _lists(relations.start, related_maps_lists),
            "contrastive": _lists(relations.start, contrastive_lists),
        }
    )


def read_images(config: Config, outputs: Features | None, rows: pa.Table) -> pa.Table:
    """Reads the images of rows for `Embed` (`add_squares`), unless the cached outputs are all that it needs.

    Args:
        config: See `Embed`.
        outputs: See `Embed`.
        rows: Its input, see `embed_rows`.
    """
    localize = config.localize
    needs_images = bool(localize.extra_scales) or localize.method.name == "released"
    if outputs is not None and not needs_images and outputs.holds(rows["cached"].to_numpy()).all():
        return rows
    return add_squares(config.classifier.input_size, config.data.value_range, rows)


def write_rows(folder: Path, first: int, values: NDArray[Any]) -> None:
    """Writes consecutive rows of features, starting with row `first`, as a shard of `CachedRows`.

    It is written before the shard of maps that depends on it, so a restart may write it again with the same values.
    """
    table = cache_table(np.ascontiguousarray(values))
    write_table(folder / f"part-{first:010d}-{first + len(values):010d}.arrow", table)


def _read_rows(cached: CachedRows, positions: list[int]) -> NDArray[Any]:
    """Reads the rows of N images or maps, (N, ...), given their positions or numbers."""
    rows = []
    for position in positions:
        row = cached.row(position)
        assert row is not None, "intermediate results are missing before all maps are finished"
        rows.append(row)
    return np.stack(rows)


def _lists(starts: NDArray[np.int64], values: pa.Array | NDArray[np.integer[Any]]) -> pa.Array:
    """Array of lists of consecutive values; list i ends where list i + 1 starts."""
    return pa.LargeListArray.from_arrays(pa.array(starts, pa.int64()), pa.array(values))


def _images_and_tags_of_maps(rows: pa.Table) -> tuple[list[str], list[int]]:
    """Returns the image id and the class index of each map of the images, in the order of the maps."""
    ids: list[str] = []
    tags: list[int] = []
    for row in rows.select(["image_id", "tags"]).to_pylist():
        ids += [row["image_id"]] * len(row["tags"])
        tags += row["tags"]
    return ids, tags


class Embed:
    """Makes single-round maps: rows of images (`embed_rows`) -> MAPS_SCHEMA.

    It also writes what maps with related images need to folders: the features of the images to `features`, as
    `localize.feature_type`; for the method `released`, the maps of self pairs to `self_maps`; and for nearest related
    images, the mean of the backbone's output over each image, (C,), to VECTORS.

    Args:
        weights: Folder of the trained classifier.
        classes: Number of classes K.
        outputs: Cached outputs of the frozen backbone, by the column `cached`; None if there are none.
        folder: Folder for intermediate results.
    """

    def __init__(self, config: Config, weights: Path, classes: int, outputs: Features | None, folder: Path):
        self.config = config
        self.device = torch.device(config.compute.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)
        self.outputs = outputs
        self.folder = folder
        localize = config.localize
        self.writes_features = localize.related > 0
        self.writes_self_maps = self.writes_features and localize.method.name == "released"
        self.writes_vectors = self.writes_features and RELATED_IMAGE_RULES[localize.related_by].needs_vectors
        self.refines = config.refines_maps
        self.batch = min(localize.batch, config.compute.shard_rows)

    @torch.inference_mode()
    def __call__(self, rows: pa.Table) -> pa.Table:
        written: dict[str, list[NDArray[Any]]] = {"features": [], "self_maps": [], VECTORS: []}
        tables = []
        for start in range(0, len(rows), self.batch):
            tables.append(self._batch(rows.slice(start, self.batch), written))

        first = rows["position"][0].as_py()
        if self.writes_features:
            write_rows(self.folder / "features", first, np.concatenate(written["features"]))
        if self.writes_self_maps:
            write_rows(self.folder / "self_maps", rows["first_map"][0].as_py(), np.concatenate(written["self_maps"]))
        if self.writes_vectors:
            vectors = pa.table({"image_id": rows["image_id"], "vector": list(np.concatenate(written[VECTORS]))})
            write_table(self.folder / VECTORS / f"part-{first:08d}-{first + len(rows):08d}.parquet", vectors)
        return pa.concat_tables(tables)

    def _batch(self, rows: pa.Table, written: dict[str, list[NDArray[Any]]]) -> pa.Table:
        """Single-round maps of at most one batch of rows; appends features, self maps and vectors to `written`."""
        backbone = self.model.backbone
        localize = self.config.localize
        outputs = self._cached_outputs(rows)
        if outputs and not localize.extra_scales and not self.writes_self_maps:
            side = self.config.classifier.input_size
            images = torch.zeros(1, device=self.device).expand(self.batch, 3, side, side)  # only its shape is used
        else:
            images = self._images(rows)

        captured_layers = backbone.correlation_layers if self.refines else ()
        with backbone.capture_outputs(*captured_layers) as layer_outputs:
            outputs = outputs or self._computed_outputs(images)
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
            written["features"].append(self._feature_rows(embedding[: len(rows)], rows))
        if self.writes_self_maps:
            written["self_maps"] += self._self_maps_of_rows(rows, images, embedding)

        maps = self._maps_of_rows(rows, images, embedding, layer_outputs)
        ids, tags = _images_and_tags_of_maps(rows)
        return map_rows(ids, tags, maps.cpu().numpy(), backbone.grids(images, embedding).rows)

    def _maps_of_rows(
        self, rows: pa.Table, images: Tensor, embedding: Tensor, layer_outputs: Sequence[Tensor]
    ) -> Tensor:
        """Single-round maps of all tags of the images, one image after the other, (maps, H, W).

        Args:
            rows: Rows of N images.
            images: Normalized images, (batch, 3, S, S); N of them are used.
            embedding: Their features, (batch, C, H, W).
            layer_outputs: Outputs of the layers of pixel correlation, if maps are refined.
        """
        activations = self.model.activations(embedding)
        maps = [activations[0, :0]]
        for n, tags in enumerate(rows["tags"].to_pylist()):
            image_maps = activations[n, tags]
            if self.refines:  # one image at a time, so that only one affinity of all positions is in memory
                image_outputs = [layer_output[n : n + 1] for layer_output in layer_outputs]
                image_maps = self.model.refined(images[n : n + 1], image_maps[None], image_outputs)[0, 1:]
            maps.append(image_maps)
        return torch.cat(maps)

    def _self_maps_of_rows(self, rows: pa.Table, images: Tensor, embedding: Tensor) -> list[NDArray[Any]]:
        """Maps of the self pairs of each image, see `_self_maps`; for the arguments see `_maps_of_rows`."""
        self_maps = []
        for n, row in enumerate(rows.select(["tags", "domain"]).to_pylist()):
            pair_domains = torch.tensor([int(row["domain"] == "source")], device=self.device)
            self_maps.append(self._self_maps(images[n], embedding[n], row["tags"], pair_domains).cpu().numpy())
        return self_maps

    def _feature_rows(self, features: Tensor, rows: pa.Table) -> NDArray[Any]:
        """Features as they are stored: float16, or the rows of `quantize`.

        Raises:
            UserError: A value exceeds the range of float16. This is an error for int8 too: the classifier diverged.
        """
        half = features.half()
        check_half_range(
            half,
            rows,
            "look at the loss curve of the classifier; train it again with a lower classifier.optimizer.learning_rate",
        )
        if self.config.localize.feature_type == "int8":
            return quantize(features.cpu().numpy())
        return half.cpu().numpy()

    def _images(self, rows: pa.Table) -> Tensor:
        """Normalized images of a full batch, (batch, 3, S, S); a shorter batch is padded with its last image.

        Libraries choose kernels by shape. With a constant batch size, the features of an image are the same to the bit,
        regardless of the other images in its batch.
        """
        pixels = read_squares(rows, self.config.classifier.input_size, self.config.data.value_range)
        pixels = pixels[np.minimum(np.arange(self.batch), len(rows) - 1)]
        return self.model.backbone.normalize(to_float_images(torch.from_numpy(pixels).to(self.device)))

    def _cached_outputs(self, rows: pa.Table) -> list[Tensor]:
        """Cached backbone outputs of a full batch and of its horizontal flip; empty unless all are cached."""
        if self.outputs is None or not self.outputs.holds(rows["cached"].to_numpy()).all():
            return []
        positions = rows["cached"].to_numpy()[np.minimum(np.arange(self.batch), len(rows) - 1)]
        views = [self.outputs(positions, np.full(len(positions), flipped)) for flipped in (False, True)]
        return [torch.from_numpy(view).to(self.device).float() for view in views]

    def _computed_outputs(self, images: Tensor) -> list[Tensor]:
        """Backbone outputs of a full batch, and of its horizontal flip if the classifier was trained on cached outputs.

        Those are computed and rounded as cached ones are, so that the maps do not depend on which images are cached.
        """
        backbone = self.model.backbone
        if not self.config.classifier.trains_on_features:
            return [backbone(images)]
        parts = images.split(forward_images(2, self.config.compute.gpu))
        features = torch.cat([half_features(backbone, part, views=2) for part in parts])
        return [view.contiguous().float() for view in features.unbind(1)]  # in the memory order of cached outputs

    def _self_maps(self, image: Tensor, embedding: Tensor, tags: list[int], self_pair_domains: Tensor) -> Tensor:
        """Sum of the four maps of an image's self pairs for each tag, (T, H, W).

        See docs/explanation/paper-vs-code.md, section "Localization maps".

        Args:
            image: Normalized image, (3, S, S).
            embedding: Its features, (C, H, W).
            tags: Class indices of its T tags.
            self_pair_domains: Domains of its self pairs, 0 = target-target, 1 = source-source, (1,).
        """
        backbone = self.model.backbone
        target_grids = backbone.grids(image, embedding)
        total = torch.zeros(len(tags), *embedding.shape[1:], device=self.device)
        for name in SELF_TRANSFORMS:
            transformed_image = transform(image[None], name)
            transformed = self.model.features(transformed_image)[0]
            grids = backbone.grids(transformed_image, transformed)
            query = self.model.query(transformed, pair_domains=self_pair_domains, target_is_n=True)
            maps = []
            for tag in tags:
                activation = self.model.co_maps(query, transformed, embedding[None], tag)[0]
                maps.append(released_map(activation))
            transformed_maps = torch.stack(maps)

            if name == "hflip":
                query = self.model.query(embedding, pair_domains=self_pair_domains)
                maps = []
                for tag in tags:
                    activation = self.model.co_maps(query, embedding, transformed[None], tag)[0]
                    maps.append(released_map(activation, always=True))
                total += torch.stack(maps)
                transformed_maps = transformed_maps.flip(2)
                grids = grids.hflipped()

            total += resample(transformed_maps, grids, target_grids, "bicubic").clamp(0, 1)
        return total


class Relate:
    """Makes maps with related images: rows of images (`relate_rows`) -> MAPS_SCHEMA.

    Args:
        weights: Folder of the trained classifier.
        classes: Number of classes K.
        folder: Folder written by `Embed`. Maps of all hops but the last are also written there, for the next hop.
        is_source: Whether each image belongs to the source domain, (N,).
        hop: Number of the hop, from 1 to `localize.hops`.
    """

    def __init__(
        self, config: Config, weights: Path, classes: int, folder: Path, is_source: NDArray[np.bool_], hop: int
    ):
        self.config = config
        self.device = torch.device(config.compute.device)
        self.is_source = torch.from_numpy(is_source).to(self.device)
        self.domains = torch.tensor([False, True] if is_source.any() else [False], device=self.device)
        self.model = load_trained(build_classifier(config.classifier, classes), weights, self.device)

        shape = features_shape(config.classifier)
        is_released = config.localize.method.name == "released"
        self.features_shape = shape
        self.is_quantized = config.localize.feature_type == "int8"
        self.features = CachedRows(folder / "features", (quantized_bytes(shape),) if self.is_quantized else shape)
        self.self_maps = CachedRows(folder / "self_maps", shape[1:]) if is_released else None
        self.previous_maps = CachedRows(folder / hop_activations(hop - 1), shape[1:]) if hop > 1 else None
        self.next_folder = folder / hop_activations(hop) if hop < config.localize.hops else None

    def __call__(self, rows: pa.Table) -> pa.Table:
        images = rows.to_pylist()
        ids, tags = _images_and_tags_of_maps(rows)
        maps = torch.cat([self.maps(row) for row in images])
        if self.next_folder:
            write_rows(self.next_folder, images[0]["first_map"], maps.cpu().numpy())
        grid = self.model.backbone.layout.grid(self.config.classifier.input_size, maps.shape[1])
        return map_rows(ids, tags, maps.cpu().numpy(), grid)

    @torch.inference_mode()
    def maps(self, row: dict[str, Any]) -> Tensor:
        """Maps of the T tags of an image, (T, H, W)."""
        embedding = self._read_features([row["position"]])[0]
        queries = self._queries(embedding, row["position"])
        maps = []
        for t, tag in enumerate(row["tags"]):
            related = row["related"][t]
            if self.previous_maps:
                maps.append(self._next_hop_map(embedding, queries, tag, related, row["related_maps"][t]))
            else:
                number = row["first_map"] + t
                maps.append(self._first_hop_map(embedding, queries, number, tag, related, row["contrastive"][t]))
        return torch.stack(maps)

    def _queries(self, embedding: Tensor, position: int) -> Tensor:
        """F_n^T W_P of an image (Eq. 2), for each domain that its related images may have.

        Returns:
            (2, HW, C) for related images of the target and the source domain; (1, HW, C) if both are the same or there
            are no images of the source domain.
        """
        method = self.config.localize.method
        if method.w_p == "identity":
            return self.model.query(embedding, identity=True)[None]
        is_source = self.is_source[position]
        target_is_n = target_is_image_n(is_source, self.domains, method.target)
        queries = self.model.query(
            embedding, pair_domains=pair_domains(is_source, self.domains), target_is_n=target_is_n
        )
        return queries if queries.ndim == 3 else queries[None]  # W_P = I has one query for both domains

    def _next_hop_map(
        self, embedding: Tensor, queries: Tensor, tag: int, related: list[int], related_maps: list[int]
    ) -> Tensor:
        """Map of class `tag` in a later hop, (H, W).

        Args:
            related: Positions of R related images.
            related_maps: Numbers of their maps of this class in the previous hop, -1 for images without the class.
        """
        assert self.previous_maps
        maps: list[Tensor | None] = []
        for number in related_maps:
            maps.append(self._read_map(self.previous_maps, number) if number >= 0 else None)
        query = self._query_for(related, queries)
        features = self._read_features(related)
        return self.model.co_maps(query, embedding, features, tag, maps).mean(dim=0)

    def _first_hop_map(
        self, embedding: Tensor, queries: Tensor, number: int, tag: int, related: list[int], contrastive: list[int]
    ) -> Tensor:
        """Map of class `tag` in the first hop, (H, W).

        Args:
            number: Number of the map among all maps.
            related: Positions of R related images.
            contrastive: Positions of images for the contrastive part of the map; empty if it has none.
        """
        query = self._query_for(related, queries)
        activation = self.model.co_maps(query, embedding, self._read_features(related), tag).mean(dim=0)
        if contrastive:
            query = self._query_for(contrastive, queries)
            contrasted = self.model.contrastive_maps(query, embedding, self._read_features(contrastive), tag)
            num_related = len(related)
            num_contrastive = len(contrastive)
            weighted_sum = num_related * activation + num_contrastive * contrasted.mean(dim=0)
            activation = weighted_sum / (num_related + num_contrastive)

        if self.self_maps is not None:
            self_maps = self._read_map(self.self_maps, number)
            # Mean of this map and the four maps of self pairs, rounded to 8 bits, as in the released code.
            activation = ((self_maps + released_map(activation)) / 5 * 255).round() / 255
        return activation

    def _query_for(self, images: list[int], queries: Tensor) -> Tensor:
        """The query for each of R images, (R, HW, C), or one query for all of them, (HW, C)."""
        return queries[0] if len(queries) == 1 else queries[self.is_source[images].long()]

    def _read_features(self, positions: list[int]) -> Tensor:
        """Reads the features of N images, (N, C, H, W), given their positions."""
        rows = _read_rows(self.features, positions)
        if self.is_quantized:
            return torch.from_numpy(dequantize(rows, self.features_shape)).to(self.device)
        return torch.from_numpy(rows).to(self.device).float()  # ten times as fast as NumPy's conversion

    def _read_map(self, cached: CachedRows, number: int) -> Tensor:
        """Reads a map, (H, W), given its number."""
        return torch.from_numpy(_read_rows(cached, [number])[0]).to(self.device)
