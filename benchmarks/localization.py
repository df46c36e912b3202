"""Localization maps per second, relative to a forward pass of every pair of an image and a related image.

VGG-16 at 256x256 pixels, R = 3 related images per class, and as many tags per image as in VOC's train_aug. One side is
what the stage runs: each image is embedded once, features are kept in float16, attention covers one activation per
position, and all maps of an image share their queries. The other side runs the classifier on each pair, like the
released code. Both aggregations are measured.
"""

import argparse
import tempfile
import time
from pathlib import Path

import direct_classifier
import harness
import jpeg_files
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tags import Tags
from mcis.models.backbones import to_float_images
from mcis.models.classifier import SELF_TRANSFORMS, CoAttentionClassifier, transform
from mcis.models.grids import pixel_grids
from mcis.models.localization import normalize_maps, released_map
from mcis.models.resampling import resample
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import WEIGHTS, save
from mcis.platform.outputs.relations import draw_relations
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, relate_rows

TARGETS = {"paper": 7.0, "released": 2.2}
MAX_DIFFERENCE = 5e-3
"""Largest difference of maps in [0, 1]. The stage keeps features in float16."""
CLASSES = 20
USED_CLASSES = 5
"""Few classes, so that each image has related images."""
TAG_COUNTS = (0.6375, 0.2735, 0.0731, 0.0133, 0.0026)
"""Fractions of train_aug's 10,582 images with 1, 2, ... tags: 1.47 tags per image."""


def index_rows(paths: list[str]) -> tuple[pa.Table, Tags]:
    """Returns index rows of images, and their tags. The numbers of tags are distributed like TAG_COUNTS."""
    bounds = np.cumsum(TAG_COUNTS)
    quantiles = (np.arange(len(paths)) + 0.5) / len(paths) * bounds[-1]
    tag_counts = 1 + np.searchsorted(bounds, quantiles)
    tags = []
    matrix = np.zeros((len(paths), CLASSES), bool)
    for index, count in enumerate(tag_counts):
        classes = [(index + k) % USED_CLASSES for k in range(count)]
        matrix[index, classes] = True
        tags.append(sorted(classes))

    files = jpeg_files.file_rows(paths)
    table = pa.table(
        {
            "image_id": paths,
            "uri": files["uri"],
            "content_hash": files["content_hash"],
            "domain": ["target"] * len(paths),
            "tags": tags,
        }
    )
    return table, Tags.from_matrix(matrix)


def stage_maps(config: Config, folder: Path, rows: pa.Table, tags: Tags) -> tuple[float, list[Tensor]]:
    """Runs the stage's workers. Returns their seconds and the maps."""
    no_source = np.zeros(len(rows), bool)
    relations = draw_relations(config.localize, config.seed, tags, no_source)
    embed = Embed(config, folder, CLASSES, None, folder)
    rows_to_embed = embed_rows(rows)
    rows_to_relate = relate_rows(rows, relations)

    start = time.perf_counter()
    embed(rows_to_embed)
    relate = Relate(config, folder, CLASSES, folder, no_source, 1)
    maps = []
    for row in rows_to_relate.to_pylist():
        maps += list(relate.maps(row).cpu())
    return time.perf_counter() - start, maps


