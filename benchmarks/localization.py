"""Localization maps per second, compared with forwards of every pair of an image and a related one.

VGG-16 at 256x256, R = 3 related images per class, as many tags per image as in VOC's train_aug. One side is what the
stage runs: each image is embedded once, features are kept in float16, attention is over one activation per position,
and all maps of an image share their queries. The other side runs the classifier on each pair, as the released code
does, for both aggregations.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import literal
import machine
import numpy as np
import photos
import pyarrow as pa
import torch

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
MOST_APART = 5e-3  # with float16 features
CLASSES = 20
TAGS = (0.6375, 0.2735, 0.0731, 0.0133, 0.0026)
"""Fractions of train_aug's 10,582 images with 1, 2, ... tags: 1.47 tags per image."""


def table(paths: list[str]) -> tuple[pa.Table, Tags]:
    """Index rows of images with as many tags each as TAGS says, of few classes, so that each has related images."""
    bounds = np.cumsum(TAGS)
    counts = 1 + np.searchsorted(bounds, (np.arange(len(paths)) + 0.5) / len(paths) * bounds[-1])
    tags = [[(index + k) % 5 for k in range(count)] for index, count in enumerate(counts)]
    matrix = np.zeros((len(paths), CLASSES), bool)
    for index, classes in enumerate(tags):
        matrix[index, classes] = True
    read = {name: photos.rows(paths)[name] for name in ("uri", "content_hash")}
    columns: dict[str, Any] = {"image_id": paths, **read, "domain": ["target"] * len(paths)}
    return pa.table({**columns, "tags": [sorted(classes) for classes in tags]}), Tags.from_matrix(matrix)


def ours(config: Config, folder: Path, rows: pa.Table, tags: Tags) -> tuple[float, list[torch.Tensor]]:
    """Seconds, and the maps."""
    no_source = np.zeros(len(rows), bool)
    relations = draw_relations(config.localize, config.seed, tags, no_source)
    embed = Embed(config, folder, CLASSES, None, folder)
    to_embed, to_relate = embed_rows(rows), relate_rows(rows, relations)
    began = time.perf_counter()
    embed(to_embed)
    relate = Relate(config, folder, CLASSES, folder, no_source, 1)
    maps = [image_map for row in to_relate.to_pylist() for image_map in relate.maps(row).cpu()]
    return time.perf_counter() - began, maps


@torch.inference_mode()
def pair_by_pair(
    config: Config, model: CoAttentionClassifier, rows: pa.Table, tags: Tags, device: torch.device
) -> tuple[float, list[torch.Tensor]]:
    """Seconds, and the maps."""
    relations = draw_relations(config.localize, config.seed, tags, np.zeros(len(rows), bool))
    size, uris, maps = config.classifier.input_size, rows["uri"].to_pylist(), []
    # Decoded beforehand, so that opening an image for every pair does not count.
    images = [
        model.backbone.normalize(to_float_images(torch.from_numpy(read_rgb(uri, size))[None].to(device)))[0]
        for uri in uris
    ]
    began = time.perf_counter()
    for index, image_tags in enumerate(rows["tags"].to_pylist()):
        image = images[index]
        selves = torch.zeros(len(image_tags))
        if config.localize.method.name == "released":
            selves = torch.stack([_self_maps(model, image, name, image_tags) for name in SELF_TRANSFORMS]).sum(dim=0)
        for number, tag in enumerate(image_tags):
            others = relations.related[relations.start[index] + number].tolist()
            mean = torch.stack([_co_map(config, model, image, images[other])[tag] for other in others]).mean(dim=0)
            if config.localize.method.name == "released":
                mean = ((selves[number] + released_map(mean)) / 5 * 255).round() / 255
            maps.append(mean.cpu())
    return time.perf_counter() - began, maps


def _co_map(config: Config, model: CoAttentionClassifier, image: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Activations (K, h, w) of an image, which is the pair's m or, where the recipe says so, its n."""
    if config.localize.method.target == "n":
        return literal.co_maps(model, other, image)[1]
    return literal.co_maps(model, image, other)[0]


def _self_maps(model: CoAttentionClassifier, image: torch.Tensor, name: str, tags: list[int]) -> torch.Tensor:
    """Maps of a self pair, both of them for the flip, from one forward for all classes, (T, H, W)."""
    own, seen = literal.co_maps(model, image, transform(image[None], name)[0])
    theirs = torch.stack([released_map(seen[tag]) for tag in tags])
    if name == "hflip":
        return torch.stack([released_map(own[tag], always=True) for tag in tags]) + theirs.flip(2)
    source, target = (pixel_grids(*maps.shape[1:]) for maps in (theirs, own))  # VGG-16's positions divide the image
    return resample(theirs, source, target, "bicubic").clamp(0, 1)


def main() -> None:
    """Runs both sides of both aggregations in turn and prints the ratios of their medians."""
    gpu = torch.cuda.is_available()
    arguments = machine.arguments(__doc__, images=512 if gpu else 8, rounds=2).parse_args()
    print(machine.describe())
    torch.set_num_threads(machine.cores())
    device, lines = torch.device("cuda" if gpu else "cpu"), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, tags = table(photos.make(folder / "images", arguments.images))
        for recipe, target in TARGETS.items():
            values = [f"localize.batch={32 if gpu else arguments.images}", f"compute.gpu={str(gpu).lower()}"]
            config = resolve("voc", recipe, {}, values).config
            torch.manual_seed(0)
            model = build_classifier(config.classifier, CLASSES).eval()
            save(model.state_dict(), folder / WEIGHTS)
            model.to(device)
            measured: dict[str, list[float]] = {"ours": [], "pairs": []}
            for _ in range(arguments.rounds):
                seconds, maps = ours(config, folder, rows, tags)
                measured["ours"].append(seconds)
                seconds, expected = pair_by_pair(config, model, rows, tags, device)
                measured["pairs"].append(seconds)
            # Released maps are in [0, 1] as they are, in steps of 1 / 255.
            scaled = normalize_maps if recipe == "paper" else torch.clone
            apart = max(float((scaled(a) - scaled(b)).abs().max()) for a, b in zip(maps, expected, strict=True))
            if apart >= MOST_APART:
                raise SystemExit(f"{recipe}: maps in [0, 1] differ by {apart:.1e}, more than {MOST_APART:g}")
            print(f"{recipe}, {len(maps)} maps:")
            medians = machine.medians(measured, "s", images=len(rows))
            print(f"{recipe}: maps in [0, 1] differ by at most {apart:.1e}")
            ratio = medians["pairs"] / medians["ours"]
            what = f"localization maps `{recipe}`, R = 3, against a forward of each pair"
            lines.append(f"ratio {ratio:.2f} target {target:g}: {what}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
