"""Definitions of studies: the library, files of users, and the study of the image sources."""

from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import resolve
from mcis.tuning.definition import cases_of, configured, library, read_definition, trial_values
from mcis.tuning.paper import sources_definition


def test_the_library_has_these_studies() -> None:
    assert library() == ["domains", "effect", "hops", "inference", "lid", "references", "segmenter"]


@pytest.mark.parametrize(
    ("study", "sources", "recipe"),
    [
        ("inference", "voc", "paper"),
        ("inference", "voc", "scratch"),
        ("inference", "voc", "photos"),
        ("references", "voc", "paper"),
        ("references", "voc", "scratch"),
        ("references", "voc", "photos"),
        ("effect", "voc", "paper"),
        ("effect", "voc", "scratch"),
        ("effect", "voc", "photos"),
        ("segmenter", "voc", "paper"),
        ("segmenter", "voc", "photos"),
        ("lid", "lid", "lid"),
    ],
)
def test_studies_of_the_library_have_different_cases_with_each_recipe(study: str, sources: str, recipe: str) -> None:
    overrides = ["localize.related=3"] if recipe == "scratch" else []  # the recipe itself has no related images
    definition = read_definition(study)
    cases = cases_of(definition, resolve(sources, recipe, overrides=overrides), "evaluate")
    names = [case.name for case in cases]
    assert len(cases) == len(definition.cases) == len({str(case.values) for case in cases})
    assert all(case.against in names for case in cases if case.against)


LOCATIONS = {"data.voc": "/voc", "data.single.root": "/single", "data.web.root": "/web"}


def test_the_study_of_sources_adds_each_source_to_the_first_and_then_all() -> None:
    resolved = resolve("voc+single+web", "paper", LOCATIONS)
    cases = cases_of(sources_definition("voc+single+web", "resnet101"), resolved, "evaluate")
    assert [(case.name, case.paper) for case in cases] == [
        ("voc", 66.2),
        ("voc-single", 67.1),
        ("voc-web", 67.7),
        ("voc-single-web", None),
    ]
    configs = [configured(resolved, case.values, case.sources).config for case in cases]
    assert [config.classifier.num_domain_affinities for config in configs] == [1, 3, 1, 3]


def test_the_study_of_sources_has_the_papers_results_for_vgg_16() -> None:
    (case,) = cases_of(sources_definition("voc", "vgg16_largefov"), resolve("voc", "paper"), "evaluate")
    assert case.paper == 63.5


def test_a_trial_has_only_the_locations_of_its_sources() -> None:
    resolved = resolve("voc+single+web", "paper", LOCATIONS)
    assert trial_values(resolved, {}, "voc") == {"data.voc": "/voc"}
    assert trial_values(resolved, {}, "voc+web") == {"data.voc": "/voc", "data.web.root": "/web"}


def test_axes_of_a_file_are_cases_of_all_combinations(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('about = "mine"\naxes = { "localize.related" = [0, 3], "maps.scale" = ["range", "maximum"] }\n')
    cases = cases_of(read_definition(str(path)), resolve("voc", "scratch"), "localize")
    assert [case.name for case in cases] == [
        "related-0-scale-range",
        "related-0-scale-maximum",
        "related-3-scale-range",
        "related-3-scale-maximum",
    ]
    assert [case.related for case in cases] == [0, 0, 3, 3]
    assert {case.until for case in cases} == {"localize"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('about = "x"\n', "has no case"),
        ("about = 3\n", "about: Input should be a valid string"),
        ('about = "x"\n[[case]]\nname = "../a"\n', "case.0.name"),
        ('about = "x"\n[[case]]\nname = "a"\nsett = {}\n', "case.0.sett"),
        ('about = "x"\n[[case]]\nname = "a"\n[[case]]\nname = "a"\n', "two cases a"),
        ('about = "x"\n[[case]]\nname = "a"\nagainst = "b"\n', "no case b"),
        ("about = \n", "is not valid TOML"),
        ('about = "x"\naxes = { "_x" = [1] }\n', "does not define a study"),
        ('about = "x"\naxes = { "seed" = [0, 1] }\n', "sets seed"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { recipe = "scratch" }\n', "sets recipe"),
        ('about = "x"\n[[case]]\nname = "a"\nuntil = "pseudo_mask"\n', "until = pseudo_mask"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { "localize.relatd" = 3 }\n', "did you mean localize.related"),
        ('about = "x"\n[[case]]\nname = "a"\nsources = "voc+web"\n', "voc\\+web, the study voc"),
    ],
)
def test_a_file_that_defines_no_study_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=found):
        cases_of(read_definition(str(path)), resolve("voc", "scratch"), "evaluate")


def test_an_unknown_study_is_refused_with_the_names_of_the_library() -> None:
    with pytest.raises(UserError, match="study infer") as caught:
        read_definition("infer")
    assert "inference, lid, references" in caught.value.expected


def test_references_has_the_papers_numbers_of_related_images() -> None:
    cases = cases_of(read_definition("references"), resolve("voc", "paper"), "evaluate")
    assert [(case.name, case.related, case.paper) for case in cases] == [
        ("r0", 0, 64.7),
        ("r1", 1, 65.9),
        ("r2", 2, 66.0),
        ("r3", 3, 66.2),
        ("r4", 4, 66.1),
        ("r5", 5, 66.0),
    ]


def test_a_case_without_related_images_has_no_contrastive_features() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.contrastive=true"])
    for case in cases_of(read_definition("references"), resolved, "evaluate"):
        config = configured(resolved, case.values).config
        assert config.localize.method.contrastive == (config.localize.related > 0)
