"""Definitions of studies: the library, and files of users."""

import re
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.tuning.definition import (
    CaseDefinition,
    StudyDefinition,
    adapted_to_sources,
    cases_of,
    check_sources,
    configured,
    library,
    read_definition,
    select_cases,
    trial_values,
)


def test_the_library_has_these_studies() -> None:
    tables = ["table1", "table2", "table3", "table4", "table5", "fully-supervised"]
    others = ["domains", "effect", "hops", "lid", "segmenter"]
    assert library() == sorted([*tables, *others])


@pytest.mark.parametrize(
    ("study", "sources", "recipe"),
    [
        ("table1", "voc+single+web", "paper"),
        ("table1", "voc+single+web", "released"),
        ("table2", "voc", "paper"),
        ("table2", "voc", "released"),
        ("table2", "voc", "scratch"),
        ("table2", "voc", "photos"),
        ("table2", "voc", "photos_fast"),
        ("table3", "lid", "lid"),
        ("table4", "voc", "paper"),
        ("table4", "voc", "released"),
        ("table4", "voc", "scratch"),
        ("table5", "voc", "paper"),
        ("table5", "voc", "released"),
        ("table5", "voc", "scratch"),
        ("table5", "voc", "photos"),
        ("table5", "voc", "photos_fast"),
        ("fully-supervised", "voc", "paper"),
        ("effect", "voc", "paper"),
        ("effect", "voc", "scratch"),
        ("effect", "voc", "photos"),
        ("effect", "voc", "photos_fast"),
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
    assert len(cases) == len(definition.cases) == len({f"{case.sources} {case.values}" for case in cases})
    assert all(case.baseline in names for case in cases if case.baseline)


LOCATIONS = {"data.voc": "/voc", "data.single.root": "/single", "data.web.root": "/web"}


@pytest.fixture(scope="module")
def resolved_sources() -> Resolved:
    """The three image sources of the paper."""
    return resolve("voc+single+web", "released", LOCATIONS)


def rows(study: str, resolved: Resolved, until: str = "evaluate") -> list[tuple[str, float | None]]:
    cases = cases_of(read_definition(study), resolved, until)
    return [(case.name, case.paper) for case in cases]


def config_of(study: str, case: str, resolved: Resolved) -> Config:
    (found,) = (found for found in cases_of(read_definition(study), resolved, "evaluate") if found.name == case)
    return configured(resolved, found.values, found.sources).config


def test_table_1_has_three_settings_with_two_networks(resolved_sources: Resolved) -> None:
    cases = cases_of(read_definition("table1"), resolved_sources, "evaluate")
    assert [(case.name, case.sources, case.paper, case.paper_test) for case in cases] == [
        ("a-vgg", "voc", 63.5, 63.6),
        ("a-resnet", "voc", 66.2, 66.9),
        ("b-vgg", "voc+single", 64.6, 64.6),
        ("b-resnet", "voc+single", 67.1, 67.2),
        ("c-vgg", "voc+web", 65.0, 64.7),
        ("c-resnet", "voc+web", 67.7, 67.5),
    ]
    configs = [configured(resolved_sources, case.values, case.sources).config for case in cases]
    assert [config.classifier.num_domain_affinities for config in configs] == [1, 1, 3, 3, 1, 1]
    networks = [(config.segmenter.backbone, config.segmenter.dropout) for config in configs]
    assert networks == [("vgg16_largefov", 0.5), ("resnet101", 0.0)] * 3


def test_tables_2_to_5_have_the_papers_rows() -> None:
    resolved = resolve("voc", "released")
    assert rows("table2", resolved) == [("basic", 61.7), ("single", 64.7), ("multi-contrastive", 66.2), ("multi", 66.2)]
    assert rows("table3", resolve("lid")) == [("ours", 46.2)]
    assert rows("table4", resolved) == [("basic", 61.7), ("co", 65.5), ("co-contrastive", 66.2)]
    assert rows("table5", resolved) == [
        ("r0", 64.7),
        ("r1", 65.9),
        ("r2", 66.0),
        ("r3", 66.2),
        ("r4", 66.1),
        ("r5", 66.0),
    ]
    assert [case.related for case in cases_of(read_definition("table5"), resolved, "evaluate")] == list(range(6))
    assert not config_of("table3", "ours", resolve("lid")).refines_maps, "maps are S_n (section 4.4)"
    assert rows("fully-supervised", resolved) == [("fully-supervised", 76.3)]
    assert config_of("fully-supervised", "fully-supervised", resolved).supervision == "full"


@pytest.mark.parametrize("recipe", ["paper", "released"])
def test_rows_with_the_same_figure_have_the_same_configuration(recipe: str) -> None:
    """Also across the tables, so that their trials share all stages."""
    resolved = resolve("voc+single+web", recipe, LOCATIONS)
    full_model = config_of("table1", "a-resnet", resolved)
    voc = resolve("voc", recipe, {"data.voc": "/voc"})
    for study, case in (("table2", "multi"), ("table4", "co-contrastive"), ("table5", "r3")):
        assert config_of(study, case, voc) == full_model, study
    assert config_of("table2", "single", voc) == config_of("table5", "r0", voc)
    assert config_of("table2", "basic", voc) == config_of("table4", "basic", voc)


def test_the_papers_column_names_data_and_score() -> None:
    assert read_definition("table5").paper_column == "paper (VOC 2012 val, network)"
    assert read_definition("table3").paper_column == "paper (LID val, network)"
    assert read_definition("effect").paper_column is None


@pytest.mark.parametrize(
    ("resolved", "until"),
    [
        (resolve("voc", "scratch"), "pseudo_masks"),  # scores maps and masks
        (resolve("tags", "photos"), "evaluate"),  # scores other images
        (resolve("voc", "scratch", overrides=["predict.split=train"]), "evaluate"),
        (resolve("voc", "paper", overrides=["data.classes=two.txt"]), "evaluate"),
        (resolve("voc", "paper", overrides=["data.val_list=train"]), "evaluate"),
        (resolve("voc", "paper", overrides=["data.train_list=train"]), "evaluate"),
    ],
)
def test_other_scores_have_no_figure_of_the_paper(resolved: Resolved, until: str) -> None:
    definition = StudyDefinition(about="", case=(CaseDefinition(name="ours", paper=66.2, paper_test=66.9),))
    (case,) = cases_of(definition, resolved, until)
    assert case.paper is None
    assert case.paper_test is None


def test_the_papers_figures_do_not_depend_on_where_the_images_are() -> None:
    resolved = resolve("voc", "paper", {"data.voc": "/voc", "data.sbd": "/sbd"})
    assert rows("table5", resolved)[3] == ("r3", 66.2)


def test_missing_sources_are_named_together() -> None:
    definition = read_definition("table1")
    with pytest.raises(UserError, match="no images of single and web are given, which the cases b-vgg, b") as caught:
        check_sources(definition, resolve("voc", "paper", {"data.voc": "/voc"}).config)
    assert "voc+single+web" in caught.value.remedy
    assert "--single PATH, --web PATH; or without these cases: --case a-vgg --case a-resnet" in caught.value.remedy

    with pytest.raises(UserError, match="no images of voc and web are given"):
        check_sources(definition, resolve("voc+single+web", "paper", {"data.single.root": "/single"}).config)
    with pytest.raises(UserError, match="no images of voc and single and web") as caught:
        check_sources(definition, resolve("tags", "photos").config)
    assert "--case" not in caught.value.remedy
    check_sources(definition, resolve("voc+single+web", "paper", LOCATIONS).config)
    check_sources(select_cases(definition, ["a-vgg"]), resolve("voc", "paper", {"data.voc": "/voc"}).config)


def test_rows_with_extra_data_can_be_trained_for_more_steps() -> None:
    """The paper's source has 20,000 steps for them in lines that are commented out."""
    resolved = resolve("voc+single+web", "released", LOCATIONS, overrides=["segmenter.min_steps=20000"])
    definition = select_cases(read_definition("table1"), ["b-vgg", "b-resnet", "c-vgg", "c-resnet"])
    cases = cases_of(definition, resolved, "evaluate")
    steps = [configured(resolved, case.values, case.sources).config.segmenter.min_steps for case in cases]
    assert steps == [20_000] * 4


def test_cases_are_selected_by_name() -> None:
    definition = read_definition("table5")
    assert [case.name for case in select_cases(definition, ["r4", "r0"]).all_cases()] == ["r0", "r4"]
    with pytest.raises(UserError, match="--case r6") as caught:
        select_cases(definition, ["r6"])
    assert "r0, r1" in caught.value.expected


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ("voc+single", ["target", "single", "single-w-p", "single-w-p-by-kind"]),
        ("voc+web", ["target", "web"]),
        ("tags+web", ["target", "web"]),
        ("voc+single+web", ["target", "single", "single-w-p", "single-w-p-by-kind", "web", "single-web"]),
    ],
)
def test_the_study_of_domains_has_the_cases_of_its_sources(sources: str, names: list[str]) -> None:
    first, *others = sources.split("+")
    resolved = resolve(sources, "photos", {f"data.{name}.root": f"/{name}" for name in others})
    definition = adapted_to_sources(read_definition("domains"), resolved.config)
    cases = cases_of(definition, resolved, "localize")

    assert [case.name for case in cases] == names
    assert cases[0].sources == first
    assert {case.sources for case in cases} <= {first, *(f"{first}+{name}" for name in others), sources}
    assert all(case.baseline in names for case in cases[1:])
    configs = {case.name: configured(resolved, case.values, case.sources).config for case in cases}
    if "single" in others:
        affinities = [configs[name].classifier.num_domain_affinities for name in names[:4]]
        assert affinities == [1, 3, 1, 3]
        assert configs["single"].classifier.affinity.w_p == "identity"


