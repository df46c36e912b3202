"""Describes, from the listing of the images alone, which results to expect from a run."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import join_shortened
from mcis.datasets.index import Listing
from mcis.datasets.tags import count_tags
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import predicted_split, rows_in_split

_FEW_IMAGES = 10
"""Number of training images below which a class is learned poorly."""


def expectations(config: Config, listing: Listing) -> list[str]:
    """Lines of text: the number of images, and which results to expect from them."""
    images = listing.table.select(["split", "tags", "is_negative"])
    train = rows_in_split(images, "train")
    val = rows_in_split(images, "val")
    tagged = rows_in_split(images, "train", tagged=True)
    tagged_val = rows_in_split(images, "val", tagged=True)

    num_negatives = pc.sum(train["is_negative"]).as_py()
    negatives = f"{num_negatives:,} negatives in train; " if num_negatives else ""
    single_tag_share = 0.0
    if len(tagged):
        single_tag_share = float(np.mean(pc.list_value_length(tagged["tags"]).to_numpy() == 1))
    lines = [
        f"images:  {len(tagged):,} of {len(train):,} in train with a tag, {len(tagged_val):,} of {len(val):,} in val; "
        f"{negatives}{len(listing.classes)} classes; {single_tag_share:.0%} of the tagged train images have one tag"
    ]
    sentences = _missing_scores(config, listing)
    if config.trains_classifier or config.trains_segmenter:
        sentences = _rare_classes(tagged, listing.classes) + sentences
    return lines + [f"expect:  {sentence}" for sentence in sentences]


def _rare_classes(tagged: pa.Table, names: tuple[str, ...]) -> list[str]:
    """A sentence on classes with few training images."""
    counts = count_tags(tagged["tags"], len(names)).tolist()
    rare = [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if count < _FEW_IMAGES]
    if not rare:
        return []
    problem = f"poor masks of {len(rare)} of {len(names)} classes, with fewer than {_FEW_IMAGES} training images"
    return [f"{problem}: {join_shortened(rare)}"]


def _missing_scores(config: Config, listing: Listing) -> list[str]:
    """Sentences on what is not scored because there is no val split or no ground truth."""
    images = listing.table.select(["split", "mask_uri"])
    split = predicted_split(config, has_val=len(rows_in_split(images, "val")) > 0)

    sentences = []
    if split == "train":
        sentences.append("predictions of the training images themselves, and scores on these alone")

    without_masks = []
    for name in dict.fromkeys(("train", split)):
        if not pc.any(rows_in_split(images, name)["mask_uri"].is_valid()).as_py():
            without_masks.append(name)
    if without_masks:
        splits = " and ".join(without_masks)
        sentences.append(f"no scores of split {splits}: no image of it has a ground-truth mask")
    return sentences
