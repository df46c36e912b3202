"""The configuration: every key has a description; invalid values and contradictions are refused."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from mcis.datasets.section import Section
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig, LossesConfig, Optimizer


def sections(root: type[BaseModel] = Config) -> list[type[BaseModel]]:
    """The class of a section and those of all sections below it."""
    found: list[type[BaseModel]] = [root]
    for field in root.model_fields.values():
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found += sections(candidate)
    return found


SECTIONS = list(dict.fromkeys(sections()))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_description(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize("section", SECTIONS)
def test_a_subsection_has_the_defaults_of_its_class(section: type[BaseModel]) -> None:
    """Otherwise, setting one of its values would change all others to the defaults of the class."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            assert field.default == type(field.default)(), name
            assert not field.default.model_fields_set, name


def test_all_sections_have_the_common_base_class() -> None:
    assert len(sections()) > 10
    assert all(issubclass(section, Section) for section in sections())


def test_sections_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Optimizer.model_validate({"momemtum": 0.9})


@pytest.mark.parametrize("value", ["nan", "inf", float("nan"), float("inf")])
def test_sections_refuse_numbers_that_are_not_finite(value: str | float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Optimizer.model_validate({"weight_decay": value})


IMPOSSIBLE: list[tuple[str, str, Any]] = [
    ("classifier", "backbone", "vgg"),
    ("classifier", "color_jitter", [0.3, 0.3, 0.3, 0.6]),
    ("localize", "related_by", "random"),
    ("localize", "feature_type", "uint8"),
    ("segmenter", "scales", [1.0, 0]),
    ("pseudo_masks", "rule", "none"),
    ("classifier", "optimizer", {"precision": "fp16"}),
]


@pytest.mark.parametrize(("section", "key", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({section: {key: value}})
    assert {error["loc"][:2] for error in caught.value.errors()} == {(section, key)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"classifier": {"attention": "none"}}, "localize.related is 3 but classifier.attention is none"),
        (
            {"localize": {"method": {"contrastive": True, "name": "released"}, "related": 0}},
            "localize.method.contrastive is set but localize.related is 0",
        ),
        ({"data": {"web": {"root": "/crawled"}}}, "sources is voc, without web, but /crawled is given for web"),
        (
            {"classifier": {"attention": "co"}, "localize": {"method": {"name": "co_attention", "contrastive": True}}},
            "contrastive is set but .* is co,",
        ),
        (
            {"localize": {"method": {"name": "co_attention", "contrastive": True}, "related_by": "itself"}},
            "localize.method.contrastive is set but localize.related_by is itself",
        ),
        (
            {"localize": {"hops": 2, "method": {"name": "released"}}},
            "localize.hops is 2 but localize.method.name is released",
        ),
        (
            {"localize": {"hops": 3, "method": {"contrastive": True}}},
            "localize.hops is 3 but localize.method.contrastive is set",
        ),
        (
            {"maps": {"scale": "logarithm"}, "localize": {"method": {"name": "released"}}},
            "maps.scale is logarithm but localize.method.name is released",
        ),
        ({"classifier": {"epochs": 5, "stop_epoch": 5}}, "stop_epoch 5 is not before classifier.epochs 5"),
        ({"segmenter": {"init": "classifier"}}, "backbone resnet101 .* is not the classifier's vgg16"),
        ({"compute": {"workers": 2, "min_workers": 3}}, "min_workers 3 is more than compute.workers 2"),
        ({"compute": {"workers": 2, "gpu_share": 0.5}}, "gpu_share is 0.5 for compute.workers 2"),
        ({"compute": {"workers": 6}}, "classifier.batch is 5 for compute.workers 6"),
        ({"compute": {"workers": 11}, "classifier": {"batch": 12}}, "segmenter.batch is 10 for compute.workers 11"),
        ({"pseudo_masks": {"threshold": 0.2, "background_threshold": 0.3}}, "0.3 is above threshold 0.2"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(values)


def test_contradictions_between_sections_are_reported_together() -> None:
    values = {"classifier": {"attention": "none", "stop_epoch": 20}, "compute": {"workers": 11}}
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(values)
    for message in ("localize.related", "stop_epoch 20", "classifier.batch is 5", "segmenter.batch is 10"):
        assert message in str(caught.value)


def test_a_segmenter_starts_from_a_classifier_of_the_same_shape() -> None:
    small = {"backbone": "small", "channels": 24}
    Config.model_validate({"classifier": small, "segmenter": {**small, "init": "classifier"}})
    with pytest.raises(ValidationError, match=r"small \(48 channels\) is not the classifier's small \(24 channels\)"):
        Config.model_validate({"classifier": small, "segmenter": {**small, "channels": 48, "init": "classifier"}})


def test_the_number_of_channels_is_ignored_for_backbones_without_that_setting() -> None:
    resnet = {"backbone": "resnet50"}
    Config.model_validate({"classifier": {**resnet, "channels": 24}, "segmenter": {**resnet, "init": "classifier"}})


def test_a_segmenter_cannot_start_from_a_classifier_with_another_backbone() -> None:
    with pytest.raises(ValidationError, match=r"backbone vgg16_largefov .* is not the classifier's vgg16"):
        Config.model_validate({"segmenter": {"backbone": "vgg16_largefov", "init": "classifier"}})


def test_values_at_the_limits_are_valid() -> None:
    Config.model_validate({"classifier": {"attention": "none"}, "localize": {"related": 0}})
    Config.model_validate({"classifier": {"attention": "none"}, "localize": {"method": {"w_p": "identity"}}})
    Config.model_validate({"classifier": {"epochs": 5, "stop_epoch": 4}})
    Config.model_validate({"maps": {"scale": "range"}, "localize": {"method": {"name": "released"}}})
    Config.model_validate({"localize": {"hops": 2, "related": 0, "method": {"name": "released"}}})
    Config.model_validate({"compute": {"workers": 5, "min_workers": 1}})
    PseudoMasksConfig(threshold=0.2, background_threshold=0.2)


def test_few_images_scale_all_numbers_of_epochs_to_reach_min_steps() -> None:
    """All settings that count epochs are multiplied by one factor, so the schedule over the steps is the same."""
    plain = ClassifierConfig(
        batch=16,
        epochs=8,
        min_steps=800,
        attention_epochs=2,
        losses=LossesConfig.model_validate({"contrastive": {"from_epoch": 1}}),
        stop_epoch=6,
        optimizer=Optimizer(step_epochs=(3, 6)),
    )
    assert plain.scaled_for(1600) is plain
    few = plain.scaled_for(400)
    assert (few.epochs, few.attention_epochs, few.val_every) == (32, 8, 4)
    assert few.loss_values["contrastive"].from_epoch == 4
    assert (few.trained_epochs, few.attention_start_epoch) == (
        4 * plain.trained_epochs,
        4 * plain.attention_start_epoch,
    )
    assert few.optimizer.step_epochs == (12, 24)
    assert few.epochs * 400 / few.batch >= plain.min_steps
    assert plain.model_copy(update={"epoch_pairs": 1600}).scaled_for(400).epochs == 8
    assert ClassifierConfig(epochs=8).scaled_for(3).epochs == 8


def test_a_large_training_set_has_shorter_epochs() -> None:
    section = ClassifierConfig(epochs=8, batch=16, min_steps=800, max_steps=1600)
    assert section.scaled_for(3200) is section
    assert section.scaled_for(50_000) == section.model_copy(update={"epoch_pairs": 3200})
    assert section.model_copy(update={"epoch_pairs": 1000}).scaled_for(50_000).epoch_pairs == 1000
    assert section.scaled_for(400).epochs == 32


def test_epochs_added_for_min_steps_do_not_exceed_max_steps() -> None:
    """600 steps are too few, and twice as many too many."""
    section = ClassifierConfig(epochs=8, batch=16, min_steps=800, max_steps=1000).scaled_for(1200)
    assert (section.epochs, section.epoch_pairs) == (16, 1000)
    assert section.epochs * 1000 / section.batch == 1000
