"""Cases of the study `effect`: their configurations, last stages and the cases that they are compared with."""

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.tuning.definition import StudyCase, cases_of, configured, read_definition, trial_values


def effect_cases(resolved: Resolved, until: str = "evaluate") -> dict[str, StudyCase]:
    return {case.name: case for case in cases_of(read_definition("effect"), resolved, until)}


@pytest.fixture
def resolved() -> Resolved:
    return resolve("voc", "paper")


@pytest.fixture
def cases(resolved: Resolved) -> dict[str, StudyCase]:
    return effect_cases(resolved)


@pytest.fixture
def configs(resolved: Resolved, cases: dict[str, StudyCase]) -> dict[str, Config]:
    return {name: configured(resolved, case.values).config for name, case in cases.items()}


def test_each_training_has_cases_and_controls(cases: dict[str, StudyCase]) -> None:
    of_trainings_with_attention = ["single", "related", "itself-single", "itself-related", "wrong-class-single"]
    of_contrastive_training = [*of_trainings_with_attention, "identity", "itself", "wrong-class"]
    expected = ["none-single", "none-related", "none-itself", "none-wrong-class"]
    expected += [f"co-{name}" for name in of_trainings_with_attention]
    expected += [f"co-contrastive-{name}" for name in of_contrastive_training]
    assert sorted(cases) == sorted(expected)


def test_names_of_cases_say_how_they_are_trained(cases: dict[str, StudyCase], configs: dict[str, Config]) -> None:
    for name, config in configs.items():
        attention = "co"
        if name.startswith("none"):
            attention = "none"
        elif "contrastive" in name:
            attention = "co+contrastive"
        assert config.classifier.attention == attention
        assert cases[name].group == attention

        partner = "partner"
        if "-itself-" in name:
            partner = "itself"
        elif "-wrong-class-" in name:
            partner = "wrong_class"
        assert config.classifier.attention_partner == partner


def test_names_of_cases_say_how_maps_are_inferred(configs: dict[str, Config]) -> None:
    for name, config in configs.items():
        related_by = "class"
        if name.endswith("itself"):
            related_by = "itself"
        elif name.endswith("wrong-class"):
            related_by = "wrong_class"
        assert config.localize.related_by == related_by

        is_single_round = "single" in name
        assert config.localize.related == (0 if is_single_round else 3)
        if not is_single_round:
            has_identity = "identity" in name or name.startswith("none")
            assert (config.localize.method.w_p == "identity") == has_identity


def test_cases_describe_how_maps_are_inferred(cases: dict[str, StudyCase]) -> None:
    expected = {
        "co-related": "co-attention (target n)",
        "co-contrastive-itself": "co-attention (target n) with itself",
        "none-related": "co-attention (W_P = I)",
        "co-single": "single round",
        "co-itself-single": "single round, trained with itself as the partner",
        "co-wrong-class-single": "single round, trained with partners of wrong classes",
    }
    assert {name: cases[name].inference for name in expected} == expected


def test_controls_end_before_the_segmentation_network(cases: dict[str, StudyCase]) -> None:
    whole = {name for name, case in cases.items() if case.until == "evaluate"}
    assert whole == {
        "none-single",
        "none-related",
        "co-single",
        "co-related",
        "co-contrastive-single",
        "co-contrastive-related",
    }


def test_no_case_goes_beyond_the_last_stage_of_the_study(resolved: Resolved) -> None:
    assert {case.until for case in effect_cases(resolved, "localize").values()} == {"localize"}


def test_a_trial_keeps_the_users_changes_of_the_method() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.target=m", "localize.related=5"])
    case = effect_cases(resolved)["co-related"]
    assert trial_values(resolved, case.values)["localize.method.target"] == "m"
    assert case.related == 5


def test_related_images_are_those_of_the_recipe() -> None:
    resolved = resolve("tags", "photos")
    sections = [configured(resolved, case.values).config.localize for case in effect_cases(resolved).values()]
    assert {(section.related, section.related_by) for section in sections} == {
        (0, "nearest"),
        (24, "nearest"),
        (24, "itself"),
        (24, "wrong_class"),
    }


def test_values_that_contradict_a_case_are_refused() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.contrastive=true"])
    with pytest.raises(UserError, match=r"contrastive is set but classifier\.attention is none"):
        effect_cases(resolved)
