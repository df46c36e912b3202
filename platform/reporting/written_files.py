"""The files that a run writes: their sizes, computed from the configuration and the numbers of images.

Sizes per image come from functions next to the code that writes the files.
"""

from collections.abc import Callable, Collection, Iterator
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import RejectedImage, fitted_size
from mcis.datasets.images.squares import image_bytes, read_picture
from mcis.datasets.index import Listing
from mcis.datasets.sampling.related_images import RELATED_IMAGE_RULES
from mcis.datasets.tables.memory_mapped import features_bytes
from mcis.datasets.tables.quantized import quantized_bytes
from mcis.platform.config.sections import Config
from mcis.platform.engine.checkpoint import checkpoint_bytes, weights_bytes
from mcis.platform.networks.build import build_affinity_net, build_classifier, build_segmenter, freeze
from mcis.platform.networks.features import features_shape
from mcis.platform.outputs.read_index import predicted_split, rows_in_split
from mcis.platform.outputs.relations import vector_bytes
from mcis.platform.outputs.tables import labels_bytes, map_bytes

_SAMPLE = 16
"""Number of images whose size is read, evenly spaced over the listing."""
_DEFAULT_HEIGHT = 500
"""Height in pixels that is assumed if no image of the sample can be read."""
_ROW_BYTES = 2**11
"""Bytes per image for the index, the results of image checks, and pixel counts for scores, at the most."""


class ImageCounts(NamedTuple):
    """Numbers of images, from the listing alone.

    Attributes:
        listed: All images.
        tagged: Training images with a tag.
        negatives: Training images that show none of the classes.
        maps: Tags of the training images, for each of which a localization map is made.
        val: Images of split val with a tag, and negatives.
        predicted: Images of the predicted split.
        height: Mean height at which images are read, pixels (`data.max_side`).
        file_height: Mean height of the files, pixels.
        classes: Number of classes K.
    """

    listed: int
    tagged: int
    negatives: int
    maps: int
    val: int
    predicted: int
    height: float
    file_height: float
    classes: int


def count_images(config: Config, listing: Listing) -> ImageCounts:
    """Counts the images of a listing, and reads the sizes of some."""
    images = listing.table.select(["split", "tags", "is_negative"])
    tagged = rows_in_split(images, "train", tagged=True)
    trained = rows_in_split(images, "train", tagged=True, negatives=True)
    split = predicted_split(config, has_val=len(rows_in_split(images, "val")) > 0)
    sizes = list(_sample_sizes(config, listing))
    return ImageCounts(
        listed=len(images),
        tagged=len(tagged),
        negatives=len(trained) - len(tagged),
        maps=pc.sum(pc.list_value_length(tagged["tags"])).as_py() or 0,
        val=len(rows_in_split(images, "val", tagged=True, negatives=True)),
        predicted=len(rows_in_split(images, split)),
        height=fmean(fitted_size(*size, config.data.max_side)[0] for size in sizes) if sizes else _DEFAULT_HEIGHT,
        file_height=fmean(height for height, _ in sizes) if sizes else _DEFAULT_HEIGHT,
        classes=len(listing.classes),
    )


def _sample_sizes(config: Config, listing: Listing) -> Iterator[tuple[int, int]]:
    """Yields height and width of a sample of images. Images that are rejected are left out."""
    uris = listing.table["uri"]
    if not len(uris):
        return
    for position in np.unique(np.linspace(0, len(uris) - 1, _SAMPLE).astype(np.int64)):
        try:
            picture = read_picture(
                uris[position].as_py(),
                max_pixels=config.data.max_pixels,
                max_side=32,
                value_range=config.data.value_range,
            )
            yield picture.height, picture.width
        except RejectedImage:
            continue
        except UserError:  # the storage does not answer, which the stage `index` reports
            return


class Part(NamedTuple):
    """Files of one kind that a run writes.

    Attributes:
        stage: The stage that writes them.
        name: What they are.
        size: Bytes.
        place: `output`: in the stage's output; `temporary`: removed at the end of the stage; `cache`: in the cache.
        keys: Configuration keys that reduce them.
    """

    stage: str
    name: str
    size: int
    place: Literal["output", "temporary", "cache"]
    keys: str


def _index_parts(config: Config, images: ImageCounts) -> list[Part]:
    return [Part("index", "index and scores", _ROW_BYTES * images.listed, "output", "fewer images")]


