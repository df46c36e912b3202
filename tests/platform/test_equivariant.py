"""Equivariant attention: loss terms, refined maps, stage keys and unsupported backbones."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares, read_rgb
from mcis.datasets.sampling.batches import PairBatch
from mcis.datasets.tags import Tags
from mcis.models.backbones import IMAGENET, to_float_images
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.grids import pixel_grids
from mcis.models.localization import embed
from mcis.models.losses import sigmoid_ce
from mcis.models.resampling import resample
from mcis.models.seam import EquivariantMaps, RefinedMaps, cross_equivariant_loss, equivariant_loss, smaller_copies
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.weights_files import WEIGHTS, save_weights
from mcis.platform.stages.localization.workers import Embed, embed_rows

K = 4
TAGS = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]], bool)
ON = ("classifier.equivariant.weight=2", "classifier.equivariant.scale=0.5", "maps.scale=range", "localize.related=0")


def config(*overrides: str) -> Config:
    small = ["classifier.channels=6", "segmenter.channels=6", "classifier.input_size=32"]
    small += ["classifier.hflip=false", "classifier.shift=0"]
    return resolve("voc", "scratch", overrides=[*small, *ON, *overrides]).config


def learner(section: ClassifierConfig) -> ClassifierLearner:
    tags = Tags.from_matrix(TAGS)
    images = Squares([f"{n}.png" for n in range(3)], 32)
    return ClassifierLearner(config=section, seed=0, tags=tags, is_source=None, images=images, pretrained=None)


def pairs() -> PairBatch:
    """Two pairs, (0, 1) and (2, 1)."""
    rng = np.random.default_rng(0)
    images_m, images_n = rng.integers(0, 256, (2, 2, 32, 32, 3), np.uint8)
    return PairBatch(
        images_m=images_m,
        images_n=images_n,
        m=np.array([0, 2]),
        n=np.array([1, 1]),
        epoch=np.zeros(2, np.int64),
        pair_domains=np.zeros(2, np.uint8),
        row=np.arange(2),
        unshared_m=np.ones(2, bool),
        unshared_n=np.ones(2, bool),
    )


def terms(section: ClassifierConfig, model: CoAttentionClassifier, batch: PairBatch) -> dict[str, Tensor]:
    return learner(section).loss_sums(model, batch, 0, torch.device("cpu"))


def maps_at(model: CoAttentionClassifier, image: Tensor, tags: list[int], at: Tensor) -> RefinedMaps:
    """Plain and refined maps of one image's tags, (1, T, H, W), at the pixels of another image."""
    with model.backbone.capture_outputs(*model.backbone.correlation_layers) as layer_outputs:
        own = model.activations(model.features(image))[:, tags]
    grids = model.backbone.grids(image, own)
    refined = model.correlation(own, resample(image, pixel_grids(*image.shape[2:]), grids), *layer_outputs)
    return RefinedMaps(*(resample(maps, grids, pixel_grids(*at.shape[2:])) for maps in (own, refined)))


def test_loss_terms_are_sums_over_single_images() -> None:
    section = config().classifier
    batch = pairs()
    model = learner(section).model()
    found = terms(section, model, batch)
    expected = {"basic": 0.0, "equivariant": 0.0, "cross": 0.0}
    for images, rows in ((batch.images_m, batch.m), (batch.images_n, batch.n)):
        for pixels, row in zip(images, rows, strict=True):
            image = IMAGENET(to_float_images(torch.from_numpy(pixels[None])))
            copy = smaller_copies(image, 0.5)
            targets = torch.from_numpy(TAGS[row][None]).float()
            assert copy.shape == (1, 3, 16, 16)
            for view in (image, copy):
                scores = model.activations(model.features(view)).mean(dim=(2, 3))
                expected["basic"] += sigmoid_ce(scores, targets).item() / 2
            tagged = np.flatnonzero(TAGS[row]).tolist()
            maps = EquivariantMaps(maps_at(model, image, tagged, copy), maps_at(model, copy, tagged, copy))
            expected["equivariant"] += 2 * equivariant_loss(maps, classes=K).item()
            expected["cross"] += 2 * cross_equivariant_loss(maps, classes=K, hard=0.2).item()
    assert {name: found[name].item() for name in expected} == pytest.approx(expected, rel=1e-4)

    without = terms(config("classifier.equivariant.weight=0").classifier, model, batch)
    assert set(found) - set(without) == {"equivariant", "cross"}
    assert found["co_attention"].item() == pytest.approx(without["co_attention"].item(), rel=1e-4)

    halved = terms(config("classifier.equivariant.weight=1").classifier, model, batch)
    assert halved["cross"].item() == pytest.approx(found["cross"].item() / 2, rel=1e-4)


def test_every_parameter_has_a_gradient_and_losses_of_parts_of_a_batch_add_up() -> None:
    section = config().classifier
    batch = pairs()
    model = learner(section).model()
    whole = terms(section, model, batch)
    torch.stack(list(whole.values())).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    parts = [terms(section, model, batch.rows(first, first + 1)) for first in (0, 1)]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-4)


