"""The page and the printed tables of `mcis compare`: complete, self-contained, correct, also with hostile names."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mcis.platform.cli import app
from mcis.platform.reporting.compared_runs import RunGroup, open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, Comparison, compare
from mcis.platform.reporting.comparison_page import Gallery, compared_images, default_file, write_page
from mcis.platform.reporting.comparison_tables import footnotes, page_tables
from mcis.platform.runs.workspace import RunFolder

HOSTILE = ("$\\frac$<script>alert('\"{&amp;", "[/x]</title>\u202e")
"""Class names."""
FOLDER = "w<b>&\"'$x_y$"
"""Name of a workspace, which is shown because two runs have the same name."""
Compared = tuple[Comparison, list[Gallery]]


@pytest.fixture(scope="module")
def folder(scored: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace, and another with a hostile name whose runs have the same names; one of them has other images."""
    folder = tmp_path_factory.mktemp("page")
    data = folder / "data"
    for seed in range(2):
        scored(folder / "workspace", f"a-s{seed}", f"seed={seed}", data=data, classes=HOSTILE)
    scored(folder / "workspace", "b", data=data, classes=HOSTILE)
    hostile = "data.voc=/nowhere/<script>alert(1)</script>&"
    scored(folder / FOLDER, "b", hostile, "segmenter.min_steps=7", data=data, classes=HOSTILE, error=0.5)
    scored(folder / FOLDER, "train", data=data, classes=HOSTILE, split="train")
    return folder


@pytest.fixture(scope="module")
def compared(folder: Path) -> Compared:
    others = [str(folder / FOLDER / "runs" / name) for name in ("b", "train")]
    groups = open_run_groups(folder / "workspace", ["b", *others, "a-s0,a-s1"])
    comparison = compare(groups, BootstrapSettings(resamples=100))
    return comparison, compared_images(comparison, 8)


@pytest.fixture(scope="module")
def page(compared: Compared, folder: Path, parsed: Callable[..., Any]) -> Any:
    write_page(*compared, folder / "pages" / "page.html")
    return parsed(folder / "pages" / "page.html")


def test_names_are_shown_as_they_are(page: Any, compared: Compared) -> None:
    for group in compared[0].groups:
        assert group.label in page.text
    for name in HOSTILE:
        assert name in page.text
    assert "/nowhere/<script>alert(1)</script>&" in page.text


def test_tables_and_remarks_are_those_of_the_terminal(page: Any, compared: Compared) -> None:
    configuration, scores, differences = page_tables(compared[0])
    for name, table in (("settings", configuration), ("scores", scores), ("differences", differences)):
        assert page.rows[name] == [list(table.columns), *map(list, table.rows)]
    assert len(differences.rows) == 2 * 3 * 4  # groups, scores, measures
    assert {"lower", "no difference"} <= {row[3] for row in differences.rows}
    keys = {row[0]: row[1:] for row in configuration.rows}
    assert keys["data.voc"][:2] == ("-", "/nowhere/<script>alert(1)</script>&")
    for term, text in footnotes(compared[0]):
        assert f"{term}: {text}" in page.text
    train = compared[0].groups[2].label
    assert page.text.count(f"of {train}: scored on split train, b in ") == 1


def test_iou_of_every_label_is_in_the_tables(page: Any, compared: Compared) -> None:
    rows = page.rows["classes"]
    for score in compared[0].scores:
        for name in ("background", *HOSTILE):
            assert [name, *(mean_iou_text(group, score.title, name) for group in score.groups)] in rows
        mious = []
        for group in score.groups:
            mious.append(fmean(run_score.miou for run_score in group.scores(score.title)))
        assert ["mean", *(f"{miou:.1f}" for miou in mious)] in rows


def mean_iou_text(group: RunGroup, title: str, label: str) -> str:
    """The IoU of a label in percent, mean over the runs of a group."""
    ious = [run_score.iou[label] for run_score in group.scores(title)]
    return f"{fmean(iou for iou in ious if iou is not None):.1f}"


def test_without_an_image_of_all_runs_there_are_charts_alone(page: Any, compared: Compared) -> None:
    assert [gallery.common for gallery in compared[1]] == [0, 0]  # none with the run on train
    assert page.text.count("No image is common to all runs.") == 2
    assert len(page.pictures) == 3


def invoke(folder: Path, *arguments: str) -> Result:
    command = ["compare", *arguments, "--workspace", str(folder / "workspace")]
    return CliRunner().invoke(app, command, env={"COLUMNS": "300"})