def test_the_study_of_domains_needs_further_sources() -> None:
    with pytest.raises(UserError, match="a study of image sources with voc alone") as caught:
        adapted_to_sources(read_definition("domains"), resolve("voc", "photos").config)
    assert "run the study with voc+single+web and --single PATH, --web PATH" in caught.value.remedy


def test_the_study_of_domains_needs_the_sources_of_its_selected_cases() -> None:
    definition = select_cases(read_definition("domains"), ["single"])
    config = resolve("voc+web", "photos", {"data.web.root": "/web"}).config
    with pytest.raises(UserError, match=re.escape("a study of image sources with voc+web alone")) as caught:
        adapted_to_sources(definition, config)
    assert "run the study with voc+single and --single PATH" in caught.value.remedy


def test_a_study_of_methods_may_adapt_to_its_sources(tmp_path: Path) -> None:
    file = tmp_path / "methods.toml"
    methods = "".join(f'[[method]]\nname = "{name}"\n' for name in ("one", "other"))
    file.write_text(f'about = "methods"\nadapts_to_sources = true\n{methods}')
    resolved = resolve("voc+web", "photos", {"data.web.root": "/web"})
    definition = adapted_to_sources(read_definition(str(file)), resolved.config)
    cases = cases_of(definition, resolved, "localize")
    assert [(case.name, case.baseline) for case in cases] == [("one", None), ("other", "one")]


