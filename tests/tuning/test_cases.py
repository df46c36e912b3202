"""Cases of the studies: which there are, what makes them, how far they go and what they are compared with."""

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved, resolve
from mcis.tuning.definition import Case, cases_of, configured, trial_values
from mcis.tuning.paper import PAPER_EFFECT, TRAININGS, effect_definition


def effect_cases(resolved: Resolved, trainings: tuple[str, ...], related: tuple[int, ...], until: str) -> list[Case]:
    return cases_of(effect_definition(resolved.config, trainings, related, until)[0], resolved, until)


def test_the_effect_of_the_papers_recipe_has_its_cases_and_their_controls() -> None:
    resolved = resolve("voc", "paper")
    cases = {case.name: case for case in effect_cases(resolved, TRAININGS, (3,), "evaluate")}
    of_co = ["single", "r3", "itself", "wrong-class-r3", "identity-r3", "alone-single", "alone-r3"]
    expected = ["none-single", "none-identity-r3", *(f"{t}-{name}" for t in ("co", "co-contrastive") for name in of_co)]
    assert list(cases) == expected
    localize = {name: configured(resolved, case.values).config.localize for name, case in cases.items()}
    assert {name: how.related for name, how in localize.items()} == {
        name: 0 if "single" in name else 1 if "itself" in name else 3 for name in expected
    }
    itself = {name for name, how in localize.items() if how.related_by == "itself"}
    assert itself == {"co-itself", "co-contrastive-itself"}
    wrong = {name for name, how in localize.items() if how.related_by == "wrong_class"}
    assert wrong == {"co-wrong-class-r3", "co-contrastive-wrong-class-r3"}
    identity = {name for name, how in localize.items() if how.method.affinity == "identity"}
    assert identity == {f"{t}-identity-r3" for t in ("none", "co", "co-contrastive")}
    assert {case.group: configured(resolved, case.values).config.classifier.attention for case in cases.values()} == {
        training: training for training in TRAININGS
    }
    assert cases["co-r3"].inference == "co-attention (target n)"
    assert cases["co-itself"].inference == "co-attention (target n) with itself"
    assert cases["none-identity-r3"].inference == "co-attention (W_P = I)"
    assert cases["co-single"].inference == "single round"
    assert {name: case.paper for name, case in cases.items() if case.paper} == PAPER_EFFECT
    whole = {name for name, case in cases.items() if case.until == "evaluate"}
    assert whole == {*PAPER_EFFECT, "none-identity-r3"}
    assert {case.until for case in effect_cases(resolved, TRAININGS, (3,), "localize")} == {"localize"}


def test_a_trial_keeps_what_the_user_changed_of_the_method() -> None:
    other = resolve("voc", "paper", assignments=["localize.method.target=m"])
    (case,) = (case for case in effect_cases(other, ("co",), (3,), "evaluate") if case.name == "co-r3")
    assert trial_values(other, case.values)["localize.method.target"] == "m"


def test_an_affinity_that_needs_no_training_has_related_images_with_every_training_and_the_nearest_too() -> None:
    resolved = resolve("tags", "photos")
    cases = {case.name: case for case in effect_cases(resolved, ("none", "co"), (3, 24), "evaluate")}
    of_each = ["single", "r3", "r24", "nearest-r3", "nearest-r24", "itself", "wrong-class-r24"]
    alone = ["co-alone-single", "co-alone-nearest-r24"]
    assert list(cases) == [*(f"{training}-{name}" for training in ("none", "co") for name in of_each), *alone]
    attended = {name: configured(resolved, case.values).config.classifier.attended for name, case in cases.items()}
    assert {name for name, to in attended.items() if to == "itself"} == set(alone)
    assert cases["co-alone-single"].inference == "single round, trained alone"
    related_by = {name: configured(resolved, case.values).config.localize.related_by for name, case in cases.items()}
    assert {name for name, by in related_by.items() if by == "nearest"} == {n for n in cases if "nearest" in n}
    assert related_by["none-r24"] == "class"
    _, contrasts = effect_definition(resolved.config, ("none", "co"), (3, 24), "evaluate")
    pairs = {(of.case, of.control) for of in contrasts}
    assert pairs >= {
        ("none-nearest-r24", "none-single"), ("none-nearest-r24", "none-r24"), ("none-r24", "none-itself"),
        ("co-nearest-r24", "co-alone-nearest-r24"), ("co-single", "co-alone-single"),
        ("co-nearest-r24", "none-nearest-r24"),
    }  # fmt: skip
    assert cases["none-nearest-r24"].until == "evaluate"


@pytest.mark.parametrize("recipe", ["paper", "small", "photos"])
@pytest.mark.parametrize("trainings", [TRAININGS, ("none",), ("co", "none")])
def test_differences_are_between_cases_that_there_are(recipe: str, trainings: tuple[str, ...]) -> None:
    definition, contrasts = effect_definition(resolve("voc", recipe).config, trainings, (1, 3), "evaluate")
    names = {case.name for case in definition.cases}
    pairs = [(of.case, of.control) for of in contrasts]
    assert {name for pair in pairs for name in pair} <= names
    assert len(set(pairs)) == len(pairs)
    if recipe != "photos":
        assert ("none-identity-r3", "none-single") in pairs
        assert (("co-r3", "none-identity-r3") in pairs) == ("co" in trainings)
    if trainings == TRAININGS:
        # Every case with the most related images is a side of some difference.
        assert {name for name in names if not name.endswith("r1")} == {name for pair in pairs for name in pair}


def test_contradictions_with_a_case_are_refused() -> None:
    resolved = resolve("voc", "paper", assignments=["localize.method.contrastive=true"])
    with pytest.raises(UserError, match=r"contrastive is set but classifier\.attention is co"):
        effect_cases(resolved, ("co",), (3,), "evaluate")
