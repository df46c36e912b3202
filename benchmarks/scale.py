"""What bounds each stage of a run of 10 thousand, 350 thousand and 10 million images on 1, 8 and 64 GPUs.

Nothing is run at these sizes. What processors do for an image is timed here, on a core: reading, the dense CRF,
painting labels (`networks/durations.py`), and listing and keying a row of a made-up table (`ten_million.py`). What GPUs
do is computed: the floating point operations of the networks' passes are counted, and divided by the operations per
second that a GPU is *assumed* to sustain (`--tflops`), as is the number of cores beside each (`--cores`). A training's
backward pass is taken for twice its forward pass. Passes are repeated as often as the stages do; trainings see each
image as often as the recipe's do. A stage takes as long as its slowest part, as if the parts ran beside each other.

    python benchmarks/scale.py --write      # puts the tables into docs/howto/scale.md
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import machine
import photos
import ten_million
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcis.datasets.images.squares import read_rgb
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, build_segmenter
from mcis.platform.networks.durations import Passes, Pictures, clock_words, durations, measure
from mcis.platform.networks.needs import Counts, keeps_outputs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "scale.md"
BEGIN, END = "<!-- scale -->", "<!-- /scale -->"
IMAGES, GPUS = (10_000, 350_000, 10_000_000), (1, 8, 64)
ROWS = 200_000
"""Of the made-up table whose rows are listed and keyed."""
RECIPE_IMAGES = 10_582
"""Training images that a recipe's number of segmentation steps is meant for."""
NETWORKS = ("backbone", "head", "pair", "relate", "crop", "segment")
"""The passes that GPUs compute."""
STAGES = {
    "train_classifier": "classifier",
    "localize": "localization maps",
    "pseudo_masks": "pseudo masks",
    "train_segmenter": "segmenter",
    "predict": "predictions",
}


class Rates(NamedTuple):
    """What was measured and counted.

    Attributes:
        listing, keying: seconds of a row, on one core.
        passes: seconds on one core.
        flops: of the networks' passes, forward and, in trainings, backward, by the names of `Passes`.
    """

    listing: float
    keying: float
    passes: Passes
    flops: dict[str, float]


def counts_of(images: int) -> Counts:
    """Nine tenths of the images in train, all tagged, 1.5 tags each; the others in val, which is predicted."""
    train = images * 9 // 10
    return Counts(
        classes=20,
        images=images,
        tagged=train,
        tags=train * 3 // 2,
        salient=0,
        scored=0,
        val=images - train,
        predicted=images - train,
        file_bytes=64 * 2**10,
    )


def seconds_of(act: Callable[[], object]) -> float:
    """Processor seconds."""
    began = time.process_time()
    act()
    return time.process_time() - began


def flops_of(act: Callable[[], object]) -> float:
    """Floating point operations."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        act()
    return float(counter.get_total_flops())


def counted(config: Config) -> dict[str, float]:
    """The operations of the networks' passes."""
    c, s = config.classifier, config.segmenter
    classifier, segmenter = build_classifier(c, 20).eval(), build_segmenter(s, 20).eval()
    image = torch.randn(1, 3, c.input_size, c.input_size)
    with torch.inference_mode():
        outputs = classifier.backbone(image)
        embedding = classifier.embedding(outputs)
        identity = config.localize.method.affinity == "identity"
        query = classifier.query(embedding[0], kind=torch.tensor([0]), identity=identity)
    backbone = flops_of(lambda: classifier.backbone(image))
    head = flops_of(lambda: classifier.activations(classifier.embedding(outputs)))
    relate = flops_of(lambda: classifier.co_maps(embedding[0], embedding, 0, query=query))
    crop = flops_of(lambda: segmenter(torch.randn(1, 3, s.crop, s.crop)))
    return {
        "backbone": backbone,
        "head": head,
        "relate": relate,
        "pair": 3 * 2 * (backbone + head + relate),
        "crop": 3 * crop,
        "segment": crop * photos.WIDTH * photos.HEIGHT / s.crop**2,
    }