def test_a_trial_has_only_the_locations_of_its_sources() -> None:
    resolved = resolve("voc+single+web", "paper", LOCATIONS)
    assert trial_values(resolved, {}, "voc") == {"data.voc": "/voc"}
    assert trial_values(resolved, {}, "voc+web") == {"data.voc": "/voc", "data.web.root": ("/web",)}


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
        ('about = "x"\n[[case]]\nname = "a"\nbaseline = "b"\n', "no case b"),
        ('about = "x"\n[[method]]\nname = "a"\non.b = {}\n', "no data set b"),
        ("about = \n", "is not valid TOML"),
        ('about = "x"\naxes = { "_x" = [1] }\n', "does not define a study"),
        ('about = "x"\naxes = { "seed" = [0, 1] }\n', "sets seed"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { recipe = "scratch" }\n', "sets recipe"),
        ('about = "x"\n[[case]]\nname = "a"\nuntil = "pseudo_mask"\n', "until = pseudo_mask"),
        ('about = "x"\n[[case]]\nname = "a"\nset = { "localize.relatd" = 3 }\n', "did you mean localize.related"),
    ],
)
def test_a_file_that_defines_no_study_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=found):
        cases_of(read_definition(str(path)), resolve("voc", "scratch"), "evaluate")


GRID = """
about = "two methods on two data sets"

[[data]]
name = "birds"
source = "birds.csv"

[[data]]
name = "voc"
source = "voc"
set = { "data.voc" = "/voc" }

[[method]]
name = "ours"
recipe = "photos"

[[method]]
name = "fewer"
recipe = "photos_fast"
set = { "localize.related" = 3 }

[[method]]
name = "hops"
on.voc = { "localize.hops" = 2 }
"""


