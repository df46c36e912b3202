"""Foreground IoU of saliency maps: of the maps that `mcis saliency` makes, on images with ground-truth masks.

Chooses evenly spaced images of a source that have a mask, makes their saliency maps, and compares the pixels whose
saliency is at least one half with the foreground of the masks. Prints IoU over all pixels and the mean over images.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import pyarrow as pa

from mcis.datasets.classes import IGNORE
from mcis.datasets.images.masks import SALIENCY_THRESHOLD, read_saliency, read_truth
from mcis.datasets.sources import SOURCES
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.saliency_detector import Detector
from mcis.platform.reporting.files import file_names
from mcis.platform.reporting.saliency_maps import write_saliency_maps
from mcis.platform.runs.listing import given_classes, list_source


class Pixels(NamedTuple):
    """Numbers of pixels of an image that the ground truth does not leave out.

    Attributes:
        both: Salient foreground.
        either: Salient pixels and foreground.
    """

    both: int
    either: int


def count_pixels(mask: str, saliency: Path, classes: int) -> Pixels:
    """Compares a saliency map with a ground-truth mask."""
    truth = read_truth(mask, None, classes)
    salient = read_saliency(str(saliency), truth.shape[:2]) >= SALIENCY_THRESHOLD
    is_scored = truth != IGNORE
    foreground = truth > 0
    both = np.count_nonzero(salient & foreground & is_scored)
    either = np.count_nonzero((salient | foreground) & is_scored)
    return Pixels(int(both), int(either))


def main() -> None:
    """Makes and scores the maps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", choices=[name for name, source in SOURCES.items() if source.domain == "target"])
    parser.add_argument("location", help="table or folder of the source")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, help="folder of the maps; a second call continues")
    parser.add_argument("--images", type=int, default=500, help="maximum number of images [500]")
    options = parser.parse_args()

    source = SOURCES[options.source]
    keys = source.keys(options.source)
    config = resolve(options.source, None, {keys[source.location]: options.location}, options.overrides).config
    listed = list_source(options.source, config, given_classes(config))
    with_mask = listed.table.filter(listed.table["mask_uri"].is_valid())
    chosen = np.linspace(0, len(with_mask) - 1, min(options.images, len(with_mask))).round().astype(np.int64)
    rows = with_mask.take(pa.array(chosen))

    print(harness.describe_machine())
    out = options.out.resolve()
    names = list(file_names(rows["image_id"].to_pylist(), out).values())
    start = time.monotonic()
    written = write_saliency_maps(Detector, pa.table({"name": names, "uri": rows["uri"]}), out, config)
    seconds = time.monotonic() - start

    counts: list[Pixels] = []
    for name, mask in zip(names, rows["mask_uri"].to_pylist(), strict=True):
        if name not in written.rejected:
            counts.append(count_pixels(mask, out / f"{name}.png", len(listed.classes)))
    ious = [pixels.both / pixels.either for pixels in counts if pixels.either]
    over_pixels = sum(pixels.both for pixels in counts) / sum(pixels.either for pixels in counts)

    print(f"{len(counts)} of {len(with_mask)} images with masks, {written.new} maps made in {seconds:.0f} s")
    print(f"foreground IoU: {100 * over_pixels:.1f} % over all pixels, {100 * np.mean(ious):.1f} % mean over images")


if __name__ == "__main__":
    main()
