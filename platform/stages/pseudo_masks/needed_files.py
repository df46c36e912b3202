"""Finds the files that pseudo masks are made from: ground truth, saliency maps, and masks of other programs."""

import os
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.storage.files import stamps
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.config.saliency_commands import saliency_commands
from mcis.platform.config.sections import Config
from mcis.platform.outputs.corrected_masks import CORRECTED
from mcis.platform.outputs.imported_files import IMPORTED_FILE, ImportedFiles, imported_masks


def made_by_rule(rows: pa.Table) -> pa.ChunkedArray:
    """Whether the mask of an image is made by the rule: not for negatives and images with a corrected mask."""
    return pc.and_(pc.invert(rows["is_negative"]), rows[CORRECTED].is_null())


def rows_of_rule(rows: pa.Table) -> pa.Table:
    """The images whose masks the rule makes, with the columns that describe their background cue."""
    return rows.select(["image_id", "domain", "saliency_uri", "mask_uri"]).filter(made_by_rule(rows))


def background_cue(config: Config, rows: pa.Table) -> str:
    """What separates background from foreground in the masks that the rule makes of N images, as text.

    Args:
        config: Configuration of the run.
        rows: Columns `image_id`, `domain` and `saliency_uri` of these images (`rows_of_rule`).

    Returns:
        The name of a mask rule; or, for the rule `auto`, `saliency`, `crf`, or `saliency, crf for U of N` if U images
        have no saliency map.

    Raises:
        UserError: The configuration requires saliency maps that some images lack.
    """
    section = config.pseudo_masks
    if not section.may_use_saliency:
        return section.rule

    num_without = rows["saliency_uri"].null_count
    if section.rule == "auto":
        if num_without == len(rows):
            return "crf"
        return f"saliency, crf for {num_without} of {len(rows)}" if num_without else "saliency"
    if num_without:
        lacking = rows.filter(rows["saliency_uri"].is_null())
        commands = saliency_commands(config, lacking["domain"].unique().to_pylist())
        how = f" by {' and '.join(f'`{command}`' for command in commands)}" if commands else ""
        raise UserError(
            f"pseudo_masks.rule is {section.rule}, but {num_without} of {len(rows)} tagged training images have no "
            f"saliency map: {join_shortened(lacking['image_id'].to_pylist())}",
            "a saliency map for each tagged training image without a corrected mask",
            f"make the maps{how}; or set pseudo_masks.rule=auto, which uses the dense CRF for images without a "
            "saliency map; or pseudo_masks.rule=crf, which uses no saliency maps",
        )
    return section.rule


def will_use_saliency(config: Config, rows: pa.Table) -> bool:
    """Whether the rule will use a saliency map for any of the images.

    Args:
        config, rows: See `background_cue`.
    """
    return config.pseudo_masks.may_use_saliency and background_cue(config, rows) != "crf"


def check_truth_exists(rows: pa.Table) -> None:
    """Checks that tagged training images have ground-truth masks, and that there are such images. Opens no file.

    Args:
        rows: Rows of a listing: tagged training images and negatives.

    Raises:
        UserError: No image is tagged, or a mask is missing.
    """
    is_tagged = pc.invert(rows["is_negative"])
    if not pc.any(is_tagged).as_py():
        raise UserError("no training image has a tag", "tagged images, which training needs", "add tags")
    needs_mask = rows.filter(pc.or_(rows["mask_uri"].is_valid(), is_tagged))
    mask_stamps = stamps([uri or "" for uri in needs_mask["mask_uri"].to_pylist()])
    has_mask = [mask_stamp is not None for mask_stamp in mask_stamps]
    lacking = needs_mask.filter(pc.invert(pa.array(has_mask, pa.bool_())))["image_id"].to_pylist()
    if lacking:
        raise UserError(
            f"supervision is full, but {len(lacking)} of {len(rows)} tagged training images have no ground-truth "
            f"mask: {join_shortened(lacking)}",
            "a ground-truth mask for each, because the segmentation network is trained on them",
            "add the masks, or set supervision=tags",
        )


def check_saliency_is_no_truth(rows: pa.Table) -> None:
    """Checks that no saliency map is the file of the image's ground-truth mask. Opens no file.

    Raises:
        UserError: A saliency map and a ground-truth mask are the same file, directly or through links.
    """
    has_both = rows.filter(pc.and_(rows["saliency_uri"].is_valid(), rows["mask_uri"].is_valid()))
    same = []
    for row in has_both.select(["image_id", "saliency_uri", "mask_uri"]).to_pylist():
        if os.path.realpath(row["saliency_uri"]) == os.path.realpath(row["mask_uri"]):
            same.append(row["image_id"])
    if same:
        raise UserError(
            f"saliency maps of {len(same)} of {len(rows)} training images are their ground-truth masks: "
            f"{join_shortened(same)}",
            "saliency maps that are not ground truth, which is used for scoring only",
            "use other saliency maps, or none: pseudo_masks.rule=crf",
        )


def mask_files(section: PseudoMasksConfig) -> ImportedFiles[str]:
    """Finds the masks of another program: paths by the name of their image."""
    assert section.masks is not None
    return imported_masks(section.masks, "pseudo mask", "pseudo_masks.masks")


def with_imported(section: PseudoMasksConfig, rows: pa.Table, all_ids: Iterable[str]) -> pa.Table:
    """Adds the column IMPORTED_FILE: the mask of another program of each tagged image; null for negatives."""
    tagged_ids = rows.filter(pc.invert(rows["is_negative"]))["image_id"].to_pylist()
    matched = mask_files(section).match_all(tagged_ids, all_ids)
    file_of = dict(zip(tagged_ids, matched, strict=True))
    paths = [file_of.get(image_id) for image_id in rows["image_id"].to_pylist()]
    return rows.append_column(IMPORTED_FILE, pa.array(paths, pa.string()))
