"""Networks as configured: their backbone's name, stride, and how much of it is trained."""

import pytest
import torch

from mcis.datasets.errors import UserError
from mcis.models.backbones import IMAGENET
from mcis.models.registry import backbone_normalization
from mcis.platform.config.training import ClassifierConfig, SegmenterConfig
from mcis.platform.networks.build import build_backbone, build_classifier, build_segmenter, freeze

LITE0 = "timm/tf_efficientnet_lite0"


@pytest.mark.parametrize(
    ("backbone", "stride", "built"),
    [("small", None, 8), ("small", 4, 4), ("vgg16", None, 8), ("vgg16", 8, 8), (LITE0, None, 16), (LITE0, 8, 8)],
)
def test_a_backbone_has_the_stride_that_is_configured_or_its_own(backbone: str, stride: int | None, built: int) -> None:
    with torch.device("meta"):
        actual = build_backbone(ClassifierConfig(backbone=backbone, stride=stride))
    assert actual.layout.stride == built


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((SegmenterConfig(backbone=name, stride=5), "stride") for name in ("small", "resnet50", "timm/resnet18")),
        (SegmenterConfig(backbone="timm/vit_tiny_patch16_224", network="pyramid"), "network"),
        (SegmenterConfig(backbone=LITE0, trainable_stages=6), "trainable_stages"),
    ],
    ids=str,
)
def test_what_a_backbone_does_not_have_names_its_key(config: SegmenterConfig, key: str) -> None:
    found = {"stride": "with stride 5", "network": "pyramid", "trainable_stages": "has 5"}[key]
    with torch.device("meta"), pytest.raises(UserError, match=found) as raised:
        freeze(build_segmenter(config, 3), config)
    assert f"segmenter.{key}" in raised.value.remedy


@pytest.mark.parametrize("name", ["vgg16", LITE0])
def test_a_normalization_is_known_without_building(name: str) -> None:
    with torch.device("meta"):
        assert backbone_normalization(name) == build_backbone(ClassifierConfig(backbone=name)).normalize
    assert (backbone_normalization(name) == IMAGENET) == (name == "vgg16")


@pytest.mark.parametrize(("trainable_stages", "stages"), [("all", 5), (0, 0), (2, 2)])
def test_as_much_is_trained_as_configured(trainable_stages: str | int, stages: int) -> None:
    config = ClassifierConfig.model_validate({"backbone": LITE0, "trainable_stages": trainable_stages})
    with torch.device("meta"):
        model = build_classifier(config, 3)
    freeze(model, config)
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {"phi.weight", "w_p"} <= set(trained_names)
    begun = [any(n.startswith(f"backbone.body.{stage}") for n in trained_names) for stage in model.backbone.stages]
    assert begun == [False] * (5 - stages) + [True] * stages
