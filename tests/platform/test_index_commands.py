"""The commands of an index: building it, the run that follows, looking at it, and bad input."""

import functools
import hashlib
import json
import shlex
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.cli import app
from mcis.platform.commands import index

runner = CliRunner()


def test_after_a_download_the_command_of_the_run_that_finds_this_index_is_named(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the folder is not fetched, so this needs no network."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "some data"
    root = data / "VOCdevkit" / "VOC2012"
    synthetic.draw(root, train=6, val=2, size=64, classes=2)
    (data / "benchmark_RELEASE" / "dataset" / "cls").mkdir(parents=True)
    given = ["--classes", str(root / "classes.txt"), "--workspace", "ws", "--set", "data.min_side=40"]
    done = runner.invoke(app, ["index", "voc", "--download", "some data", *given])
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("use: "))
    words = shlex.split(line.removeprefix("use: "))
    assert words[:3] == ["mcis", "run", "voc"]
    assert words[words.index("--voc") + 1] == str(root)
    assert f"data.sbd={data / 'benchmark_RELEASE'}" in words
    walked = runner.invoke(app, [*words[1:], "--recipe", "small", "--until", "index"])
    assert walked.exit_code == 0, walked.output
    indexed, run = (json.loads((tmp_path / "ws/runs" / n / "record.json").read_text()) for n in ("index-voc", "NAME"))
    assert indexed["reached"]["index"] == run["reached"]["index"]

    shown = runner.invoke(app, ["index", "show", "--name", "index-voc", "--workspace", "ws", "--check-masks"])
    assert "tags that disagree with the mask: 0 of 8 images" in shown.output
    browsed = runner.invoke(app, ["index", "browse", "--name", "index-voc", "--workspace", "ws", "--out", "page.html"])
    assert browsed.output == "page: page.html\n"
    assert "<html" in (tmp_path / "page.html").read_text()

    again = runner.invoke(app, ["index", "voc", str(root), *given])
    assert again.exit_code == 0, again.output
    assert "use: " not in again.output


@pytest.mark.parametrize(
    ("source", "said"),
    [("single", "'DIR'"), ("web", "'DIR'"), ("lid", "'DIR'"), ("tags", "'FILE'"), ("voc", "index voc --download DIR")],
)
def test_an_index_without_its_location_says_what_is_missing(source: str, said: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["index", source, "--workspace", str(tmp_path / "ws")], env={"COLUMNS": "200"})
    assert done.exit_code == (1 if source == "voc" else 2)
    assert said in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "ws").exists()


def test_an_archive_is_fetched_unpacked_and_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sum and an archive without the folder leave no folder that the next call would take for whole."""

    def pack(folder: str) -> tuple[str, str]:
        path = tmp_path / f"{folder[:3]}.tar"
        with tarfile.open(path, "w") as archive:
            archive.add(__file__, f"{folder}/a.jpg")
        return f"http://127.0.0.1:{server.server_port}/{path.name}", hashlib.md5(
            path.read_bytes(), usedforsecurity=False
        ).hexdigest()

    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    data, name = tmp_path / "data", "VOCdevkit/VOC2012"
    url, md5 = pack(name)
    for wrong in ((url, "0" * 32), pack("other")):
        monkeypatch.setitem(index.ARCHIVES, name, wrong)
        with pytest.raises(UserError, match=r"\.tar cannot be fetched and unpacked") as caught:
            index._fetched(data, name)
        assert wrong[1] in caught.value.expected
        assert not (data / name).exists()
    monkeypatch.setitem(index.ARCHIVES, name, (url, md5))
    assert (index._fetched(data, name) / "a.jpg").read_bytes() == Path(__file__).read_bytes()
    assert [path.name for path in data.iterdir()] == ["VOCdevkit"]
    server.shutdown()
    server.server_close()
    assert index._fetched(data, name) == data / name


def test_a_folder_and_a_download_are_one_too_many(tmp_path: Path) -> None:
    done = runner.invoke(app, ["index", "voc", "here", "--download", "there", "--workspace", str(tmp_path / "ws")])
    assert done.exit_code == 1
    assert "the folder here and --download as well" in done.output


@pytest.mark.parametrize("source", ["voc", "single", "web", "lid", "tags"])
def test_an_index_of_a_location_that_is_none_names_no_option_for_it(source: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent.csv"
    done = runner.invoke(app, ["index", source, str(absent), "--workspace", str(tmp_path / "ws")])
    assert done.exit_code == 1, done.output
    assert str(absent) in done.output
    assert f"--{source}" not in done.output
