"""Experiment files: values are read as they were written, and all problems of a file are reported together."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcis.datasets.errors import UserError
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves, meanings
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import SOURCE_COMBINATIONS


def written(resolved: Resolved, folder: Path) -> Path:
    path = folder / "exp.toml"
    path.write_text(experiment_text(resolved.config, resolved.origins), encoding="utf-8")
    return path


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a path that is no plain text": {"data.train_list": 'a "list"\\ \x7f\t[é] ü 🙂\n#'},
    "None in place of a recipe's value": {"classifier.stop_epoch": None, "classifier.affinity.init": None},
    "None in place of a default": {"predict.crop": None},
    "numbers": {"segmenter.optimizer.learning_rate": 1e-300, "seed": 2**31 - 1, "segmenter.scales": [1]},
    "another method": {"localize.method.name": "co_attention", "localize.method.target": "n"},
    "not in the keys of stages": {"classifier.val_every": 0, "compute.gpu": False},
}


@pytest.mark.parametrize(("recipe", "sources"), [*itertools.product(RECIPES, SOURCE_COMBINATIONS)])
def test_every_recipe_is_read_as_it_was_written(recipe: str, sources: str, tmp_path: Path) -> None:
    resolved = resolve(sources, recipe)
    assert resolve(file=written(resolved, tmp_path)).config == resolved.config


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_read_as_they_were_written(recipe: str, change: str, tmp_path: Path) -> None:
    """The dumped configuration is identical, because stage keys are computed from it."""
    options = {**CHANGES[change], **({"maps.scale": "maximum"} if "method" in change else {})}
    resolved = resolve("voc", recipe, options, ["classifier.epochs=12"])
    again = resolve(file=written(resolved, tmp_path))
    assert again.config == resolved.config
    assert again.config.model_dump_json() == resolved.config.model_dump_json()
    assert resolve("voc", recipe, again.changed()).config == again.config


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    resolved = resolve("voc", "paper", {"data.train_list": text})
    assert resolve(file=written(resolved, tmp_path_factory.mktemp("file"))).config.data.train_list == text


def test_text_that_is_not_utf8_is_refused_and_named() -> None:
    resolved = resolve("voc", "paper", {"data.train_list": "a\udcff"})
    with pytest.raises(UserError, match="UTF-8"):
        experiment_text(resolved.config, resolved.origins)


def test_a_file_names_every_key_with_its_meaning_and_its_origin(tmp_path: Path) -> None:
    resolved = resolve("voc", "scratch", overrides=["localize.related=5"])
    text = written(resolved, tmp_path).read_text()
    plain = " ".join(line.removeprefix("# ") for line in text.splitlines())
    assert all(meaning.replace("\n", " ") in plain for meaning in meanings(resolved.config).values())
    assert "related = 5  # override" in text
    assert 'name = "co_attention"' in text
    assert "[classifier.optimizer]" in text
    assert "[localize.method]" in text


def test_a_file_wins_over_sources_and_loses_to_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text("""
        sources = "voc+single"
        recipe = "scratch"
        seed = 3
        unset = ["classifier.affinity.init"]
        classifier.num_domain_affinities = 1
        [classifier.optimizer]
        momentum = 0.5
        weight_decay = 0.5
        [report]
        """)
    found = resolve(None, None, {"seed": 4}, ["classifier.optimizer.momentum=0.25"], file=path)
    flat = dict(leaves(found.config))
    assert (flat["sources"], flat["recipe"], flat["seed"], flat["classifier.num_domain_affinities"]) == (
        "voc+single",
        "scratch",
        4,
        1,
    )
    assert flat["classifier.affinity.init"] is None
    expected = {
        "sources": str(path),
        "recipe": str(path),
        "seed": "command line",
        "classifier.num_domain_affinities": str(path),
        "classifier.optimizer.momentum": "override",
        "classifier.optimizer.weight_decay": str(path),
        "classifier.optimizer.name": "recipe scratch",
        "classifier.affinity.init": str(path),
    }
    assert {key: found.origins[key] for key in expected} == expected
    assert resolve("single+voc", "scratch", file=path).config == resolve(file=path).config


@pytest.mark.parametrize(
    ("sources", "recipe", "message"),
    [
        ("voc+web", None, r"sources voc\+web contradicts .*exp.toml, which has sources voc"),
        (None, "paper", "recipe paper"),
    ],
)
def test_sources_or_recipe_that_contradict_the_file_are_refused(
    sources: str | None, recipe: str | None, message: str, tmp_path: Path
) -> None:
    path = written(resolve("voc", "scratch"), tmp_path)
    with pytest.raises(UserError, match=message):
        resolve(sources, recipe, file=path)


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text("""
        sources = "voc"
        recipe = 3
        sede = 1
        seed = "x"
        unset = ["classifer.batch", "predict.crop"]
        maps = "all"
        [classifier]
        color_jitter = [1.0, 1.0, 1.0, 9.0]
        [clasifier]
        batch = 3
        [localize.method]
        name = "papr"
        [predict]
        crop = 3
        split = 1979-05-27
        """)
    with pytest.raises(UserError) as caught:
        resolve(file=path, overrides=["compute.workers=0"])
    for message in (
        "recipe: .*found 3",
        "unknown key 'sede'; did you mean seed",
        "seed: .*found 'x'",
        "unknown key 'classifer.batch'; did you mean .*classifier.batch",
        "predict.crop is in the list unset and has a value",
        "unknown key 'maps'",
        "classifier.color_jitter.3: .*found 9",
        "unknown key 'clasifier.batch'",
        "localize.method.name: .*found 'papr'",
        "predict.split: .*found datetime",
    ):
        caught.match(f"{path}: {message}")
    caught.match("\n  - compute.workers: .*found 0")
    caught.match(r"11 problem\(s\)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"sources = ", "is not TOML"),
        (b"seed = 1\nseed = 2", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"a = " + b"[" * 100000, "is not TOML"),
        (b"seed = 1", "names no image sources"),
        (b'sources = "vox"', "exp.toml: unknown sources 'vox'"),
        (b'sources = "voc"\nrecipe = "smal"', "exp.toml: unknown recipe 'smal'"),
        (None, "cannot be read"),
        ("folder", "Is a directory"),
    ],
)
def test_other_files_give_one_error(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        resolve(file=path)
    assert "exp.toml" in str(caught.value)
