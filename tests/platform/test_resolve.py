"""Layers of a configuration: precedence, origins, overrides, tables as sources, and errors reported together."""

from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config import resolve as layers_of
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.maps import MethodConfig
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.resolve import is_assignment, location_values, parse_overrides, resolve
from mcis.platform.config.sections import SOURCE_COMBINATIONS, Config
from mcis.platform.config.training import ClassifierConfig


def values(recipe: str, *overrides: str) -> dict[str, Any]:
    return dict(leaves(resolve("voc", recipe, overrides=overrides).config))


# --- layers


def test_later_layers_win_and_are_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["classifier.batch", "classifier.epochs", "classifier.channels", "classifier.input_size", "seed"]
    layers = ["recipe scratch", "sources voc", "command line", "override"]
    numbers = dict(zip(layers, (30, 33, 36, 39), strict=True))
    # Each layer sets one key fewer than the one before it, so that each wins once.
    recipe, sources = numbers["recipe scratch"], numbers["sources voc"]
    of_recipe = ClassifierConfig(batch=recipe, epochs=recipe, channels=recipe, input_size=recipe)
    of_setting = ClassifierConfig(batch=sources, epochs=sources, channels=sources)
    monkeypatch.setitem(RECIPES, "scratch", lambda: Config(classifier=of_recipe))
    monkeypatch.setattr(layers_of, "source_values", lambda _: Config(classifier=of_setting))
    options = dict.fromkeys(keys[:2], numbers["command line"])
    found = resolve("voc", "scratch", options, [f"{keys[0]}={numbers['override']}"])
    flat = dict(leaves(found.config))
    for key, source in zip(keys, [*reversed(layers), "default"], strict=True):
        assert found.origins[key] == source
        assert flat[key] == numbers.get(source, 0)
    assert found.origins.keys() == flat.keys(), "each key has an origin"


def test_options_and_names_come_from_the_command_line() -> None:
    found = resolve("voc", "released", {"data.voc": "somewhere/VOC2012"})
    assert (found.config.sources, found.config.recipe) == ("voc", "released")
    assert found.config.data.voc == Path.cwd() / "somewhere/VOC2012"  # trials and workers have folders of their own
    for key in ("sources", "recipe", "data.voc"):
        assert found.origins[key] == "command line"
    assert found.origins["classifier.head"] == "recipe released"
    assert found.origins["classifier.optimizer.momentum"] == "default"


# --- a method of localization


def test_values_of_another_method_are_refused() -> None:
    with pytest.raises(UserError, match=r"method\.target is n but localize\.method\.name is released.*set .*target=m"):
        resolve("voc", "paper", overrides=["localize.method.name=released"])
    found = resolve("voc", "paper", overrides=["localize.method.name=released", "localize.method.target=m"])
    assert found.config.localize.method == MethodConfig(name="released")
    with pytest.raises(UserError, match=r"localize\.method\.name: .*'released' \(found 'papr'\)"):
        resolve("voc", "paper", overrides=["localize.method.name=papr"])


# --- texts


def test_values_that_are_not_json_are_text() -> None:
    texts = ["a=none", "b=/some/path=with.sign", "c= spaced ", "d=", "e=[1,", "f=" + "9" * 5000]
    expected = {"a": "none", "b": "/some/path=with.sign", "c": "spaced", "d": None, "e": "[1,", "f": "9" * 5000}
    assert parse_overrides(texts) == expected


@pytest.mark.parametrize("text", ["", "seed", "=3", "  =3"])
def test_an_override_without_key_or_sign_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected: key=value"):
        parse_overrides(["seed=1", text])


@pytest.mark.parametrize("text", ["None", "null", "", " "])
def test_none_has_three_spellings(text: str) -> None:
    assert parse_overrides([f"classifier.stop_epoch={text}"]) == {"classifier.stop_epoch": None}
    assert values("released", f"classifier.stop_epoch={text}")["classifier.stop_epoch"] is None


def test_overrides_may_be_a_mapping() -> None:
    config = resolve("voc", "scratch", overrides={"localize.related": 5, "classifier.self_pairs": ("hflip",)}).config
    assert config.localize.related == 5
    assert config.classifier.self_pairs == ("hflip",)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=1", True),
        ("localize.related=", True),
        ("data.classes=/some/file=1.txt", True),
        ("photos.csv", False),
        ("./seed=1", False),
        ("/data/seed=1", False),
        ("s3://bucket/photos.csv?region=x", False),
        ("=1", False),
    ],
)
def test_a_word_with_a_key_is_an_override(word: str, expected: bool) -> None:
    assert is_assignment(word) is expected


# --- tables as sources


@pytest.mark.parametrize("table", ["photos.csv", "some/photos.JSONL", "s3://bucket/photos.parquet?region=eu-west-1"])
def test_a_table_stands_for_its_source(table: str) -> None:
    found = resolve(table)
    assert (found.config.sources, found.config.recipe) == ("tags", "photos")
    assert str(found.config.data.tags.table).endswith(table)  # type: ignore[attr-defined]  # a registered section
    assert found.origins["data.tags.table"] == "command line"


def test_a_table_is_given_once() -> None:
    assert resolve("photos.csv", options={"data.tags.table": "photos.csv"}).config.sources == "tags"
    with pytest.raises(UserError, match=r"two tables, photos\.csv and other\.csv") as caught:
        resolve("photos.csv", options={"data.tags.table": "other.csv"})
    assert caught.value.remedy == "leave out --tags"


