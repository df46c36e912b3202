"""The stage `pseudo_masks`: the ground truth is no saliency map."""

from pathlib import Path

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.platform.stages.pseudo_masks import check_saliency_is_no_truth


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