def test_maps_are_refined_image_by_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    uris = [str(tmp_path / f"{n}.png") for n in range(3)]
    for uri in uris:
        Image.fromarray(rng.integers(0, 256, (40, 56, 3), np.uint8)).save(uri)
    settings = config("localize.hflip=true", "localize.extra_scales=[0.5]", "localize.batch=2")
    torch.manual_seed(0)
    model = build_classifier(settings.classifier, K).eval()
    save_weights(model, tmp_path / WEIGHTS, {})
    tags = [np.flatnonzero(row).tolist() for row in TAGS]
    hashes = [hashlib.sha256(Path(uri).read_bytes()).hexdigest() for uri in uris]
    columns = {"image_id": list("abc"), "uri": uris, "content_hash": hashes}
    rows = pa.table({**columns, "domain": ["target"] * 3, "tags": tags})
    to_embed = embed_rows(rows)
    table = Embed(settings, tmp_path, K, None, tmp_path)(to_embed)
    assert table["class"].to_pylist() == [tag for row in tags for tag in row]
    maps = iter(table["map"].to_pylist())
    with torch.inference_mode():
        for uri, row in zip(uris, tags, strict=True):
            image = IMAGENET(to_float_images(torch.from_numpy(read_rgb(uri, 32)[None])))
            with model.backbone.capture_outputs(*model.backbone.correlation_layers) as middle:
                embedding = embed(model.backbone, model.standardize, image, extra_scales=[0.5], hflip=True)
            refined = model.refined(image, model.activations(embedding)[:, row], middle)[0, 1:]
            for expected in refined:
                assert 0 <= expected.min() < expected.max() <= 1
                np.testing.assert_allclose(next(maps), expected.flatten(), atol=1e-3)


def test_maps_without_pixel_correlation_are_the_activations(tmp_path: Path) -> None:
    """S_n of section 4.4: the same maps as those of a classifier without equivariant attention."""
    rng = np.random.default_rng(0)
    uri = str(tmp_path / "a.png")
    Image.fromarray(rng.integers(0, 256, (40, 56, 3), np.uint8)).save(uri)
    settings = config("localize.pixel_correlation=false", "localize.batch=1")
    torch.manual_seed(0)
    model = build_classifier(settings.classifier, K).eval()
    save_weights(model, tmp_path / WEIGHTS, {})
    columns = {"image_id": ["a"], "uri": [uri], "content_hash": [hashlib.sha256(Path(uri).read_bytes()).hexdigest()]}
    rows = pa.table({**columns, "domain": ["target"], "tags": [[0, 2]]})
    table = Embed(settings, tmp_path, K, None, tmp_path)(embed_rows(rows))

    image = IMAGENET(to_float_images(torch.from_numpy(read_rgb(uri, 32)[None])))
    localize = settings.localize
    with torch.inference_mode():
        embedding = embed(
            model.backbone, model.standardize, image, extra_scales=localize.extra_scales, hflip=localize.hflip
        )
        activations = model.activations(embedding)[0, [0, 2]]
    np.testing.assert_allclose(np.array(table["map"].to_pylist()), activations.flatten(1).numpy(), atol=1e-2)


def test_the_section_is_left_out_of_keys_of_runs_without_equivariant_attention() -> None:
    """Stage keys are computed from the dumped sections."""
    for recipe in RECIPES:
        section = resolve("voc", recipe).config.classifier
        assert ("equivariant" in section.model_dump(mode="json")) == (recipe == "lid")
    hard = config("classifier.equivariant.hard=0.3").classifier.model_dump(mode="json")
    assert hard["equivariant"] == {"weight": 2.0, "from_epoch": 0, "scale": 0.5, "hard": 0.3}


@pytest.mark.parametrize("backbone", ["timm/vit_tiny_patch16_224", "timm/resnet18"])
def test_a_backbone_without_layers_to_compare_names_the_keys(backbone: str) -> None:
    section = ClassifierConfig.model_validate({"backbone": backbone, "equivariant": {"weight": 1}})
    with torch.device("meta"), pytest.raises(UserError, match="equivariant attention with a backbone") as raised:
        build_classifier(section, 3)
    assert "classifier.backbone" in raised.value.remedy
    assert "classifier.equivariant.weight" in raised.value.remedy


@pytest.mark.parametrize("backbone", ["small", "vgg16", "resnet50", "resnet38"])
def test_compared_layers_have_the_positions_of_the_features(backbone: str) -> None:
    section = ClassifierConfig.model_validate({"backbone": backbone, "equivariant": {"weight": 1}})
    with torch.device("meta"):
        model = build_classifier(section, 3).eval()
        images = torch.zeros(1, 3, 64, 96)
        with model.backbone.capture_outputs(*model.backbone.correlation_layers) as middle:
            features = model.backbone(images)
    assert {output.shape[2:] for output in (features, *middle)} == {(8, 12)}
    assert [output.shape[1] for output in middle] == [layer.channels for layer in model.backbone.correlation_layers]
    assert {layer.layout for layer in model.backbone.correlation_layers} == {model.backbone.layout}