def test_lists_and_none_by_assignment() -> None:
    flat = values(
        "released",
        "classifier.color_jitter=[0.1, 0.2, 0.3, 0]",
        'classifier.self_pairs=["hflip"]',
        "classifier.stop_epoch=null",
        "predict.crop=null",
        "weights.classifier_backbone=some/file.pth",
    )
    assert flat["classifier.color_jitter"] == (0.1, 0.2, 0.3, 0.0)
    assert flat["classifier.self_pairs"] == ("hflip",)
    assert flat["classifier.stop_epoch"] is None
    assert flat["predict.crop"] is None
    assert flat["weights.classifier_backbone"] == str(Path.cwd() / "some/file.pth")
    for word in ("none", "download"):
        assert values("paper", f"weights.classifier_backbone={word}")["weights.classifier_backbone"] == word
    assert values("paper", "weights.classifier=~/mine.pt")["weights.classifier"] == str(Path.home() / "mine.pt")


# --- mistakes


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("localize.relatd", "localize.related"), ("classifier.learning_rate", "classifier.optimizer.learning_rate")],
)
def test_an_unknown_key_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"unknown key '{wrong}'; did you mean .*\b{near}\b"):
        resolve("voc", "paper", overrides=[f"{wrong}=1"])


@pytest.mark.parametrize("key", ["classifier", "data.", ".seed", "seed.x", "SEED"])
def test_other_texts_are_no_keys(key: str) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}'"):
        resolve("voc", "paper", overrides=[key + '={"batch": 3}'])


def test_all_problems_are_reported_together() -> None:
    wrong = {
        "localize.relatd=3": "unknown key 'localize.relatd'",
        "no_such_thing=1": "unknown key 'no_such_thing'",
        "seed=-1": "seed: .*greater than or equal to 0.*found -1",
        "classifier.batch=many": "classifier.batch: .*integer.*found 'many'",
        "classifier.color_jitter=[1, 1, 1, 9]": r"classifier.color_jitter.3: .*found 9",
        "segmenter.backbone=vgg61": "segmenter.backbone: .*timm/NAME.*did you mean vgg16.*'vgg61'",
        "recipe=scratch": "recipe cannot be overridden: name the recipe by --recipe",
        "sources=voc": "sources cannot be overridden: name the sources as the first argument",
    }
    with pytest.raises(UserError) as caught:
        resolve("voc", "paper", {"data.max_rejected": -5}, list(wrong))
    for message in [*wrong.values(), "data.max_rejected: .*found -5"]:
        caught.match(message)
    caught.match(rf"{len(wrong) + 1} problem\(s\)")
    assert "mcis config show" in caught.value.remedy


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["classifier.backbone=timm/resnett18"], r"timm has no network resnett18; .* timm/resnet18 or"),
        (
            ["classifier.trainable_stages=0", "weights.classifier_backbone=none"],
            "classifier.trainable_stages is 0 but weights.classifier_backbone is",
        ),
        (["classifier.trainable_stages=0"], r"set classifier\.trainable_stages=1"),
        (
            ["segmenter.trainable_stages=2", "weights.segmenter_backbone=none"],
            "segmenter.trainable_stages is 2 but weights.segmenter_backbone is none",
        ),
    ],
)
def test_contradictions_are_reported(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve("voc", "paper", overrides=overrides)
    assert "pydantic" not in str(caught.value)


# --- recipes


def test_the_first_source_has_a_default_recipe() -> None:
    recipes = {sources: resolve(sources).config.recipe for sources in (*SOURCE_COMBINATIONS, "lid+web", "tags+single")}
    assert recipes == {
        "voc": "paper",
        "voc+single": "paper",
        "voc+web": "paper",
        "lid": "lid",
        "tags": "photos",
        "lid+web": "lid",
        "tags+single": "photos",
    }


def test_a_uri_is_refused_for_a_folder() -> None:
    with pytest.raises(UserError, match=r"data\.voc: .* list them in a table of tags"):
        resolve("voc", "scratch", {"data.voc": str(Path("s3://bucket/VOC2012"))})


def test_a_uri_with_a_password_is_refused_without_printing_it() -> None:
    with pytest.raises(UserError, match=r"data\.tags\.table: .* AWS_ACCESS_KEY_ID") as caught:
        resolve("tags", "scratch", {"data.tags.table": "s3://me:hunter2@bucket/photos.csv"})
    assert "found 's3://bucket/photos.csv'" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UserError, match=r"data\.tags\.table: .* token or signature") as caught:
        resolve("tags", "scratch", {"data.tags.table": "abfs://c@acct.dfs.core.windows.net/x.csv?sv=1&sig=hunter2"})
    assert "hunter2" not in str(caught.value)


# --- single-label and web images


def test_a_source_may_have_several_folders(tmp_path: Path) -> None:
    resolved = resolve("voc+single", options=location_values({"single": ["a", tmp_path / "b"]}))
    assert dict(leaves(resolved.config))["data.single.root"] == (str(Path.cwd() / "a"), str(tmp_path / "b"))

    (tmp_path / "experiment.toml").write_text(experiment_text(resolved.config, resolved.origins))
    assert resolve(file=tmp_path / "experiment.toml").config == resolved.config
    overridden = resolve("voc+single", overrides=[f'data.single.root=["/a", "{tmp_path / "b"}"]'])
    assert dict(leaves(overridden.config))["data.single.root"] == ("/a", str(tmp_path / "b"))
    one = resolve("voc+single", overrides=["data.single.root=/a"])
    assert dict(leaves(one.config))["data.single.root"] == ("/a",)


@pytest.mark.parametrize(("root", "message"), [([], "a path or a list"), (["s3://b/c"], "a local path"), (3, "a path")])
def test_folders_of_a_source_are_checked(root: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"data\.single\.root: Input should be {message}"):
        resolve("voc+single", options={"data.single.root": root})
