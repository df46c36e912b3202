"""Stage 4: localization maps + background cue -> pseudo masks (MASKS_SCHEMA) of the tagged training images."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from mcis.datasets.decode import decode_saliency, encode_labels
from mcis.datasets.errors import UserError
from mcis.datasets.maps import MASKS_SCHEMA, Shards
from mcis.datasets.images import read_rgb
from mcis.models.crf import CrfParameters
from mcis.models.localization import resize_maps, scale_maps
from mcis.models.pseudo_masks import PseudoMask, from_crf, from_saliency
from mcis.platform.config import Config, CrfConfig, PseudoMasksConfig
from mcis.platform.context import RunContext
from mcis.platform.mapping import map_table
from mcis.platform.stages.index import file_stamps, split_rows
from mcis.platform.workspace import read_table


def crf_parameters(config: CrfConfig) -> CrfParameters:
    """The configuration's CRF section as the numerics take it."""
    return CrfParameters(**config.model_dump())


def background_cue(config: PseudoMasksConfig, rows: pa.Table) -> str:
    """The cue that is used: `saliency` or `crf`.

    Raises:
        UserError: saliency is asked for and there are no maps.
    """
    there = rows["saliency_uri"].null_count == 0
    if config.background == "saliency" and not there:
        raise UserError(
            f"pseudo_masks.background is saliency, but {rows['saliency_uri'].null_count} training images have no map",
            "a saliency map for each training image",
            "add the folder of maps (data.saliency), or set pseudo_masks.background=crf",
        )
    if config.background == "auto":
        return "saliency" if there else "crf"
    return config.background


def read_saliency(uri: str, shape: tuple[int, int]) -> np.ndarray:
    """A saliency map (H, W) uint8 of the image's size.

    Raises:
        UserError: it cannot be read or has another size.
    """
    try:
        saliency = decode_saliency(Path(uri).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"the saliency map {uri} cannot be read ({error})", "a grey PNG", "replace the file") from None
    if saliency.shape != shape:
        raise UserError(
            f"the saliency map {uri} has {saliency.shape[0]}x{saliency.shape[1]} pixels (height x width)",
            f"{shape[0]}x{shape[1]} as its image",
            "make the map at the image's size",
        )
    return saliency


class MakeMasks:
    """Image rows -> pseudo masks."""

    def __init__(self, config: PseudoMasksConfig, cue: str, maps: Shards):
        self.config, self.cue, self.maps = config, cue, maps

    def __call__(self, rows: pa.Table) -> pa.Table:
        out = []
        for row in rows.to_pylist():
            result = self._mask(row)
            out.append(
                {
                    "image_id": row["image_id"],
                    "labels": encode_labels(result.labels),
                    "mask": encode_labels(result.mask),
                    "ignored": float((result.mask == 255).mean()),
                }
            )
        return pa.Table.from_pylist(out, schema=MASKS_SCHEMA)

    def _mask(self, row: dict[str, Any]) -> PseudoMask:
        c, height, width = self.config, row["height"], row["width"]
        found = self.maps.maps(row["image_id"])
        assert found is not None, f"localize wrote no map for the tagged image {row['image_id']}"
        maps = resize_maps(scale_maps(torch.from_numpy(found.maps), clip=c.clip), height, width).numpy()
        if self.cue == "saliency":
            return from_saliency(
                maps,
                found.classes,
                read_saliency(row["saliency_uri"], (height, width)),
                level=c.saliency_level,
                floor=c.floor,
                conflict=c.conflict,
                confident=c.confident,
                doubt=c.doubt,
                smallest=c.smallest,
            )
        return from_crf(
            read_rgb(row["uri"]),
            maps,
            found.classes,
            threshold=c.threshold,
            background_threshold=c.background_threshold,
            parameters=crf_parameters(c.crf),
        )


def inputs(config: Config, context: RunContext) -> Any:
    """The stamps of the saliency maps, where they are the cue."""
    rows = split_rows(context, "train", tagged=True)
    if background_cue(config.pseudo_masks, rows) == "crf":
        return None
    return file_stamps(rows["saliency_uri"].to_pylist())


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Makes the pseudo masks in parallel tasks.

    Raises:
        UserError: a saliency map is missing, unreadable or of another size.
    """
    rows = split_rows(context, "train", tagged=True)
    cue = background_cue(config.pseudo_masks, rows)
    mapped = map_table(
        rows,
        MakeMasks,
        (config.pseudo_masks, cue, Shards(context.inputs["localize"] / "maps")),
        context.part / "masks",
        label="pseudo masks",
        shard_rows=config.compute.shard_rows,
    )
    ignored = read_table(context.part / "masks", ["ignored"])["ignored"]
    whole = int(pc.sum(pc.greater_equal(ignored, 1.0)).as_py() or 0)
    notes = []
    if config.pseudo_masks.background == "auto":
        why = "its folder exists" if cue == "saliency" else "there is no folder of saliency maps"
        notes.append(f"background cue: {cue}, because {why}")
    if whole:
        notes.append(f"{whole} pseudo mask(s) are ignored whole: too little foreground")
    return {
        "busy": mapped.busy,
        "background_cue": cue,
        "counts": {
            "masks": len(rows),
            "ignored whole": whole,
            "ignored share": round(float(pc.mean(ignored).as_py()), 4),
        },
        "notes": notes,
    }