def _classifier_parts(config: Config, images: ImageCounts) -> list[Part]:
    """Weights, and what the cache holds for the training and for localization: decoded images, or features."""
    section = config.classifier
    with torch.device("meta"):
        classifier = build_classifier(section, images.classes)
        freeze(classifier, section)
    parts = _weights_parts("train_classifier", classifier, "classifier.backbone")
    if config.weights.classifier:
        return parts

    trained = images.tagged + images.negatives
    if section.trains_on_features:
        size = (2 * trained + images.val) * features_bytes(features_shape(section))
        parts.append(Part("train_classifier", "features in the cache", size, "cache", "compute.cache_gb"))
    elif section.sizing != "random_crop":
        size = (trained + images.val) * image_bytes(section.input_size)
        parts.append(Part("train_classifier", "decoded images in the cache", size, "cache", "compute.cache_gb"))
    return parts


def _localization_parts(config: Config, images: ImageCounts) -> list[Part]:
    """Maps, and the intermediate results for maps with related images."""
    localize = config.localize
    if localize.is_imported:
        height = round(images.file_height)
        size = 2 * images.maps * map_bytes(height, 4 * height // 3)  # float32, of the size of photographs
        return [Part("localize", "localization maps", size, "output", "smaller maps in localize.maps")]
    shape = features_shape(config.classifier)
    channels, height, width = shape
    maps = images.maps * map_bytes(height, width)
    parts = [
        Part("localize", "localization maps", 2 * maps, "output", "classifier.input_size")
    ]  # and single-round maps
    intermediate = maps  # a copy of the single-round maps
    if localize.related:
        float_maps = 4 * height * width * images.maps
        intermediate += (localize.hops - 1) * (float_maps + maps)
        if localize.method.name == "released":
            intermediate += float_maps
        if RELATED_IMAGE_RULES[localize.related_by].needs_vectors:
            vectors = images.tagged * vector_bytes(channels)
            intermediate += vectors
            parts.append(Part("localize", "image vectors", vectors, "output", "localize.related_by=class"))
        keys = "localize.related=0, classifier.input_size"
        if localize.feature_type == "int8":
            features = images.tagged * quantized_bytes(shape)
        else:
            features = images.tagged * features_bytes(shape)
            keys = f"localize.feature_type=int8, {keys}"
        parts.append(Part("localize", "features of localization", features, "temporary", keys))
    parts.append(Part("localize", "intermediate maps", intermediate, "temporary", "localize.hops"))
    return parts


def _affinity_parts(config: Config, images: ImageCounts) -> list[Part]:
    with torch.device("meta"):
        network = build_affinity_net(config.affinity_net)
        freeze(network, config.affinity_net)
    size = labels_bytes(images.height) * images.tagged
    labels = Part("train_affinity", "confident labels", size, "output", "data.max_side")
    return [labels, *_weights_parts("train_affinity", network, "affinity_net.backbone")]


def _mask_parts(config: Config, images: ImageCounts) -> list[Part]:
    size = 2 * labels_bytes(images.height) * (images.tagged + images.negatives)
    return [Part("pseudo_masks", "pseudo masks", size, "output", "data.max_side")]


def _segmenter_parts(config: Config, images: ImageCounts) -> list[Part]:
    with torch.device("meta"):
        network = build_segmenter(config.segmenter, images.classes)
        freeze(network, config.segmenter)
    return _weights_parts("train_segmenter", network, "segmenter.backbone")


def _prediction_parts(config: Config, images: ImageCounts) -> list[Part]:
    size = 2 * labels_bytes(images.file_height) * images.predicted
    return [Part("predict", "predictions", size, "output", "predict.split")]


def _weights_parts(stage: str, network: nn.Module, keys: str) -> list[Part]:
    """Weights and checkpoints of a training. There are two checkpoints while one is replaced."""
    return [
        Part(stage, "weights", weights_bytes(network), "output", keys),
        Part(stage, "checkpoints", 2 * checkpoint_bytes(network), "temporary", keys),
    ]


PARTS_OF_STAGE: dict[str, Callable[[Config, ImageCounts], list[Part]]] = {
    "index": _index_parts,
    "train_classifier": _classifier_parts,
    "localize": _localization_parts,
    "train_affinity": _affinity_parts,
    "pseudo_masks": _mask_parts,
    "train_segmenter": _segmenter_parts,
    "predict": _prediction_parts,
}
"""Stage -> what it writes."""


def parts_of_run(config: Config, images: ImageCounts, stages: Collection[str]) -> list[Part]:
    """Lists what the stages of a run write to disk, apart from the report and MLflow's records."""
    parts: list[Part] = []
    for stage, parts_of_stage in PARTS_OF_STAGE.items():
        if stage in stages:
            parts += parts_of_stage(config, images)
    return parts
