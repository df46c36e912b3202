"""Recipe `photos` and its parts: a frozen backbone, cached features, nearest images."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.images.squares import image_bytes
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.memory_mapped import CachedRows, Features, features_bytes
from mcis.datasets.tables.shards import Shards
from mcis.models.pretrained import BUNDLED_BACKBONES, bundled_weights, load_pretrained
from mcis.models.pseudo_masks import MASK_RULES
from mcis.models.registry import build_backbone
from mcis.platform import pipeline
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.cache import training_features
from mcis.platform.networks.build import build_affinity_net, load_trained
from mcis.platform.networks.tagged_maps import AffinityWalk, tagged_maps
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.outputs.relations import VECTORS, read_vectors
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import train_classifier

TINY = (
    "classifier.epochs=2",
    "classifier.min_steps=0",
    "classifier.attention_epochs=1",
    "classifier.input_size=64",
    "classifier.batch=8",
    "data.max_side=48",
    "localize.related=3",
    "affinity_net.min_steps=4",
    "affinity_net.batch=4",
    "affinity_net.crop=64",
    "report.panels=2",
    "compute.shard_rows=8",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
"""Small values; images are read at a reduced size."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(root, train=20, val=4, size=64, classes=3)
    return root


def settings(root: Path, *overrides: str, recipe: str = "photos") -> Resolved:
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    return resolve("voc", recipe, options, [*TINY, *overrides])


@pytest.fixture(scope="module")
def kept(ray_local: None, root: Path, mlflow_store: Path, tmp_path_factory: Any) -> pipeline.RunResult:
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    shutil.copy(mlflow_store, workspace.tracking_store)
    return pipeline.run(settings(root), workspace, "kept", until="pseudo_masks")


def weights(run: pipeline.RunResult) -> dict[str, torch.Tensor]:
    content = torch.load(run.context.stage_outputs["train_classifier"] / WEIGHTS, weights_only=True)
    state: dict[str, torch.Tensor] = content["state_dict"]
    return state


def check_maps(actual: pipeline.RunResult, expected: pipeline.RunResult, tolerance: float) -> None:
    """Checks that the maps of two runs differ by at most a share of the highest expected value of each image."""
    actual_folder = actual.context.stage_outputs["localize"] / "maps"
    actual_shards = Shards(actual_folder)
    expected_shards = Shards(expected.context.stage_outputs["localize"] / "maps")
    for image_id in read_table(actual_folder)["image_id"].unique().to_pylist():
        actual_maps = image_maps(actual_shards, image_id).maps
        expected_maps = image_maps(expected_shards, image_id).maps
        np.testing.assert_allclose(actual_maps, expected_maps, atol=tolerance * float(np.abs(expected_maps).max()))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["photos_fast", "photos_large"])
def test_the_other_sizes_of_the_recipe_run_completely(ray_local: None, root: Path, tmp_path: Path, recipe: str) -> None:
    """`photos_large` with random weights and without a GPU."""
    small = [
        "segmenter.min_steps=2",
        "segmenter.min_epochs=0.1",
        "segmenter.batch=2",
        "segmenter.crop=64",
        "compute.gpu=false",
    ]
    if recipe == "photos_large":
        backbone = build_backbone(RECIPES[recipe]().classifier.backbone)
        torch.save(backbone.body.state_dict(), tmp_path / "random.pt")
        small.append(f"weights.classifier_backbone={tmp_path / 'random.pt'}")
    resolved = settings(root, *small, "affinity_net.min_epochs=0.1", recipe=recipe)
    done = pipeline.run(resolved, Workspace(tmp_path), recipe, until="evaluate")
    assert done.context.result("train_segmenter", StageResult).counts["steps"] == 2


@pytest.mark.slow
def test_training_on_cached_features_equals_training_on_images(
    kept: pipeline.RunResult, root: Path, tmp_path: Path
) -> None:
    """Weights and maps are equal up to the rounding of float16."""
    negligible_jitter = "classifier.color_jitter=[1e-9, 0, 0, 0]"  # features of augmented images cannot be cached
    uncached_run = pipeline.run(settings(root, negligible_jitter), Workspace(tmp_path), "uncached", until="localize")
    expected = weights(uncached_run)
    actual = weights(kept)
    for name, value in expected.items():
        if name.startswith("backbone."):
            assert torch.equal(value, actual[name]), name
        else:
            torch.testing.assert_close(actual[name], value, atol=2e-3, rtol=2e-2, msg=name)
    check_maps(kept, uncached_run, tolerance=0.03)


