"""The command line: help, sources and overrides, experiments, and bad input that ends in one message."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.formats.exporting import EXPORT_FORMATS
from mcis.datasets.formats.importing import FORMATS
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import api, pipeline
from mcis.platform.cli import app
from mcis.platform.commands.options import OBJECTS_FORMATS
from mcis.platform.config.keys import STAGE_NAMES, leaves
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.export import EXPORTS, formats_of
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.version import project_version
from mcis.platform.runs.workspace import Workspace
from mcis.tuning.definition import library

runner = CliRunner()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "VOC2012"
    synthetic.draw(folder, train=12, val=4, size=64, classes=2)
    return folder


# --- help and what is loaded


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["--help"], ["demo", "run", "study", "predict", "export", "config", "doctor", "ui", "runs", "gc"]),
        (["--version"], [project_version()]),
        (["config", "show", "voc", "--recipe", "scratch"], ["seed = 0"]),
        (["runs", "--workspace"], ["no runs in"]),
        (["gc", "--workspace"], ["nothing to remove"]),
    ],
)
def test_commands_that_only_look_import_neither_ray_nor_torch(
    command: list[str], printed: list[str], tmp_path: Path
) -> None:
    Workspace(tmp_path)
    arguments = [*command, str(tmp_path)] if command[-1] == "--workspace" else command
    code = f"import sys; sys.argv = {['mcis', *arguments]}\nfrom mcis.platform.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "assert not {'ray', 'torch', 'mlflow'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in printed)


@pytest.mark.parametrize("command", ["", "run", "index", "index voc", "study search", "predict", "config show"])
def test_every_command_has_the_short_option_for_help(command: str) -> None:
    done = runner.invoke(app, [*command.split(), "-h"])
    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output


def test_the_version_is_printed() -> None:
    done = runner.invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"mcis {project_version()}\n")


def completions(*words: str) -> list[str]:
    """Returns what the shell offers for the last of some words."""
    environment = {"_MCIS_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(["mcis", *words])
    return runner.invoke(app, [], env=environment, prog_name="mcis").output.split()


def test_the_shell_completes_the_stages_of_the_pipeline() -> None:
    assert completions("run", "voc", "--until", "train_") == ["train_classifier", "train_affinity", "train_segmenter"]
    assert STAGE_NAMES == pipeline.STAGE_NAMES


def help_of(command: str, parameter: str) -> str:
    """Returns the help text of a parameter of a command, such as `study run`."""
    found: Any = get_command(app)
    for name in command.split():
        found = found.commands[name]
    (text,) = [option.help for option in found.params if option.name == parameter]
    return str(text)


def names_in_text(text: str) -> list[str]:
    """Returns the sorted names in a text such as `a, b (with more) or c.`"""
    without_remarks = re.sub(r" \([^)]*\)", "", text.rstrip("."))
    return sorted(re.split(r", | or ", without_remarks))


def test_help_lists_the_formats_of_data_sets() -> None:
    assert names_in_text(help_of("import", "format")) == sorted(FORMATS)


def test_help_lists_what_can_be_exported() -> None:
    assert names_in_text(help_of("export", "output")) == sorted(EXPORTS)


def test_help_lists_the_formats_of_each_output() -> None:
    formats = dict(re.findall(r"For (\w+): ([^.;]+)", help_of("export", "format")))
    listed = {output: names_in_text(names) for output, names in formats.items()}
    assert listed == {output: sorted(formats_of(output)) for output in EXPORTS if formats_of(output)}
    assert sorted(OBJECTS_FORMATS) == sorted(EXPORT_FORMATS)


def test_help_lists_the_studies_of_the_library() -> None:
    papers, others = re.findall(r": ([^;]+);", help_of("study run", "study"))
    assert sorted(names_in_text(papers) + names_in_text(others)) == library()


# --- sources and overrides


def shown_values(*arguments: str) -> dict[str, tuple[str, str]]:
    """Returns key -> (value, origin) as `mcis config show` prints them."""
    done = runner.invoke(app, ["config", "show", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = re.findall(r"^(\S+) = (.*)  \((.*)\)$", done.output, re.MULTILINE)
    return {key: (value, origin) for key, value, origin in lines}


def test_a_table_names_its_source(tmp_path: Path) -> None:
    values = shown_values(str(tmp_path / "photos.csv"))
    assert values["sources"] == ("tags", "command line")
    assert values["data.tags.table"] == (str(tmp_path / "photos.csv"), "command line")
    assert values["recipe"][0] == "photos"


def test_words_after_the_source_are_overrides() -> None:
    values = shown_values("voc", "--recipe", "scratch", "localize.related=5", "--set", "seed=2", "data.sbd=None")
    assert values["localize.related"] == ("5", "override")
    assert values["seed"] == ("2", "override")
    assert values["data.sbd"] == ("None", "override")


def test_an_experiment_needs_no_source_before_overrides(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    assert runner.invoke(app, ["config", "show", "voc", "--save", str(path)]).exit_code == 0
    values = shown_values("seed=7", "--config", str(path))
    assert values["seed"] == ("7", "override")
    assert values["sources"] == ("voc", str(path))


def test_seed_and_gpu_are_short_for_overrides() -> None:
    values = shown_values("voc", "--seed", "4", "--gpu")
    assert values["seed"] == ("4", "override")
    assert values["compute.gpu"] == ("True", "override")


@pytest.mark.parametrize(
    "words",
    [
        ["voc", "--seed", "1", "seed=2"],
        ["seed=2", "--seed", "1"],
        ["voc", "--gpu", "compute.gpu=false"],
        ["voc", "seed=1", "--set", "seed=2"],
    ],
)
def test_two_values_of_a_key_are_refused(words: list[str]) -> None:
    done = runner.invoke(app, ["config", "show", *words])
    assert done.exit_code == 1
    assert "error: two values of " in done.output


def test_a_later_override_of_the_same_kind_wins() -> None:
    values = shown_values("voc", "--seed", "2", "seed=1", "seed=2", "--set", "data.sbd=a", "--set", "data.sbd=None")
    assert values["seed"] == ("2", "override")
    assert values["data.sbd"] == ("None", "override")


@pytest.mark.parametrize("command", [["run"], ["study", "run", "table5"], ["study", "search"], ["config", "show"]])
def test_a_missing_source_is_the_same_error_in_every_command(command: list[str], tmp_path: Path) -> None:
    named = [] if command[0] == "config" else ["-n", "x", "-w", str(tmp_path)]
    done = runner.invoke(app, [*command, "seed=1", *named])
    assert done.exit_code == 1
    assert "error: no image sources are given" in done.output
    assert "photos.csv" in done.output


def test_an_experiment_is_saved_shown_and_changed(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    arguments = ["--voc", str(root), "--recipe", "scratch", "localize.related=5"]
    arguments += ["data.train_list=[/red]"]  # not interpreted as markup
    done = runner.invoke(app, ["config", "show", "voc", *arguments, "--save", str(path)])
    assert (done.exit_code, done.output) == (0, f"experiment: {path}\n")

    values = shown_values("--config", str(path), "seed=7")
    assert {key for key, _ in leaves(resolve("voc", "scratch").config)} <= set(values)
    assert values["seed"] == ("7", "override")
    assert values["localize.related"] == ("5", str(path))
    assert values["data.train_list"] == ("[/red]", str(path))
    assert values["data.voc"] == (str(root), str(path))
    assert values["recipe"] == ("scratch", str(path))


# --- workspaces


READING = {
    "export": ["export", "masks", "--name", "x", "--out", "OUT"],
    "predict": ["predict", "photos", "--name", "x", "--out", "OUT"],
    "index show": ["index", "show", "--name", "x"],
    "index browse": ["index", "browse", "--name", "x"],
    "runs": ["runs"],
    "gc": ["gc", "--run", "x", "--delete"],
    "ui": ["ui"],
}


@pytest.mark.parametrize("command", READING)
def test_commands_that_only_read_create_no_workspace(command: str, tmp_path: Path) -> None:
    absent = tmp_path / "typo"
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in READING[command]]
    done = runner.invoke(app, [*arguments, "--workspace", str(absent)])
    assert done.exit_code == 1
    assert f"{absent} is not a workspace" in done.output
    assert not list(tmp_path.iterdir())


def test_the_ui_prints_the_address_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command))
    workspace = Workspace(tmp_path)
    empty = runner.invoke(app, ["ui", "--workspace", str(tmp_path), "--port", "5005"])
    assert "no experiment yet" in empty.output
    assert not workspace.tracking_store.exists()

    Tracker(workspace, "mine", identity="").finish("FINISHED")
    done = runner.invoke(app, ["ui", "--workspace", str(tmp_path), "--port", "5005"])
    assert "runs: http://127.0.0.1:5005/#/experiments/1/runs" in done.output
    assert all(command[1:4] == ["-m", "mlflow", "ui"] for command in commands)
    assert len(commands) == 2


# --- bad input


SMALL = ["run", "voc", "--name", "x", "--recipe", "scratch"]
BAD = {
    "unknown sources": (["run", "vox", "--name", "x"], "did you mean voc"),
    "a data set of another tool": (["run", "coco", "--name", "x"], "convert the data set by `mcis import`"),
    "a table that does not exist": (["run", "nowhere.csv", "--name", "x"], "nowhere.csv"),
    "a key that predictions do not have": (
        ["predict", "photos", "seed=1", "--model", "m", "--out", "out"],
        "seed=1 for the predictions",
    ),
    "a word without a key": ([*SMALL, "--voc", "ROOT", "photos"], "the argument 'photos'"),
    "a file that does not exist": (["run", "--name", "x", "--config", "nowhere.toml"], "nowhere.toml cannot be read"),
    "wrong type": (["run", "voc", "--name", "x", "classifier.epochs=many"], "classifier.epochs"),
    "no data": (SMALL, "--voc"),
    "missing folder": ([*SMALL, "--voc", "nowhere"], "no folder"),
    "name with a slash": (["run", "voc", "--name", "../x", "--recipe", "scratch", "--voc", "ROOT"], "run name"),
    "weights that do not exist": ([*SMALL, "--voc", "ROOT", "weights.classifier_backbone=w.pth"], "w.pth is no file"),
    "more workers than CPUs": ([*SMALL, "--voc", "ROOT", "--set", "compute.workers=40"], "compute.workers"),
    "workspace that is a file": ([*SMALL, "--voc", "ROOT", "--workspace", "FILE"], "workspace"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_message_without_a_traceback(case: str, root: Path, tmp_path: Path) -> None:
    arguments, expected = BAD[case]
    (tmp_path / "file").write_text("")
    classes = [f"data.classes={root / 'classes.txt'}"] if "ROOT" in arguments else []
    paths = {"ROOT": str(root), "FILE": str(tmp_path / "file")}
    arguments = [paths.get(word, word) for word in arguments] + classes
    if "--workspace" not in arguments:
        arguments += ["--workspace", str(tmp_path / "workspace")]

    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert expected in done.output
    assert "expected:" in done.output
    assert "remedy:" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "command",
    [
        "predict photos --name x",
        "suggest --name x",
        "export masks --name x",
        "saliency tags photos.csv",
        "import coco set.json",
        "index browse --name x",
    ],
)
def test_a_bucket_is_refused_as_the_folder_of_other_files(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, [*command.split(), "--out", "s3://bucket/out"])
    assert done.exit_code == 1
    assert "error: --out s3://bucket/out\n" in done.output
    assert "remedy:   name a local path" in done.output
    assert not list(tmp_path.iterdir())


def test_a_recipe_offline_names_the_file_that_it_needs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For the downloader, a proxy that refuses connections is the same as no network.
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    arguments = ["run", "voc", "--name", "x", "--recipe", "paper", "--voc", str(root), "--workspace", str(tmp_path)]
    done = runner.invoke(app, [*arguments, "--set", f"data.classes={root / 'classes.txt'}"])
    assert done.exit_code == 1
    assert str(tmp_path / "weights" / "vgg16-397923af.pth") in done.output
    assert "weights.classifier_backbone=PATH" in done.output


def test_a_run_prints_what_to_expect_before_it_starts_ray(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ray(*arguments: object, **options: object) -> None:
        raise UserError("here Ray would start", "", "")

    monkeypatch.setattr(api, "ray_session", no_ray)
    arguments = ["run", "voc", "--voc", str(root), "--recipe", "scratch", "-n", "x", "-w", str(tmp_path)]
    arguments += [f"data.classes={root / 'classes.txt'}"]
    done = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert "images:  " in done.output[: done.output.index("here Ray would start")]
