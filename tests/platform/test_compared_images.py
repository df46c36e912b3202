"""The images of a comparison: those that differ most and some at random, the same in every call, with every mask."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import decode_labels
from mcis.datasets.tables.shards import Shards
from mcis.platform.reporting.compared_images import ComparedImages, choose, compared_images
from mcis.platform.reporting.compared_runs import open_cases
from mcis.platform.reporting.comparison import Settings, compare
from mcis.platform.runs.workspace import Workspace

NAN = float("nan")


@pytest.fixture(scope="module")
def root(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    root, data = folder / "workspace", folder / "data"
    for seed in range(2):
        scored(root, f"a-s{seed}", f"seed={seed}", data=data)
    scored(root, "b", "segmenter.steps=7", data=data, error=0.4)
    scored(root, "fewer", data=data, images=3)
    return root


def shown(root: Path, *arguments: str, count: int = 4, seed: int = 0) -> list[ComparedImages]:
    comparison = compare(
        open_cases(root, arguments, what=("pseudo_masks", "segmentation")), Settings(resamples=100, seed=seed)
    )
    return compared_images(comparison, count)


IDS = [f"i{number}" for number in range(6)]


def test_the_largest_differences_come_first_then_others_at_random() -> None:
    first = dict.fromkeys(IDS, 50.0) | {"i1": NAN}
    second = first | {"i2": 90.0, "i4": 5.0, "i5": 51.0}
    third = first | {"i4": 55.0, "i0": 49.5}
    del second["i3"]
    chosen = choose(IDS, [first, second, third], 4, seed=0)
    assert [of.image_id for of in chosen[:2]] == ["i4", "i2"]
    assert [of.differs_most for of in chosen] == [True, True, False, False]
    assert [of.image_id for of in choose(IDS, [first, second, third], 6, seed=0)][:3] == ["i4", "i2", "i5"]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 9), st.integers(0, 2**31), st.lists(st.sampled_from([0.0, 1.0, 2.0, NAN]), min_size=6, max_size=6)
)
def test_a_choice_has_each_image_once_and_is_the_same_in_every_call(count: int, seed: int, values: list[float]) -> None:
    mious = [dict(zip(IDS, values, strict=True)), dict.fromkeys(IDS, 0.0)]
    chosen = choose(IDS, mious, count, seed=seed)
    assert len({of.image_id for of in chosen}) == len(chosen) == min(count, 6)
    assert chosen == choose(IDS, mious[::-1], count, seed=seed)
    differing = {image_id for image_id, value in mious[0].items() if value > 0}
    assert {of.image_id for of in chosen if of.differs_most} <= differing
    assert sum(of.differs_most for of in chosen) == min((count + 1) // 2, len(differing))


def test_images_have_photograph_truth_and_the_mask_of_every_run(root: Path) -> None:
    predictions, masks = shown(root, "a-s0", "b")
    assert [(of.what, of.common, len(of.images)) for of in (predictions, masks)] == [
        ("segmentation", 8, 4),
        ("pseudo_masks", 8, 4),
    ]
    for of, stage, table, column in (
        (predictions, "predict", "predictions", "crf"),
        (masks, "pseudo_masks", "masks", "labels"),
    ):
        for image in of.images:
            name, panel = image.chosen.image_id, image.panel
            np.testing.assert_array_equal(panel.image, Image.open(root.parent / "data" / f"0-{name}.jpg"))
            np.testing.assert_array_equal(panel.truth, Image.open(root.parent / "data" / f"0-{name}.png"))
            assert [mask.run for mask in image.masks] == ["a-s0", "b"]
            for mask in image.masks:
                rows = Shards(root / "store" / f"{stage}-{mask.run}" / table).rows(name)
                assert rows is not None
                labels = mask.panel.prediction if stage == "predict" else mask.panel.pseudo_mask
                np.testing.assert_array_equal(labels, decode_labels(rows[column][0].as_py()))
                assert 0 < mask.miou < 100
        most = [image for image in of.images if image.chosen.differs_most]
        ranges = [abs(image.masks[0].miou - image.masks[1].miou) for image in most]
        assert ranges == sorted(ranges, reverse=True)
    assert {mask.which for image in predictions.images for mask in image.masks} == {"with CRF"}


def test_a_case_of_several_seeds_shows_its_first(root: Path) -> None:
    predictions, _ = shown(root, "b", "a-s1,a-s0")
    assert {(mask.case, mask.run) for image in predictions.images for mask in image.masks} == {
        ("b", "b"),
        ("a (2 seeds)", "a-s0"),
    }


def test_only_images_of_all_runs_are_shown_and_none_where_none_are_asked_for(root: Path) -> None:
    predictions, _ = shown(root, "a-s0", "b", "fewer", count=8)
    assert (predictions.common, len(predictions.images)) == (3, 3)
    assert shown(root, "a-s0", "b", count=0) == []


def test_runs_that_made_no_masks_have_no_images(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "workspace")
    workspace = Workspace(tmp_path / "workspace")
    workspace.record_outputs("b", {s: path for s, path in workspace.outputs("b").items() if s != "predict"})
    predictions, masks = shown(tmp_path / "workspace", "a-s0", "b")
    assert (predictions.common, predictions.images, len(masks.images)) == (0, [], 4)


def test_a_photograph_that_is_gone_is_named(root: Path) -> None:
    data, kept = root.parent / "data", root.parent / "kept"
    data.rename(kept)
    try:
        with pytest.raises(UserError, match=r"(?s)jpg cannot be read any more .* by --images 0"):
            shown(root, "a-s0", "b", count=2)
    finally:
        kept.rename(data)
