"""What a run can expect of its images: counts of the listing, and what is missing."""

import pyarrow as pa

from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.expectations import expectations


def listing(train: list[list[int]], val: list[list[int]], *, masks: bool) -> Listing:
    images = [("train", tags) for tags in train] + [("val", tags) for tags in val]
    rows = [
        {"image_id": str(number), "uri": f"/{number}.jpg", "domain": "target", "split": split, "tags": tags}
        | {"mask_uri": "/mask.png" if masks else None, "saliency_uri": None, "is_negative": False}
        for number, (split, tags) in enumerate(images)
    ]
    return Listing(pa.Table.from_pylist(rows, schema=LISTING_SCHEMA), ("cat", "dog", "cow"))


def expected_lines(listed: Listing, *overrides: str) -> list[str]:
    return expectations(resolve("voc", "scratch", overrides=overrides).config, listed)


def test_good_images_are_only_counted() -> None:
    listed = listing([[0, 1, 2], [0], [], [0, 1, 2], [1, 2]] * 10, [[0], []], masks=True)
    assert expected_lines(listed) == [
        "images:  40 of 50 in train with a tag, 1 of 2 in val; 3 classes; 25% of the tagged train images have one tag"
    ]


def test_rare_classes_and_missing_images_are_reported() -> None:
    listed = listing([[0]] * 18 + [[1], [0, 1]], [], masks=False)
    assert expected_lines(listed)[1:] == [
        "expect:  poor masks of 2 of 3 classes, with fewer than 10 training images: dog (2), cow (0)",
        "expect:  predictions of the training images themselves, and scores on these alone",
        "expect:  no scores of split train: no image of it has a ground-truth mask",
    ]


def test_rare_classes_do_not_matter_if_nothing_is_trained() -> None:
    listed = listing([[0]] * 18 + [[1], [0, 1]], [[0]], masks=True)
    assert expected_lines(listed, "predict.masks=/predictions")[1:] == []


def test_masks_may_be_missing_in_both_splits() -> None:
    listed = listing([[0, 1, 2]] * 10, [[0]], masks=False)
    last_line = expected_lines(listed)[-1]
    assert last_line == "expect:  no scores of split train and val: no image of it has a ground-truth mask"
