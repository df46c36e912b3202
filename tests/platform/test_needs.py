"""What a run takes: figures of VOC with the paper's networks, what bounds them, and what is there already."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.models.pretrained import pretrained_url
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.needs import Counts, Needs, counts_of, embeddings, needs
from mcis.platform.runs.workspace import Workspace, in_words

GIB = 2**30
VOC = Counts(
    classes=20,
    images=12031,
    tagged=10582,
    tags=15873,
    salient=0,
    scored=10582,
    val=1449,
    predicted=1449,
    file_bytes=110_000,
)


def computed(
    *assignments: str, recipe: str = "paper", counts: Counts = VOC, workspace: Workspace | None = None
) -> Needs:
    return needs(resolve("voc", recipe, assignments=assignments).config, counts, workspace)


def listing(train: int, val: int, uri: str = "/absent/{}.jpg") -> pa.Table:
    """Every other image has two tags, one in ten of val none."""
    tags = [[0, 1] if number % 2 else [2] for number in range(train)]
    tags += [[] if number % 10 == 0 else [0] for number in range(val)]
    names = ["train"] * train + ["val"] * val
    uris, saliency = [uri.format(number) for number in range(train + val)], pa.nulls(train + val, pa.string())
    return pa.table({"uri": uris, "split": names, "tags": tags, "saliency_uri": saliency, "mask_uri": uris})


def test_voc_with_the_papers_networks_takes_more_than_12_gib() -> None:
    counts = counts_of(resolve("voc", "paper").config, listing(10582, 1449), 20)
    assert counts._replace(file_bytes=0) == VOC._replace(val=1304, file_bytes=0)
    plan = computed(counts=counts)
    assert plan.parts["localize"].beside == 10582 * 2 * 512 * 32 * 32  # features, float16: 1 MiB of an image
    assert plan.parts["decoded images"].leaves == pytest.approx((10582 + 1304) * 3 * 256**2, rel=1e-3)
    assert 12 * GIB < plan.disk() < 15 * GIB
    assert plan.largest().startswith("localize 10.4 GiB, decoded images 2.2 GiB")
    assert f"at most {in_words(plan.disk())} where nothing is finished" in plan.lines(Path("/"))[0]


def test_parts_are_the_sizes_of_what_is_written() -> None:
    plan = computed()
    weights = 4 * (14_714_688 + 3 * (9 * 512 * 512 + 512) + 512 * 512 + 20 * 513)  # VGG-16, three layers, W_P, phi
    assert plan.parts["train_classifier"].leaves == pytest.approx(weights + 512 * 3174, rel=0.001)
    assert plan.parts["train_classifier"].beside > 2 * 2 * weights  # two checkpoints with a momentum each
    assert plan.parts["classifier's pretrained weights"].leaves == pytest.approx(553_433_881, rel=1e-4)
    assert plan.parts["localize"].leaves > 2 * VOC.tags * 2 * 32 * 32
    assert plan.parts["train_segmenter"].memory > plan.parts["train_classifier"].memory > 4 * weights


def test_bounds_bound() -> None:
    whole, bounded = computed(), computed("localize.features_gb=3", "compute.cache_gb=0")
    assert bounded.parts["decoded images"].leaves == 0
    assert 3 * GIB < bounded.parts["localize"].beside < 3.2 * GIB, "with the tables of the rounds"
    assert bounded.disk() < whole.disk() - 9 * GIB
    assert computed("localize.related=0").parts["localize"].beside == 0
    assert computed("compute.micro_batch=1").most_memory() < whole.most_memory() - GIB
    assert computed("compute.checkpoint_steps=1000000").parts["train_classifier"].beside == 0


def test_maps_of_several_numbers_of_related_images_take_their_tables_and_one_file_of_features() -> None:
    one, six = (computed(*also).parts["localize"] for also in ((), ("localize.also_related=[0,1,2,3,4,5]",)))
    table = one.leaves / 2
    assert six.leaves == 6 * one.leaves
    assert six.beside == one.beside + 6 * table, "the pass's own tables: single-round maps, and those of 1 to 5"
    zero, none = computed("localize.related=0"), computed("localize.related=0", "localize.also_related=[0]")
    assert zero.parts["localize"] == none.parts["localize"]


def test_rounds_embed_images_again_and_at_most_as_often_as_maps_are_made_of_them() -> None:
    """VOC's features take 10.3 GiB with the paper's network; a map is made of 4 images."""

    def embedded(*assignments: str) -> float:
        return embeddings(resolve("voc", "paper", assignments=assignments).config, VOC)

    assert embedded() == embedded("localize.features_gb=11") == embedded("localize.related=0") == VOC.tagged
    assert embedded("localize.features_gb=10") == 2 * VOC.tagged
    assert embedded("localize.features_gb=0.1") == 4 * VOC.tags


MANY = VOC._replace(images=50_100, tagged=50_000, val=100)


def test_images_that_no_training_sees_and_features_that_the_cache_does_not_hold_are_told_with_what_to_set() -> None:
    """Of 50,000 photographs with a recipe for some thousand; as told, nothing is left to tell."""
    told = computed(recipe="photos", counts=MANY).expectations()
    assert told == [
        "expect:  compute.cache_gb=8 holds the frozen backbone's outputs of 8,630 of 50,100 images: it computes every "
        "image again in each epoch; compute.cache_gb=47 holds all",
        "expect:  the affinity network sees at most 1,600 of 50,000 training images; affinity_net.steps=3125 shows it "
        "each of them once",
        "expect:  the segmenter sees at most 4,800 of 50,000 training images; segmenter.steps=3125 shows it each of "
        "them once",
    ]
    as_told = [word.rstrip(";") for line in told for word in line.split() if "=" in word and "cache_gb=8" not in word]
    assert len(as_told) == 3
    assert computed(*as_told, recipe="photos", counts=MANY).expectations() == []
    one_less = [f"{key}={int(value) - 1}" for key, value in (each.split("=") for each in as_told)]
    assert len(computed(*one_less, recipe="photos", counts=MANY).expectations()) == 3


def test_what_falls_short_is_told_of_the_stages_that_run() -> None:
    plan = computed(recipe="photos", counts=MANY)
    assert ["segmenter" in line for line in plan.expectations(["index", "train_segmenter"])] == [True]
    assert plan.expectations(["index"]) == []
    assert computed(recipe="photos", counts=MANY._replace(images=1788, tagged=1600)).expectations() == []
    few = computed("classifier.epoch_pairs=1000", "classifier.epochs=6", "compute.cache_gb=1").expectations()
    assert few == [
        f"expect:  compute.cache_gb=1 holds the pixels of {GIB // (3 * 256**2):,} of 12,031 images: others are decoded "
        "again in each epoch; compute.cache_gb=3 holds all",
    ]
    assert "of 10,582 of 12,031 images" in computed("compute.cache_gb=2").expectations()[0], "val images all or none"
    few = computed("classifier.epoch_pairs=500", "classifier.epochs=6").expectations()
    assert few == [
        "expect:  the classifier sees at most 6,000 of 10,582 training images; classifier.epoch_pairs=1764 shows it "
        "each of them once"
    ]
    taken = computed("classifier.epoch_pairs=500", "compute.cache_gb=0", "weights.classifier=mine.pt")
    assert taken.expectations() == []


def test_stages_are_added_up_in_their_order() -> None:
    plan = computed()
    parts = plan.parts
    assert (
        plan.disk(["train_classifier"])
        == sum(parts[name].leaves for name in ("classifier's pretrained weights", "decoded images", "train_classifier"))
        + parts["train_classifier"].beside
    )
    localize, masks = parts["localize"], parts["pseudo_masks"]
    assert plan.disk(["localize", "pseudo_masks"]) == localize.leaves + localize.beside
    assert plan.disk(["pseudo_masks", "predict"]) == masks.leaves + parts["predict"].leaves
    assert plan.disk([]) == 0


def test_what_is_there_is_not_asked_for_again(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    (workspace.weights / pretrained_url("vgg16").rsplit("/", 1)[1]).touch()
    (workspace.cache / "squash256-other").mkdir()
    with (workspace.cache / "squash256-other/part-0.arrow").open("wb") as file:
        file.truncate(7 * GIB)  # takes no space
    plan = computed(workspace=workspace)
    assert plan.parts["classifier's pretrained weights"].leaves == 0
    assert plan.parts["segmenter's pretrained weights"].leaves > 0
    assert plan.parts["decoded images"].leaves == pytest.approx(GIB, rel=1e-2)
    taken = computed("weights.classifier=mine.pt", workspace=workspace)
    assert taken.parts["decoded images"].leaves == taken.parts["train_classifier"].beside == 0


def test_a_network_of_timms_is_measured_too() -> None:
    backbone = "classifier.backbone=timm/tf_efficientnet_lite0"
    plan = computed(backbone, "segmenter.backbone=timm/tf_efficientnet_lite0", "segmenter.network=skip")
    assert plan.parts["localize"].beside == 10582 * 2 * 432 * 16 * 16
    assert plan.parts["classifier's pretrained weights"].leaves == pytest.approx(4 * 4_700_000, rel=0.01)
    assert plan.parts["segmenter's pretrained weights"].leaves > 0
    assert computed(backbone, "weights.backbone=bundled").parts["classifier's pretrained weights"].leaves == 0


def test_networks_with_dropout_are_measured_too() -> None:
    assert computed(recipe="paper_vgg16").parts["train_segmenter"].leaves > 4 * 14_714_688


LID = Counts(
    classes=200, images=364_009, tagged=349_319, tags=500_000, salient=0, scored=0, val=0, predicted=4690,
    file_bytes=110_000,
)  # fmt: skip


def of_lid(*assignments: str, counts: Counts = LID) -> Needs:
    return needs(resolve("lid", assignments=assignments).config, counts, None)


def test_the_challenge_lid_keeps_no_features() -> None:
    """Features of all its images would take 366 GiB at 16x16 positions, and 8 TiB at those of recipe lid."""
    plan, related = of_lid(), of_lid("localize.related=3")
    maps = 2 * LID.tags * 2 * 56 * 56
    assert plan.parts["localize"].beside == 0
    assert maps < plan.parts["localize"].leaves < maps + 0.2 * GIB
    assert related.parts["localize"].beside > 64 * GIB, "its bound, localize.features_gb, and tables of rounds"
    assert plan.parts["decoded images"].leaves == 0, "each epoch reads other crops"
    assert plan.parts["classifier's pretrained weights"].leaves == 0, "they are a file"
    assert plan.parts["evaluate"].leaves < 0.1 * GIB, "no training image has a ground-truth mask"
    assert 10 * GIB < plan.disk() < 20 * GIB, plan.lines(Path("/"))


def test_the_challenge_lid_takes_a_large_gpu_or_micro_batches() -> None:
    """ResNet-38 at 448 pixels: 16 images of a step, their copies, and the correlation of 3,136 positions of each."""
    weights = 4 * (105.0e6 + 4096**2)
    plan, plain, parts = of_lid(), of_lid("classifier.equivariant.weight=0"), of_lid("compute.micro_batch=1")
    assert plan.parts["train_classifier"].beside > 2 * 2 * 0.95 * weights
    with_copies, without = (each.parts["train_classifier"].memory for each in (plan, plain))
    assert with_copies - without > 16 * 6 * 4 * 3136**2
    assert parts.parts["train_classifier"].memory < 0.25 * with_copies
    assert plan.parts["predict"].memory > 2 * GIB, "probabilities of 201 labels, and the CRF on them"


def test_counts_grow_with_the_images_that_are_scored() -> None:
    none, few, many = (of_lid(counts=LID._replace(scored=n)).parts["evaluate"].leaves for n in (0, 1_000, 10_000))
    assert many - none == pytest.approx(10 * (few - none), rel=0.05)


def test_label_pictures_grow_with_the_images_files(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.jpg").touch()
        os.truncate(tmp_path / f"{number}.jpg", 4_000_000)
    config = resolve("voc", "small").config
    seen, unseen = (counts_of(config, listing(16, 4, uri), 3) for uri in (f"{tmp_path}/{{}}.jpg", "/absent/{}.jpg"))
    assert seen.file_bytes == 4_000_000
    masks = [needs(config, counts, None).parts["pseudo_masks"].leaves for counts in (seen, unseen)]
    assert masks[0] > 10 * masks[1]


def test_space_that_is_wanting_is_an_error_that_names_what_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, plan = Workspace(tmp_path), computed()
    stages = ["localize", "pseudo_masks"]
    monkeypatch.setattr("mcis.platform.networks.needs.free_bytes", lambda folder: 6 * GIB)
    with pytest.raises(
        UserError, match=r"takes 10\.4 GiB more on the disk .* has 6\.0 GiB free; .*: localize 10\.4 GiB"
    ):
        plan.check_disk(workspace, stages, begun=0)
    plan.check_disk(workspace, stages, begun=5 * GIB)
    plan.check_disk(workspace, ["pseudo_masks"], begun=0)


def test_bytes_are_told_in_a_fitting_unit() -> None:
    assert [in_words(count) for count in (0, 2048, 2**20, 90 * 2**20, 2**29, 12.34 * GIB)] == [
        "0.0 KiB", "2.0 KiB", "1.0 MiB", "90.0 MiB", "0.5 GiB", "12.3 GiB"
    ]  # fmt: skip
