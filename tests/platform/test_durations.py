"""How long a run takes: what passes come to, which stages repeat which, and where nothing is estimated."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.index import LISTING_SCHEMA, Listing
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.resolve import resolve
from mcis.platform.networks import durations as module
from mcis.platform.networks.durations import (
    Passes,
    Pictures,
    durations,
    expected_duration,
    in_words,
    measure,
)
from mcis.platform.networks.needs import Counts, counts_of, keeps_outputs

COUNTS = Counts(
    classes=20, images=120, tagged=100, tags=150, salient=40, scored=100, val=10, predicted=20, file_bytes=1e5
)
PASSES = Passes(
    read=0.01,
    read_smaller=0.003,
    backbone=1.0,
    head=0.1,
    pair=3.0,
    relate=0.2,
    paint=0.05,
    mask_crf=2.0,
    pairs_crop=6.0,
    walk=8.0,
    crop=4.0,
    segment=5.0,
    predict_crf=7.0,
)


def estimated(*assignments: str, recipe: str = "small", kept: bool = False, cores: int = 1) -> dict[str, float]:
    config = resolve("voc", recipe, assignments=["segmenter.steps=10", *assignments]).config
    return durations(config, COUNTS, PASSES, cores, kept=kept)


def test_stages_repeat_their_passes() -> None:
    plain = ["localize.related=0", "localize.extra_scales=[]", "localize.mirror=false", "pseudo_masks.background=crf"]
    seconds = estimated(*plain, "classifier.epochs=2", "predict.mirror=false")
    pairs, crops = 13 * 16, 10 * 16  # 2 epochs of 100 pairs in steps of 16
    assert seconds == pytest.approx(
        {
            "index": 120 * 0.01,
            "train_classifier": pairs * 3.0 + 110 * 0.01 + 2 * 10 * 1.1,
            "localize": 100 * (0.01 + 1.1),
            "pseudo_masks": 100 * 0.053 + 2 * 100 * 2.0,
            "train_segmenter": crops * (4.0 + 0.003),
            "predict": 20 * (0.003 + 5.0 + 0.05 + 7.0),
        }
    )
    two = estimated(*plain, "classifier.epochs=2", "predict.mirror=false", cores=2)
    assert two == {stage: on_one / 2 for stage, on_one in seconds.items()}


def test_maps_cost_scales_mirror_images_and_related_images() -> None:
    def localize(*assignments: str, kept: bool = False) -> float:
        base = ["localize.extra_scales=[]", "localize.mirror=false"]
        return estimated(*base, *assignments, kept=kept)["localize"]

    alone = localize("localize.related=0")
    assert localize("localize.related=0", "localize.mirror=true") - alone == pytest.approx(100 * 1.1)
    assert localize("localize.related=0", "localize.extra_scales=[0.5,2]") - alone == pytest.approx(100 * 4.25 * 1.1)
    assert localize("localize.related=4") - alone == pytest.approx(150 * 4 * 0.2)
    assert localize("localize.related=4", "localize.related_by=itself") - alone == pytest.approx(150 * 0.2)
    assert localize("localize.related=0", "localize.also_related=[4,1]") == localize("localize.related=4")
    nearest = localize("localize.related=4", "localize.related_by=nearest")
    assert nearest - localize("localize.related=4") == pytest.approx(100 * 1.11)
    assert localize("localize.related=0", kept=True) == pytest.approx(100 * 0.1)
    released = localize("localize.method.name=released", "maps.scale=maximum", "localize.related=3")
    assert released - alone == pytest.approx(100 * 5.5625 * 1.1 + 150 * 7 * 0.2)


def test_what_a_frozen_backbone_makes_of_images_is_computed_once() -> None:
    seconds = estimated("classifier.epochs=4", recipe="photos", kept=True)
    assert seconds["train_classifier"] == pytest.approx(25 * 16 * 3.0 + 110 * (0.01 + 2.0) + 4 * 10 * 0.1)
    photos = resolve("voc", "photos").config
    assert keeps_outputs(photos, COUNTS)
    assert not keeps_outputs(photos, COUNTS._replace(tagged=10**7)), "the cache does not hold them"
    assert not keeps_outputs(resolve("voc", "small").config, COUNTS)


def test_what_is_left_out_takes_no_time() -> None:
    assert estimated("weights.classifier=mine.pt")["train_classifier"] == 0
    full = estimated("supervision=full", "segmenter.init=pretrained")
    assert list(full) == ["index", "train_segmenter", "predict"]
    auto, crf = (estimated(f"pseudo_masks.background={cue}")["pseudo_masks"] for cue in ("auto", "crf"))
    assert crf - auto == pytest.approx(2 * 40 * 2.0), "40 images have a saliency map"


def test_maps_that_walk_take_a_network_and_its_labels() -> None:
    walks = "pseudo_masks.background=affinity"
    seconds = estimated(walks, "affinity_net.steps=10", "affinity_net.batch=4", "affinity_net.trained=all")
    assert seconds["train_affinity"] == pytest.approx(100 * (0.053 + 2 * 2.0) + 40 * (6.0 + 0.003))
    assert seconds["pseudo_masks"] == pytest.approx(100 * (0.053 + 2 * 2.0 + 8.0))
    full = estimated(walks, "affinity_net.trained=all", "supervision=full", "segmenter.init=pretrained")
    assert "train_affinity" not in full


def test_seconds_are_told_in_a_fitting_unit() -> None:
    assert in_words({"index": 0.2, "localize": 30.0, "predict": 7200.0}, 2) == (
        "about 2.0 h on 2 cores where nothing is finished; most of it: predict 2.0 h, localize 30 s"
    )
    words = [module.clock_words(seconds) for seconds in (0.1, 89, 600, 3 * 86400)]
    assert words == ["1 s", "89 s", "10 min", "3.0 days"]


def test_a_long_pass_is_timed_on_a_small_picture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sides = [0.0], []

    def work(side: int, per_pixel: float) -> None:
        sides.append(side)
        now[0] += per_pixel * side**2

    monkeypatch.setattr(module.time, "process_time", lambda: now[0])
    assert module._by_area(lambda side: work(side, 1e-4), 512, 8) == pytest.approx(1e-4 * 512**2)
    assert set(sides) == {128}
    sides.clear()
    assert module._by_area(lambda side: work(side, 1e-7), 500, 8) == pytest.approx(1e-7 * 500**2)
    assert set(sides) == {128, 500}


@pytest.mark.parametrize(
    ("recipe", "assignments"),
    [
        ("small", ["classifier.input_size=32", "segmenter.crop=32", "localize.related=3"]),
        ("photos", ["classifier.input_size=64", "segmenter.crop=64", "predict.crop=48", "segmenter.dropout=0.5"]),
        (
            "small",
            [
                "classifier.input_size=32",
                "classifier.equivariant.weight=1",
                "maps.scale=range",
                "segmenter.crop=32",
                "segmenter.network=deeplabv3",
                "localize.related=3",
            ],
        ),
        ("small", ["supervision=full", "segmenter.init=pretrained", "segmenter.crop=32"]),
        (
            "small",
            [
                "classifier.input_size=32",
                "localize.related=3",
                "pseudo_masks.background=affinity",
                "affinity_net.backbone=resnet38",  # whose dropout asks for the numbers of samples
                "affinity_net.finest=8",
                "affinity_net.trained=all",
                "affinity_net.crop=32",
                "segmenter.crop=32",
            ],
        ),
    ],
)
def test_passes_are_those_of_the_configured_networks(recipe: str, assignments: list[str]) -> None:
    config = resolve("voc", recipe, assignments=assignments).config
    picture = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    passes = measure(config, COUNTS, Pictures([picture], 0.01, 0.003), kept=keeps_outputs(config, COUNTS))
    learns = config.supervision == "tags"
    timed = {name for name, seconds in passes._asdict().items() if seconds > 0}
    absent = {"backbone", "head", "pair", "relate", "mask_crf"} if not learns else set()
    walks = set() if config.walks else {"pairs_crop", "walk"}
    assert timed == set(Passes._fields) - absent - walks


def listing(folder: Path, count: int) -> Listing:
    rows = []
    for number in range(count):
        path = folder / f"{number}.png"
        Image.new("RGB", (40, 30)).save(path)
        row = {"image_id": str(number), "uri": str(path), "domain": "target", "split": "train", "tags": [0]}
        rows.append(row | {"mask_uri": None, "saliency_uri": None})
    return Listing(pa.Table.from_pylist(rows, schema=LISTING_SCHEMA), ("a", "b"))


def test_what_is_not_estimated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, listed = resolve("voc", "small").config, listing(tmp_path, 3)
    monkeypatch.setattr(module, "measure", lambda *given, **named: PASSES)
    assert counts_of(config, listed.table, 2).salient == 0
    assert expected_duration(config, listed, ["index"]) == (
        f"time:    about 1 s on {module.os.cpu_count()} cores where nothing is finished"
    )
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "the cluster head:6379 computes" in expected_duration(config, listed)
    monkeypatch.delenv("RAY_ADDRESS")
    on_gpus = config.model_copy(update={"compute": ComputeConfig(gpu=True)})
    assert "GPUs compute" in expected_duration(on_gpus, listed)
    monkeypatch.undo()
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    assert "cannot be read" in expected_duration(config, listed)