class PairwiseLocalization:
    """Makes maps with a forward pass of every pair.

    Args:
        model: Classifier in evaluation mode on `device`.
    """

    def __init__(self, config: Config, model: CoAttentionClassifier, device: torch.device):
        self.config = config
        self.model = model
        self.device = device
        self.is_released = config.localize.method.name == "released"

    @torch.inference_mode()
    def maps(self, rows: pa.Table, tags: Tags) -> tuple[float, list[Tensor]]:
        """Returns the seconds and the maps. Reading the images is not measured."""
        relations = draw_relations(self.config.localize, self.config.seed, tags, np.zeros(len(rows), bool))
        images = [self._read_image(uri) for uri in rows["uri"].to_pylist()]
        maps = []

        start = time.perf_counter()
        for index, image_tags in enumerate(rows["tags"].to_pylist()):
            image = images[index]
            self_maps = self._self_maps(image, image_tags) if self.is_released else None
            for number, tag in enumerate(image_tags):
                related = relations.related[relations.start[index] + number].tolist()
                co_maps = torch.stack([self._co_map(image, images[other])[tag] for other in related])
                mean_map = co_maps.mean(dim=0)
                if self_maps is not None:
                    mean_map = ((self_maps[number] + released_map(mean_map)) / 5 * 255).round() / 255
                maps.append(mean_map.cpu())
        return time.perf_counter() - start, maps

    def _read_image(self, uri: str) -> Tensor:
        rgb = torch.from_numpy(read_rgb(uri, self.config.classifier.input_size))
        images: Tensor = self.model.backbone.normalize(to_float_images(rgb[None].to(self.device)))
        return images[0]

    def _co_map(self, image: Tensor, other: Tensor) -> Tensor:
        """Returns activations (K, h, w) of an image as the pair's m, or as its n if the recipe says so."""
        if self.config.localize.method.target == "n":
            return direct_classifier.co_maps(self.model, other, image)[1]
        return direct_classifier.co_maps(self.model, image, other)[0]

    def _self_maps(self, image: Tensor, tags: list[int]) -> Tensor:
        """Returns the sum of the maps of all self pairs, (T, h, w)."""
        maps = [self._transformed_maps(image, name, tags) for name in SELF_TRANSFORMS]
        return torch.stack(maps).sum(dim=0)

    def _transformed_maps(self, image: Tensor, name: str, tags: list[int]) -> Tensor:
        """Returns maps (T, h, w) of a pair of an image and its transform. For a flip, these are both images' maps."""
        own, transformed = direct_classifier.co_maps(self.model, image, transform(image[None], name)[0])
        transformed_maps = torch.stack([released_map(transformed[tag]) for tag in tags])
        if name == "hflip":
            own_maps = torch.stack([released_map(own[tag], always=True) for tag in tags])
            return own_maps + transformed_maps.flip(2)

        source = pixel_grids(*transformed_maps.shape[1:])  # VGG-16's positions divide the image into equal parts
        target = pixel_grids(*own.shape[1:])
        return resample(transformed_maps, source, target, "bicubic").clamp(0, 1)


def compare(recipe: str, options: argparse.Namespace, folder: Path, rows: pa.Table, tags: Tags) -> str:
    """Measures both sides in turn, prints what they take, and returns the line with the ratio."""
    gpu = torch.cuda.is_available()
    overrides = [f"localize.batch={32 if gpu else len(rows)}", f"compute.gpu={str(gpu).lower()}", *options.overrides]
    config = resolve("voc", recipe, {}, overrides).config
    torch.manual_seed(0)
    model = build_classifier(config.classifier, CLASSES).eval()
    save(model.state_dict(), folder / WEIGHTS)
    device = torch.device("cuda" if gpu else "cpu")
    pairwise = PairwiseLocalization(config, model.to(device), device)
    measured: dict[str, list[float]] = {"stage": [], "pairs": []}
    for _ in range(options.rounds):
        seconds, maps = stage_maps(config, folder, rows, tags)
        measured["stage"].append(seconds)
        seconds, expected = pairwise.maps(rows, tags)
        measured["pairs"].append(seconds)

    normalize = normalize_maps if recipe == "paper" else torch.clone  # released maps are in [0, 1] already
    differences = [normalize(a) - normalize(b) for a, b in zip(maps, expected, strict=True)]
    difference = max(float(values.abs().max()) for values in differences)
    if difference >= MAX_DIFFERENCE:
        raise SystemExit(f"{recipe}: maps in [0, 1] differ by {difference:.1e}, more than {MAX_DIFFERENCE:g}")
    print(f"{recipe}, {len(maps)} maps:")
    medians = harness.print_medians(measured, "s", images=len(rows))
    print(f"{recipe}: maps in [0, 1] differ by at most {difference:.1e}")
    return (
        f"ratio {medians['pairs'] / medians['stage']:.2f} target {TARGETS[recipe]:g}: "
        f"localization maps `{recipe}` with R = 3, times faster than a forward pass of each pair"
    )


def main() -> None:
    """Compares both sides for both aggregations and prints the ratios of their medians."""
    images = 512 if torch.cuda.is_available() else 8
    parser = harness.option_parser(__doc__, images=images, rounds=2)
    harness.add_overrides(parser)
    options = parser.parse_args()
    print(harness.describe_machine())
    torch.set_num_threads(harness.available_cores())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, tags = index_rows(jpeg_files.write_jpegs(folder / "images", options.images))
        ratios = [compare(recipe, options, folder, rows, tags) for recipe in TARGETS]
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