def test_features_of_images_and_flipped_images_are_cached_and_standardize_channels(kept: pipeline.RunResult) -> None:
    folders = sorted(kept.context.workspace.cache.glob("features-*"))
    rows = {len(Features([], folder, (472, 4, 4)).cache.spans): folder for folder in folders}
    features = Features(["?"] * 20, rows[3], (472, 4, 4))  # 20 training images in shards of 8
    plain, mirrored = (features(np.arange(20), np.full(20, side)) for side in (False, True))
    assert plain.shape == (20, 472, 4, 4)
    of_val = (rows[1] / "part-00000000-00000004.arrow").stat().st_size
    assert 4 * 472 * 16 * 2 < of_val < 5 * 472 * 16 * 2, "float16, without flipped images"
    assert not np.array_equal(plain, mirrored)
    everything = plain.astype(np.float64).transpose(1, 0, 2, 3).reshape(472, -1)
    state = weights(kept)
    np.testing.assert_allclose(state["mean"], everything.mean(axis=1), atol=1e-4)
    np.testing.assert_allclose(state["deviation"], np.maximum(everything.std(axis=1), 1e-6), atol=1e-4)


def test_masks_have_the_size_of_images_as_read_and_are_scored_at_full_size(kept: pipeline.RunResult) -> None:
    masks = read_table(kept.context.stage_outputs["pseudo_masks"] / "masks")
    sizes = {decode_labels(png.as_py()).shape for column in ("mask", "labels") for png in masks[column]}
    assert {max(size) for size in sizes} == {48}
    (score,) = [score for score in kept.scores if score.output == "pseudo_masks"]
    assert score.images == 20


def test_masks_are_computed_from_maps_after_the_random_walk(kept: pipeline.RunResult) -> None:
    """Computing a mask step by step, with the trained affinity network, gives the same mask."""
    stage_outputs = kept.context.stage_outputs
    config = settings(Path("unused")).config
    masks = read_table(stage_outputs["pseudo_masks"] / "masks")
    assert set(masks["cue"].to_pylist()) == {"affinity"}
    (score,) = [score for score in kept.scores if score.output == "pseudo_masks"]
    assert score.background_cue == "affinity"
    labels = read_table(stage_outputs["train_affinity"] / "labels")
    assert labels["image_id"].to_pylist() == masks["image_id"].to_pylist()
    shares = [float((decode_labels(png.as_py()) != 255).mean()) for png in labels["mask"]]
    np.testing.assert_allclose(labels["confident"].to_numpy(), shares, atol=1e-6)
    rows = read_table(stage_outputs["index"] / "index.parquet")
    row = next(row for row in rows.to_pylist() if row["image_id"] == masks["image_id"][0].as_py())
    table = Shards(stage_outputs["localize"] / "maps")
    walk = AffinityWalk(config, stage_outputs["train_affinity"], gpu=False)
    walked, still = tagged_maps(row, table, config, walk=walk), tagged_maps(row, table, config)
    assert walked.scores.shape == still.scores.shape
    assert walked.scores.max() <= 1
    assert not np.allclose(walked.scores, still.scores, atol=0.01), "the walk moves them"
    mask = MASK_RULES["affinity"](walked, dict(config.pseudo_masks)).mask
    np.testing.assert_array_equal(mask, decode_labels(masks["mask"][0].as_py()))


def test_the_affinity_network_is_trained_on_a_frozen_backbone(kept: pipeline.RunResult) -> None:
    config = settings(Path("unused")).config.affinity_net
    fresh = build_affinity_net(config)
    trained = load_trained(build_affinity_net(config), kept.context.stage_outputs["train_affinity"])
    load_pretrained(fresh.backbone, bundled_weights(BUNDLED_BACKBONES[2]))
    for name, value in fresh.backbone.state_dict().items():
        assert torch.equal(trained.backbone.state_dict()[name], value), name
    assert not torch.equal(trained.last.weight, fresh.last.weight)


def test_vectors_for_nearest_images_are_means_of_features(kept: pipeline.RunResult) -> None:
    vectors = read_vectors(kept.context.stage_outputs["localize"] / VECTORS)
    assert vectors.shape == (20, 472)
    assert (np.linalg.norm(vectors, axis=1) <= 1).all()


