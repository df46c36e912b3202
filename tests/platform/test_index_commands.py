"""The commands of an index: building it, the run that follows, looking at it, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import api
from mcis.platform.cli import app

runner = CliRunner()


def test_an_index_is_built_shown_and_taken_over_by_a_run(ray_local: None, tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit" / "VOC2012"
    synthetic.draw(root, train=6, val=2, size=64, classes=2)
    given = ["--workspace", str(tmp_path / "ws"), "--set", "data.min_side=40"]
    done = runner.invoke(app, ["index", "voc", str(root), "--set", f"data.classes={root / 'classes.txt'}", *given])
    assert done.exit_code == 0, done.output
    words = ["run", "voc", "--voc", str(root), "--set", f"data.classes={root / 'classes.txt'}", *given]
    walked = runner.invoke(app, [*words, "--name", "NAME", "--recipe", "scratch", "--until", "index"])
    assert walked.exit_code == 0, walked.output
    indexed, run = (json.loads((tmp_path / "ws/runs" / n / "record.json").read_text()) for n in ("index-voc", "NAME"))
    assert indexed["reached"]["index"] == run["reached"]["index"]

    named = ["--name", "index-voc", *given[:2]]
    assert "rejected: 0" in runner.invoke(app, ["index", "show", *named]).output
    browsed = runner.invoke(app, ["index", "browse", *named, "--out", str(tmp_path / "page.html")])
    assert browsed.output == f"page: {tmp_path / 'page.html'}\n"
    assert "<html" in (tmp_path / "page.html").read_text()
    location: dict[str, Any] = {"workspace": tmp_path / "ws", "voc": root}
    values = [f"data.classes={root / 'classes.txt'}", "data.min_side=40"]
    opened = api.index("voc", name="python", **location, overrides=values)
    assert len(opened.index) == 8
    assert api.scores(tmp_path / "ws" / "runs" / "python") == []
    assert api.scores("python", workspace=tmp_path / "ws") == []
    result = api.run("voc", name="python", **location, overrides=values, until="index")
    assert api.panel(result, opened.index["image_id"][7].as_py()).image.shape[2] == 3
    with pytest.raises(UserError, match=r"no image 'x\.jpg'"):
        api.panel(result, "x.jpg")
    with pytest.raises(UserError, match="no run"):
        api.scores(tmp_path / "ws" / "runs" / "absent")
    with pytest.raises(UserError, match="unknown key 'vox'"):
        api.run("voc", name="python", **location, vox=root)


def test_a_run_takes_over_the_index_of_its_table(ray_local: None, tmp_path: Path) -> None:
    synthetic.draw(tmp_path, train=2, val=1, size=64, classes=2)
    rows = "".join(f"JPEGImages/{path.name},x\n" for path in (tmp_path / "JPEGImages").iterdir())
    (tmp_path / "t.csv").write_text(f"image,tags\n{rows}")
    table = str(tmp_path / "t.csv")
    for words in (
        ["index", "tags", table],
        ["index", table, "-n", "again"],
        ["run", table, "--until", "index", "--name", "mine"],
        ["run", "tags", "--tags", table, "--until", "index", "--name", "other"],
    ):
        done = runner.invoke(app, [*words, "-w", str(tmp_path / "ws"), "data.min_side=40"])
        assert done.exit_code == 0, done.output
        if words[-1] != table:
            assert "index: already computed" in done.output


@pytest.mark.parametrize(
    ("source", "said"), [("single", "'DIR'"), ("web", "'DIR'"), ("lid", "'DIR'"), ("tags", "'FILE'"), ("voc", "'DIR'")]
)
def test_an_index_names_a_location_that_is_missing_or_none(source: str, said: str, tmp_path: Path) -> None:
    absent, workspace = str(tmp_path / "absent.csv"), ["--workspace", str(tmp_path / "ws")]
    done = runner.invoke(app, ["index", source, *workspace], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "ws").exists()
    done = runner.invoke(app, ["index", source, absent, *workspace])
    assert done.exit_code == 1, done.output
    assert absent in done.output
