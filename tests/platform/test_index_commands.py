"""The commands of `mcis index`: building an index, the run that uses it, looking at it, and bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.cli import app

runner = CliRunner()


def invoke(*words: str | Path) -> str:
    """Runs a command, which succeeds, and returns its output."""
    done = runner.invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def index_output(workspace: Path, run: str) -> str:
    """Returns the folder of a run's index, as its record names it."""
    record = json.loads((workspace / "runs" / run / "record.json").read_text())
    folder: str = record["reached"]["index"]
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(folder, train=6, val=2, size=64, classes=2)
    return folder


@pytest.fixture(scope="module")
def workspace(ray_local: None, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the index of a devkit, index-voc."""
    folder = tmp_path_factory.mktemp("workspace")
    invoke("index", "voc", root, f"data.classes={root / 'classes.txt'}", "data.min_side=40", "-w", folder)
    return folder


def test_a_run_uses_the_index_of_the_same_configuration(workspace: Path, root: Path) -> None:
    values = [f"data.classes={root / 'classes.txt'}", "data.min_side=40"]
    options: list[str | Path] = ["--name", "run", "--recipe", "scratch", "--until", "index", "--workspace", workspace]
    invoke("run", "voc", *values, "--voc", root, *options)
    assert index_output(workspace, "run") == index_output(workspace, "index-voc")


def test_an_index_is_shown(workspace: Path) -> None:
    assert "rejected: 0" in invoke("index", "show", "--name", "index-voc", "--workspace", workspace)


def test_an_index_is_written_as_a_page(workspace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    output = invoke("index", "browse", "--name", "index-voc", "--workspace", workspace, "--out", page)
    assert output == f"page: {page}\n"
    assert "<html" in page.read_text()


@pytest.fixture(scope="module")
def table(root: Path) -> Path:
    rows = "".join(f"JPEGImages/{path.name},x\n" for path in (root / "JPEGImages").iterdir())
    (root / "photos.csv").write_text(f"image,tags\n{rows}")
    return root / "photos.csv"


@pytest.mark.parametrize("short", [False, True])
def test_a_run_uses_the_index_of_its_table(ray_local: None, table: Path, tmp_path: Path, short: bool) -> None:
    index: list[str | Path]
    run: list[str | Path]
    if short:
        index = ["index", table]
        run = ["run", table]
    else:
        index = ["index", "tags", table]
        run = ["run", "tags", "--tags", table]
    options: list[str | Path] = ["data.min_side=40", "-w", tmp_path]
    invoke(*index, *options)
    assert "index: already computed" in invoke(*run, "-n", "mine", "--until", "index", *options)
    assert index_output(tmp_path, "mine") == index_output(tmp_path, "index-tags")


SOURCES = {"single": "DIR", "web": "DIR", "lid": "DIR", "tags": "FILE", "voc": "DIR"}


@pytest.mark.parametrize("source", SOURCES)
def test_a_location_is_required(source: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["index", source, "--workspace", str(tmp_path / "ws")], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"'{SOURCES[source]}'" in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "ws").exists()


@pytest.mark.parametrize("source", SOURCES)
def test_a_location_that_does_not_exist_is_named(source: str, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.csv")
    done = runner.invoke(app, ["index", source, absent, "--workspace", str(tmp_path / "ws")])
    assert done.exit_code == 1, done.output
    assert absent in done.output


@pytest.mark.parametrize("command", [["index"], ["index", "tags"], ["run", "--name", "x"]])
@pytest.mark.parametrize("is_folder", [True, False])
def test_annotations_of_another_tool_are_named(tmp_path: Path, command: list[str], is_folder: bool) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"shapes": [], "imagePath": "a.jpg"}))

    done = runner.invoke(app, [*command, str(tmp_path if is_folder else file), "-w", str(tmp_path / "workspace")])

    assert done.exit_code == 1
    assert f"error: {tmp_path if is_folder else file} holds annotations of LabelMe" in done.output
    assert f"mcis import labelme {tmp_path} --out OUT" in done.output