def rates_of(config: Config) -> Rates:
    """Measures and counts, in a minute or so."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = photos.make(folder / "photos", 3)
        read_rgb(paths[0])
        read = seconds_of(lambda: [read_rgb(path) for path in paths * 5]) / 15
        pictures = Pictures([read_rgb(path) for path in paths], read, read)
        counts = counts_of(IMAGES[0])
        passes = measure(config, counts, pictures, kept=keeps_outputs(config, counts))
        ten_million.make(folder, ROWS)
        ten_million.list_rows(folder, ROWS)
        listing = seconds_of(lambda: ten_million.list_rows(folder, ROWS)) / ROWS
        keying = seconds_of(lambda: ten_million.keys(folder, ROWS)) / ROWS - listing
    return Rates(listing, keying, passes, counted(config))


class Cell(NamedTuple):
    """How long a stage takes, seconds, and what of it takes longest."""

    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{clock_words(self.seconds)}, {self.bound}"


def cells(config: Config, rates: Rates, images: int, gpus: int, *, tflops: float, cores: int) -> dict[str, Cell]:
    """The stages by their titles."""
    counts, all_cores = counts_of(images), cores * gpus
    steps = round(config.segmenter.steps * counts.tagged / RECIPE_IMAGES)
    config = config.model_copy(update={"segmenter": config.segmenter.model_copy(update={"steps": steps})})
    kept = keeps_outputs(config, counts)
    on_gpus = dict.fromkeys(Passes._fields, 0.0) | {name: rates.flops[name] / tflops / 1e12 for name in NETWORKS}
    gpu = durations(config, counts, Passes(**on_gpus), gpus, kept=kept)
    cpu = durations(config, counts, rates.passes._replace(**dict.fromkeys(NETWORKS, 0.0)), all_cores, kept=kept)
    found = {
        "list and key": Cell(images * (rates.listing + rates.keying), "driver"),
        "verify": Cell(images * rates.passes.read / all_cores, "cores"),
    }
    for stage, title in STAGES.items():
        parts = {"GPUs": gpu.get(stage, 0.0), "cores": cpu.get(stage, 0.0)}
        bound = max(parts, key=lambda part: parts[part])
        found[title] = Cell(parts[bound], bound)
    return found


def page(config: Config, rates: Rates, *, tflops: float, cores: int) -> str:
    """The tables as Markdown."""
    lines = ["| measured here, of one core | |", "| --- | --- |"]
    lines += [
        f"| list a row of a table | {rates.listing * 1e6:.1f} µs |",
        f"| key a row: hash it, look at its file | {rates.keying * 1e6:.1f} µs |",
        f"| read and decode an image of {photos.WIDTH}x{photos.HEIGHT} | {rates.passes.read * 1e3:.1f} ms |",
        f"| paint the labels of an image | {rates.passes.paint * 1e3:.1f} ms |",
        f"| dense CRF of a pseudo mask, against one threshold | {rates.passes.mask_crf * 1e3:.0f} ms |",
        f"| dense CRF of a prediction | {rates.passes.predict_crf * 1e3:.0f} ms |",
        "",
        f"Measured on {machine.describe().removeprefix('machine: ')}.",
        "",
        "| counted | GFLOP |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {rates.flops[name] / 1e9:.1f} |" for name in NETWORKS]
    for images in IMAGES:
        lines += ["", f"{images:,} images, {tflops:g} TFLOP/s sustained and {cores} cores per GPU **assumed**:", ""]
        lines += [f"| stage | {' | '.join(f'{gpus} GPU(s)' for gpus in GPUS)} |", "| --- " * (1 + len(GPUS)) + "|"]
        columns = [cells(config, rates, images, gpus, tflops=tflops, cores=cores) for gpus in GPUS]
        lines += [f"| {title} | {' | '.join(str(column[title]) for column in columns)} |" for title in columns[0]]
    return "\n".join(lines)


def main() -> None:
    """Measures, and prints the tables or writes them into their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=40.0, help="that a GPU is assumed to sustain")
    parser.add_argument("--cores", type=int, default=12, help="processor cores beside each GPU, assumed")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/howto/scale.md")
    arguments = parser.parse_args()
    config = resolve("voc", arguments.recipe).config
    tables = page(config, rates_of(config), tflops=arguments.tflops, cores=arguments.cores)
    print(tables)
    if arguments.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
        PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
