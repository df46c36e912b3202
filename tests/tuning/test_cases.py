"""Cases of the studies: which there are, what makes them, how far they go and what they are compared with."""

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved, resolve
from mcis.tuning.definition import Case, cases_of, configured, read_definition, trial_values


def effect_cases(resolved: Resolved, until: str = "evaluate") -> dict[str, Case]:
    return {case.name: case for case in cases_of(read_definition("effect"), resolved, until)}


def test_the_effect_of_the_papers_recipe_has_its_cases_and_their_controls() -> None:
    resolved = resolve("voc", "paper")
    cases = effect_cases(resolved)
    configs = {name: configured(resolved, case.values).config for name, case in cases.items()}
    of_both = ["single", "related", "alone-single", "alone-related", "wrong-single"]
    controls = ["identity", "itself", "wrong-class"]
    assert set(cases) == {
        "none-single",
        "none-related",
        "none-itself",
        "none-wrong-class",
        *(f"co-{name}" for name in of_both),
        *(f"co-contrastive-{name}" for name in of_both + controls),
    }
    for name, config in configs.items():
        training = "none" if name[:4] == "none" else "co+contrastive" if "contrastive" in name else "co"
        assert (config.classifier.attention, cases[name].group) == (training, training)
        assert config.localize.related == (0 if "single" in name else 3)
        by = "itself" if name.endswith("itself") else "wrong_class" if name.endswith("wrong-class") else "class"
        assert config.localize.related_by == by
        if "single" not in name:
            assert (config.localize.method.w_p == "identity") == ("identity" in name or training == "none")
        to = "itself" if "-alone-" in name else "wrong_class" if "-wrong-single" in name else "partner"
        assert config.classifier.attention_partner == to
    assert cases["co-related"].inference == "co-attention (target n)"
    assert cases["co-contrastive-itself"].inference == "co-attention (target n) with itself"
    assert cases["none-related"].inference == "co-attention (W_P = I)"
    assert cases["co-single"].inference == "single round"
    assert cases["co-alone-single"].inference == "single round, trained alone"
    assert cases["co-wrong-single"].inference == "single round, trained with partners of wrong classes"
    papers = {"none-single": 61.7, "co-related": 65.5, "co-contrastive-single": 64.7, "co-contrastive-related": 66.2}
    assert {name: case.paper for name, case in cases.items() if case.paper} == papers
    assert {n for n, case in cases.items() if case.until == "evaluate"} == {*papers, "none-related", "co-single"}
    assert {case.until for case in effect_cases(resolved, "localize").values()} == {"localize"}


def test_a_trial_keeps_what_the_user_changed_of_the_method() -> None:
    other = resolve("voc", "paper", overrides=["localize.method.target=m", "localize.related=5"])
    case = effect_cases(other)["co-related"]
    assert trial_values(other, case.values)["localize.method.target"] == "m"
    assert case.related == 5


def test_related_images_are_those_of_the_recipe() -> None:
    resolved = resolve("tags", "photos")
    how = {name: configured(resolved, case.values).config.localize for name, case in effect_cases(resolved).items()}
    assert {(of.related, of.related_by) for of in how.values()} == {
        (0, "nearest"),
        (24, "nearest"),
        (24, "itself"),
        (24, "wrong_class"),
    }


def test_contradictions_with_a_case_are_refused() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.contrastive=true"])
    with pytest.raises(UserError, match=r"contrastive is set but classifier\.attention is none"):
        effect_cases(resolved)