@pytest.mark.slow
def test_features_that_do_not_fit_the_cache_are_computed_in_training(
    kept: pipeline.RunResult, root: Path, tmp_path: Path
) -> None:
    """8 of 20 images are cached, in a shard; weights and maps are equal up to rounding."""
    views = 2 * 12 + 4 + 20  # 12 training images and their flips, the val images and the sample for channel statistics
    limit = views * features_bytes((472, 4, 4)) / 2**30
    run = pipeline.run(settings(root, f"compute.cache_gb={limit}"), Workspace(tmp_path), "partly", until="localize")

    caches = [Features([], folder, (472, 4, 4)) for folder in run.context.workspace.cache.glob("features-*")]
    assert sorted(int(cache.holds(np.arange(20)).sum()) for cache in caches) == [4, 8, 20]
    expected = weights(kept)
    for name, value in weights(run).items():
        torch.testing.assert_close(value, expected[name], atol=2e-4, rtol=2e-3, msg=name)
    check_maps(kept, run, tolerance=0.01)


def in_new_workspace(kept: pipeline.RunResult, mlflow_store: Path, folder: Path) -> RunContext:
    """The context of a run `lowered` in an empty workspace, which reads the outputs of another run."""
    workspace = Workspace(folder)
    shutil.copy(mlflow_store, workspace.tracking_store)
    output = folder / "output"
    output.mkdir()
    tracker = Tracker(workspace, "lowered", identity="")
    return dataclasses.replace(
        kept.context, workspace=workspace, name="lowered", output=output, tracker=tracker, caches=[]
    )


def test_the_sample_for_statistics_takes_no_space_of_the_training_features(
    kept: pipeline.RunResult, root: Path, mlflow_store: Path, tmp_path: Path
) -> None:
    """After the limit was lowered, 8 training images are cached and the sample does not fit next to them."""
    context = in_new_workspace(kept, mlflow_store, tmp_path)
    high, low = (
        settings(root, f"compute.cache_gb={views * features_bytes((472, 4, 4)) / 2**30}").config
        for views in (2 * 12 + 4 + 20, 30)
    )
    features = training_features(split_rows(context, "train", tagged=True, negatives=True), high, context)
    assert features is not None
    assert int(features.holds(np.arange(20)).sum()) == 8

    train_classifier.run(low, context)

    assert [folder.name for folder in context.workspace.cache.glob("features-*")] == [features.folder.name]
    context.tracker.finish("FINISHED")


def test_the_sample_for_statistics_takes_no_space_of_decoded_training_images(
    kept: pipeline.RunResult, root: Path, mlflow_store: Path, tmp_path: Path
) -> None:
    """24 images of 12 KiB, of training and val, fit the limit, or the 295 KiB of the sample's features."""
    context = in_new_workspace(kept, mlflow_store, tmp_path)
    limit = 320_000 / 2**30
    assert 20 * features_bytes((472, 4, 4)) < 320_000 < 20 * features_bytes((472, 4, 4)) + 20 * image_bytes(64)
    jitter = "classifier.color_jitter=[0.1, 0, 0, 0]"  # features of augmented images cannot be cached

    train_classifier.run(settings(root, jitter, f"compute.cache_gb={limit}").config, context)

    sizes = [len(CachedRows(folder, (64, 64, 3)).spans) for folder in context.workspace.cache.glob("squash64-*")]
    assert sorted(sizes) == [1, 3], "4 val images and 20 training images, in shards of 8"
    assert not list(context.workspace.cache.glob("features-*"))
    context.tracker.finish("FINISHED")


@pytest.mark.slow
def test_without_a_cache_the_same_weights_are_trained(kept: pipeline.RunResult, root: Path, tmp_path: Path) -> None:
    """As on nodes that share no disk. Features differ by the rounding of the cache to float16."""
    run = pipeline.run(settings(root, "compute.cache_gb=0"), Workspace(tmp_path), "none", until="train_classifier")
    assert not list(run.context.workspace.cache.glob("features-*"))
    assert not (run.context.stage_outputs["train_classifier"] / "features").exists()
    expected = weights(kept)
    for name, value in weights(run).items():
        torch.testing.assert_close(value, expected[name], atol=2e-4, rtol=2e-3, msg=name)


def test_features_of_a_backbone_without_weights_are_refused(root: Path) -> None:
    with pytest.raises(Exception, match=r"weights\.classifier_backbone is none"):
        settings(root, "weights.classifier_backbone=none")
