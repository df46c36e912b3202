"""The stage `pseudo_masks`: which masks are made by which cue, and what the run says of it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.stages.pseudo_masks import check_saliency_is_no_truth, cue_counts, cue_of, uneven_cues


@pytest.mark.parametrize(
    ("background", "with_map", "without"),
    [("auto", "saliency", "crf"), ("crf", "crf", "crf"), ("affinity", "affinity", "affinity")],
)
def test_an_images_cue_is_its_saliency_map_unless_it_has_none(background: Any, with_map: str, without: str) -> None:
    config = PseudoMasksConfig(background=background)
    assert cue_of(config, {"saliency_uri": "a.png"}) == with_map
    assert cue_of(config, {"saliency_uri": None}) == without


def test_masks_are_counted_by_domain_and_cue() -> None:
    domains = pa.chunked_array([["target", "target"], ["target", "source", "web"]])
    cues = pa.chunked_array([["saliency", "crf", "saliency"], ["crf", "crf"]])
    counts = {("target", "saliency"): 2, ("target", "crf"): 1, ("source", "crf"): 1, ("web", "crf"): 1}
    assert cue_counts(domains, cues) == counts


def test_a_domain_made_by_crf_beside_one_with_saliency_maps_is_noted() -> None:
    assert uneven_cues({("target", "saliency"): 9, ("source", "saliency"): 4}) == []
    assert uneven_cues({("target", "crf"): 9, ("source", "crf"): 4}) == []
    assert uneven_cues({("target", "saliency"): 9, ("target", "crf"): 4}) == [], "the cue of the run says it"
    (note,) = uneven_cues({("target", "saliency"): 9, ("source", "crf"): 20, ("source", "saliency"): 1})
    assert note == (
        "20 of 21 pseudo masks of domain source are made with the dense CRF, while domain target has saliency maps: "
        "the masks differ in kind"
    )
    (note,) = uneven_cues({("source", "crf"): 3, ("web", "saliency"): 1, ("target", "saliency"): 9})
    assert "domain target, web has saliency maps" in note


@pytest.mark.parametrize("by", ["the same path", "a link"])
def test_ground_truth_that_is_named_as_saliency_maps_is_refused(tmp_path: Path, by: str) -> None:
    masks, saliency = tmp_path / "masks", tmp_path / "saliency"
    masks.mkdir()
    if by == "a link":
        saliency.symlink_to(masks)
    else:
        saliency = masks / ".." / "masks"

    def rows(folder: Path) -> pa.Table:
        columns = {"image_id": ["a", "b"], "mask_uri": [str(masks / f"{i}.png") for i in "ab"]}
        return pa.table(columns | {"saliency_uri": pa.array([str(folder / "a.png"), None], pa.string())})

    check_saliency_is_no_truth(rows(tmp_path / "others"))
    with pytest.raises(UserError, match="saliency maps of 1 of 2 training images are their ground-truth masks: a"):
        check_saliency_is_no_truth(rows(saliency))
