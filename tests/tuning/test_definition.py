"""Studies as files: the library's, files of a user's own, and the data settings."""

from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import resolve
from mcis.tuning.definition import cases_of, configured, library, read_definition, trial_values
from mcis.tuning.paper import sources_definition


def test_the_library_goes_with_its_recipes() -> None:
    assert library() == ["domains", "effect", "hops", "inference", "lid", "references", "segmenter"]
    of_photos = ("paper", "scratch", "photos")
    for study, sources, recipes in (
        ("inference", "voc", of_photos),
        ("references", "voc", of_photos),
        ("effect", "voc", of_photos),
        ("segmenter", "voc", ("paper", "photos")),
        ("lid", "lid", ("lid",)),
    ):
        definition = read_definition(study)
        for recipe in recipes:
            related = ["localize.related=3"] if recipe == "scratch" else []  # which has single rounds
            cases = cases_of(definition, resolve(sources, recipe, overrides=related), "evaluate")
            names = [case.name for case in cases]
            assert len(cases) == len(definition.cases) == len({str(case.values) for case in cases})
            assert all(case.against in names for case in cases if case.against)


def test_settings_are_the_first_source_alone_and_with_each_other(tmp_path: Path) -> None:
    places = {"data.voc": "/voc", "data.single.root": "/single", "data.web.root": "/web"}
    resolved = resolve("voc+single+web", "paper", places)
    cases = cases_of(sources_definition("voc+single+web", "resnet101"), resolved, "evaluate")
    assert [(case.name, case.paper) for case in cases] == [
        ("voc", 66.2),
        ("voc-single", 67.1),
        ("voc-web", 67.7),
        ("voc-single-web", None),
    ]
    assert [
        configured(resolved, case.values, case.sources).config.classifier.num_domain_affinities for case in cases
    ] == [1, 3, 1, 3]
    assert trial_values(resolved, {}, "voc") == {"data.voc": "/voc"}
    assert trial_values(resolved, {}, "voc+web") == {"data.voc": "/voc", "data.web.root": "/web"}
    (alone,) = cases_of(sources_definition("voc", "vgg16_largefov"), resolved, "evaluate")
    assert alone.paper == 63.5


def test_a_file_of_ones_own_may_have_axes(tmp_path: Path) -> None:
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
        ("about = \n", "is no TOML"),
        ('about = "x"\naxes = { "_x" = [1] }\n', "is no study"),
        ('about = "x"\naxes = { "seed" = [0, 1] }\n', "sets seed"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { recipe = "scratch" }\n', "sets recipe"),
        ('about = "x"\n[[case]]\nname = "a"\nuntil = "pseudo_mask"\n', "until = pseudo_mask"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { "localize.relatd" = 3 }\n', "did you mean localize.related"),
        ('about = "x"\n[[case]]\nname = "a"\nsources = "voc+web"\n', "voc\\+web, the study of voc"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=found):
        cases_of(read_definition(str(path)), resolve("voc", "scratch"), "evaluate")


def test_an_unknown_study_names_the_librarys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="study infer") as caught:
        read_definition("infer")
    assert "inference, lid, references" in caught.value.expected


def test_references_are_six_numbers_of_related_images_of_which_none_has_nothing_to_contrast_with() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.contrastive=true"])
    cases = cases_of(read_definition("references"), resolved, "evaluate")
    assert [(case.name, case.related, case.paper) for case in cases] == [
        ("r0", 0, 64.7),
        ("r1", 1, 65.9),
        ("r2", 2, 66.0),
        ("r3", 3, 66.2),
        ("r4", 4, 66.1),
        ("r5", 5, 66.0),
    ]
    for case in cases:
        config = configured(resolved, case.values).config
        assert config.localize.method.contrastive == (config.localize.related > 0)
