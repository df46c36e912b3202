"""The functions of `import mcis`: run, index, scores, compare and panel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import api
from mcis.platform.pipeline import RunResult


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "VOC2012"
    synthetic.draw(folder, train=6, val=2, size=64, classes=2)
    return folder


@pytest.fixture(scope="module")
def options(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A workspace, the place of the images, and overrides."""
    return {
        "workspace": tmp_path_factory.mktemp("workspace"),
        "voc": root,
        "overrides": {"data.classes": root / "classes.txt", "data.min_side": 40},
    }


@pytest.fixture(scope="module")
def indexed(ray_local: None, options: dict[str, Any]) -> RunResult:
    """A run that ends with its index."""
    return api.run("voc", name="indexed", until="index", **options)


def test_index_returns_its_tables(ray_local: None, options: dict[str, Any]) -> None:
    opened = api.index("voc", name="only-index", **options)
    assert len(opened.index) == 8
    assert len(opened.rejects) == 0
    assert len(opened.classes) == 2


def test_index_takes_a_table(ray_local: None, root: Path, tmp_path: Path) -> None:
    rows = "".join(f"{path},x\n" for path in (root / "JPEGImages").iterdir())
    table = root / "photos.csv"
    table.write_text(f"image,tags\n{rows}")
    opened = api.index(table, name="table", workspace=tmp_path)
    assert opened.classes == ("x",)
    assert len(opened.index) == 8


def test_overrides_are_values_or_texts(options: dict[str, Any], root: Path, indexed: RunResult) -> None:
    texts = [f"data.classes={root / 'classes.txt'}", "data.min_side=40"]
    repeated = api.run("voc", name="texts", until="index", **options | {"overrides": texts})
    assert repeated.context.stage_outputs["index"] == indexed.context.stage_outputs["index"]


def test_a_panel_has_the_image(indexed: RunResult) -> None:
    assert api.panel(indexed, "train_000000").image.shape[2] == 3


def test_a_panel_of_an_unknown_image_is_an_error(indexed: RunResult) -> None:
    with pytest.raises(UserError, match=r"no image 'x\.jpg'"):
        api.panel(indexed, "x.jpg")


def test_scores_are_found_by_name_or_folder(options: dict[str, Any], indexed: RunResult) -> None:
    assert api.scores("indexed", workspace=options["workspace"]) == []
    assert api.scores(options["workspace"] / "runs" / "indexed") == []


@pytest.mark.parametrize("run", ["absent", "somewhere/runs/absent"])
def test_scores_of_an_absent_run_are_an_error(options: dict[str, Any], indexed: RunResult, run: str) -> None:
    with pytest.raises(UserError, match="no run"):
        api.scores(run, workspace=options["workspace"])


def test_a_location_of_an_unknown_source_is_an_error(options: dict[str, Any], root: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'vox'"):
        api.run("voc", name="x", vox=root, **options)


def test_compare_returns_differences(scored: Callable[..., Path], tmp_path: Path) -> None:
    first = scored(tmp_path / "workspace", "a", data=tmp_path / "data")
    scored(tmp_path / "workspace", "b", "segmenter.min_steps=7", data=tmp_path / "data")
    comparison = api.compare(["a", "b"], workspace=tmp_path / "workspace", seed=1)
    assert [group.label for group in comparison.groups] == ["a", "b"]
    assert [score.miou for score in api.scores(first)] == [score.miou for score in api.scores(str(first))]


def test_compare_needs_two_runs(indexed: RunResult, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="1 run to compare"):
        api.compare(["indexed"], workspace=options["workspace"])