def test_the_command_prints_tables_and_says_where_the_page_lies(folder: Path, parsed: Callable[..., Any]) -> None:
    other = str(folder / FOLDER / "runs" / "b")
    done = invoke(folder, "a-s0,a-s1", other, "--images", "3")
    assert done.exit_code == 0, done.output
    for words in (
        "Settings that differ",
        "compared with a-s{0,1}",
        "difference [95 %]",
        "95 % interval",
        "Student's t",
    ):
        assert words in done.output
    assert "lower" in invoke(folder, "a-s0", other, "--images", "0").output
    (line,) = [line for line in done.output.splitlines() if line.startswith("page: ")]
    written = Path(line.removeprefix("page:").strip())
    assert written == default_file(open_run_groups(folder / "workspace", ["a-s0,a-s1", other]))
    assert written.parent == folder / "workspace" / "comparisons"
    page = parsed(written)
    assert len(page.pictures) == 3 + 2 * 3 * 4  # charts; cells of 3 images of pseudo masks and of segmentation
    for words in ("mIoU here", "a-s0, with CRF", "differs most", "drawn at random"):
        assert words in page.text
    again = invoke(folder, "a-s0,a-s1", other, "--images", "0")
    assert again.exit_code == 0
    assert "The page was made without images (--images 0)." in parsed(written).text


def test_tables_fit_80_columns(folder: Path) -> None:
    command = ["compare", "a-s0,a-s1", "b", "--images", "0", "--workspace", str(folder / "workspace")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    *lines, page = done.output.splitlines()
    assert page.startswith("page: ")
    assert max(len(line) for line in lines) <= 80
    assert not any(line.startswith("- ") for line in lines)
    assert any(line.split()[:2] == ["segmentation", "+"] for line in lines)


def test_json_and_csv_have_everything(folder: Path) -> None:
    printed = json.loads(invoke(folder, "a-s0,a-s1", "b", "--images", "0", "--json").output)
    rows = list(csv.DictReader(invoke(folder, "a-s0,a-s1", "b", "--images", "0", "--csv").output.splitlines()))
    assert Path(printed["page"]).exists()
    assert printed["baseline"] == "a-s{0,1}"
    assert [group["label"] for group in printed["groups"]] == ["a-s{0,1}", "b"]

    names = ["miou", "boundary_miou", "mean_precision", "mean_recall"]
    titles = ["pseudo masks", "segmentation", "segmentation + CRF"]
    expected = [(title, name) for title in titles for name in names]
    assert [(row["scored"], row["measure"]) for row in rows] == expected
    for row, difference in zip(rows, printed["differences"], strict=True):
        assert float(row["difference"]) == pytest.approx(difference["compared"] - difference["baseline"])
        assert float(row["baseline_deviation"]) == difference["baseline_deviation"]
        assert row["compared_deviation"] == ""
        assert float(row["low"]) < float(row["high"])

    refused = invoke(folder, "a-s0", "b", "--json", "--csv")
    assert (refused.exit_code, "leave one of them out" in refused.output) == (1, True)


def test_a_page_has_a_file_of_its_own_for_each_choice_of_runs(folder: Path, compared: Compared) -> None:
    def file(*arguments: str) -> str:
        return default_file(open_run_groups(folder / "workspace", arguments)).name

    assert file("a-s0", "b") == "a-s0~b.html"
    assert file("a-s0,a-s1", "b") == "a-s0,a-s1~b.html"
    other = str(folder / FOLDER / "runs" / "b")
    assert re.fullmatch(r"a-s0~b-[0-9a-f]{16}\.html", file("a-s0", other))
    names = [file(*arguments) for arguments in (("a-s0", "b"), ("b", "a-s0"), ("a-s0", other), ("a-s0,a-s1", "b"))]
    assert len(set(names)) == 4
    (group, *_) = compared[0].groups
    long = [
        default_file([group._replace(runs=(group.runs[0]._replace(folder=RunFolder(Path(name))),))]).name
        for name in ("é" * 200, "é" * 201)
    ]
    assert len(set(long)) == 2
    assert all(len(name.encode()) < 150 for name in long)


def test_the_command_ends_in_a_clear_error(folder: Path) -> None:
    table = folder / "photos.csv"
    table.write_text("image,tags\n")
    done = invoke(folder, "a-s0", "b", "--html", str(table))
    assert done.exit_code == 1
    assert "expected: a file with the suffix .html" in done.output
    assert table.read_text() == "image,tags\n", "a table is not written over"
