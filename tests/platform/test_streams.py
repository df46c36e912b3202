"""The standard streams of commands: encodings that lack characters, and closed streams."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.workspace import Workspace

CLASSES = ("猫", "Löwe")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of eight photographs whose names are not ASCII."""
    lines = ["image,tags"]
    for number in range(8):
        name = f"Bild-ä{number}.png"
        Image.new("RGB", (32, 32), (number * 20, 80, 160)).save(tmp_path / name)
        lines.append(f"{name},{CLASSES[number % 2]}")
    path = tmp_path / "photos.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def index_command(table: Path) -> list[str]:
    workspace = table.parent / "workspace"
    return [sys.executable, "-m", "mcis.platform.cli", "index", "tags", str(table), "-n", "mine", "-w", str(workspace)]


def check_index(table: Path) -> None:
    index = open_index(Workspace(table.parent / "workspace", create=False), "mine")
    assert set(index.classes) == set(CLASSES)
    assert len(index.index) == 8
    assert len(index.rejects) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "shown"),
    [({"PYTHONIOENCODING": "latin-1"}, "Löwe".encode("latin-1")), ({"LC_ALL": "C", "PYTHONUTF8": "0"}, b"L?we")],
)
def test_characters_that_a_stream_lacks_are_replaced(variables: dict[str, str], shown: bytes, table: Path) -> None:
    environment = os.environ | {"COLUMNS": "100"} | variables
    done = subprocess.run(index_command(table), capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert shown in done.stdout
    check_index(table)


@pytest.mark.slow
def test_a_command_runs_with_its_streams_closed(table: Path) -> None:
    done = subprocess.run(["sh", "-c", f"{shlex.join(index_command(table))} <&- >&- 2>&-"])
    assert done.returncode == 0
    check_index(table)


NUMBERS = """
import json, os, sys
from mcis.platform.commands.streams import prepare_streams

prepare_streams()
print("nobody reads this")
print("nor this", file=sys.stderr)
streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
child = os.waitstatus_to_exitcode(os.system("echo more"))
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump([streams, file.fileno(), child], file)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("closed", "null"), [("<&- >&- 2>&-", [0, 1, 2]), (">&-", [1]), ("2>&-", [2])])
def test_closed_streams_are_the_null_device(closed: str, null: list[int], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = shlex.join([sys.executable, "-c", NUMBERS, str(out)])
    subprocess.run(["sh", "-c", f"{command} {closed}"], check=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    streams, number, child = json.loads(out.read_text(encoding="utf-8"))
    assert [position for position, target in enumerate(streams) if target == "/dev/null"] == null
    assert number > 2, "a file has no number of a stream"
    assert child == 0
