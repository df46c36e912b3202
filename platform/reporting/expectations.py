"""What a run can expect of its images, in plain lines, from the listing alone."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.index import Listing, shown
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import rows_in_split

_FEW = 10
"""Training images of a class that teach little of it."""


def expectations(config: Config, listing: Listing) -> list[str]:
    """The images in figures, and what follows from them for a run."""
    images, names = listing.table.select(["split", "tags"]), listing.classes
    train, val = (rows_in_split(images, split) for split in ("train", "val"))
    tagged, tagged_val = (rows_in_split(images, split, tagged=True) for split in ("train", "val"))
    single = float(np.mean(pc.list_value_length(tagged["tags"]).to_numpy() == 1)) if len(tagged) else 0.0
    lines = [
        f"images:  {len(tagged):,} of {len(train):,} in train with a tag, {len(tagged_val):,} of {len(val):,} in val; "
        f"{len(names)} classes; {single:.0%} of the tagged train images have one tag"
    ]
    sentences = _few_images(tagged, names) + _scores(config, listing)
    return lines + [f"expect:  {sentence}" for sentence in sentences]


def _few_images(tagged: pa.Table, names: tuple[str, ...]) -> list[str]:
    tags = pc.list_flatten(tagged["tags"]).to_numpy().astype(np.int64)
    images = np.bincount(tags, minlength=len(names)).tolist()
    few = [f"{name} ({count})" for name, count in zip(names, images, strict=True) if count < _FEW]
    if not few:
        return []
    return [f"poor masks of {len(few)} of {len(names)} classes, with fewer than {_FEW} training images: {shown(few)}"]


def _scores(config: Config, listing: Listing) -> list[str]:
    """What is not scored, for want of masks."""
    images, split = listing.table.select(["split", "mask_uri"]), config.predict.split
    if split == "auto":
        split = "val" if len(rows_in_split(images, "val")) else "train"
    sentences = []
    if split == "train":
        sentences.append("predictions of the training images themselves, and scores on these alone")
    without = [
        name
        for name in dict.fromkeys(("train", split))
        if not pc.any(rows_in_split(images, name)["mask_uri"].is_valid()).as_py()
    ]
    if without:
        sentences.append(f"no scores of split {' and '.join(without)}: no image of it has a ground-truth mask")
    return sentences