def test_methods_run_on_each_data_set_and_are_compared_with_the_first(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    definition = read_definition(str(file))
    resolved = resolve(definition.first_source, "photos", overrides=["seed=3"])
    check_sources(definition, resolved.config)

    cases = cases_of(definition, resolved, "evaluate")
    described = [(case.name, case.data_set, case.method, case.sources, case.recipe, case.baseline) for case in cases]
    assert described == [
        ("birds-ours", "birds", "ours", "tags", "photos", None),
        ("birds-fewer", "birds", "fewer", "tags", "photos_fast", "birds-ours"),
        ("voc-ours", "voc", "ours", "voc", "photos", None),
        ("voc-fewer", "voc", "fewer", "voc", "photos_fast", "voc-ours"),
        ("voc-hops", "voc", "hops", "voc", "photos", "voc-ours"),
    ]
    configs = [configured(resolved, case.values, case.sources, case.recipe).config for case in cases]
    assert [config.localize.related for config in configs] == [24, 3, 24, 3, 24]
    assert [config.localize.hops for config in configs] == [1, 4, 1, 4, 2]
    assert all(config.seed == 3 for config in configs)
    assert [str(dict(leaves(config))["data.tags.table"])[-9:] for config in configs[:2]] == ["birds.csv"] * 2
    assert all(str(config.data.voc) == "/voc" for config in configs[2:])


def test_values_of_the_first_data_set_are_not_those_of_others(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    values = 'set = { "data.max_side" = 256, "classifier.epochs" = 5 }'
    file.write_text(GRID.replace('source = "birds.csv"', f'source = "birds.csv"\n{values}'))
    definition = read_definition(str(file))
    resolved = resolve(definition.first_source, "photos", overrides=["data.tags_from=xml"])

    cases = {case.name: case for case in cases_of(definition, resolved, "evaluate")}
    birds, voc = (
        configured(resolved, case.values, case.sources, case.recipe).config
        for case in (cases["birds-ours"], cases["voc-ours"])
    )
    assert (birds.data.max_side, birds.classifier.epochs) == (256, 5)
    assert (voc.data.max_side, voc.classifier.epochs) == (400, 8)
    assert voc.data.tags_from == "xml"


def test_a_source_is_refused_if_the_study_has_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    with pytest.raises(UserError, match=r"photos.csv, for a study with data sets of its own: birds, voc"):
        read_definition(str(file)).refuse_source("photos.csv")
    read_definition(str(file)).refuse_source(None)
    read_definition("table5").refuse_source("voc")


def test_a_saved_configuration_does_not_override_the_recipes_of_cases(tmp_path: Path) -> None:
    saved = resolve("tags", "photos", overrides=["classifier.epochs=5"])
    file = tmp_path / "saved.toml"
    file.write_text(experiment_text(saved.config, saved.origins))
    resolved = resolve(file=file)
    assert resolved.changed() == {"classifier.epochs": 5}

    fast = configured(resolved, {}, recipe="photos_fast").config
    expected = resolve("tags", "photos_fast", overrides=["classifier.epochs=5"]).config
    assert fast == expected


def test_long_combinations_of_axes_have_different_names(tmp_path: Path) -> None:
    file = tmp_path / "axes.toml"
    keys = ("pseudo_masks.background_threshold", "classifier.optimizer.learning_rate", "localize.related")
    axes = ", ".join(f'"{key}" = [0, 1]' for key in (*keys, "affinity_net.background_threshold"))
    file.write_text(f'about = "x"\naxes = {{ {axes} }}\n')
    names = [case.name for case in read_definition(str(file)).all_cases()]
    assert len(set(names)) == 16
    assert all(len(name) == 64 for name in names)


def test_an_unknown_study_is_refused_with_the_names_of_the_library() -> None:
    with pytest.raises(UserError, match="study table6") as caught:
        read_definition("table6")
    assert "table4, table5" in caught.value.expected


def test_a_case_without_related_images_has_no_contrastive_features() -> None:
    resolved = resolve("voc", "paper", overrides=["localize.method.contrastive=true"])
    for case in cases_of(read_definition("table5"), resolved, "evaluate"):
        config = configured(resolved, case.values).config
        assert config.localize.method.contrastive == (config.localize.related > 0)
