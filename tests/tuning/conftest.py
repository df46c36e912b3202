"""Configurations of studies and searches over a few drawn images, and a database server."""

import glob
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import Resolved, resolve

TINY = (
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "segmenter.channels=24",
    "pseudo_masks.min_foreground_fraction=0",
    "report.panels=2",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)


@pytest.fixture
def small_voc(tmp_path: Path) -> Callable[..., Resolved]:
    """Draws a devkit; its configuration by the recipe `scratch`, with networks as small as they go."""

    def build(*overrides: str, train: int = 16, val: int = 4, classes: int = 2, epochs: int = 1) -> Resolved:
        root = tmp_path / "VOC2012"
        synthetic.draw(root, train=train, val=val, size=64, classes=classes)
        options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
        return resolve("voc", "scratch", options, (*TINY, f"classifier.epochs={epochs}", *overrides))

    return build


@pytest.fixture
def postgresql() -> Iterator[tuple[str, dict[str, str]]]:
    """An empty PostgreSQL database of its own on loopback: its address, and the variable with its password."""
    folders = [Path(path) for path in glob.glob("/usr/lib/postgresql/*/bin")]
    found = shutil.which("initdb", path=os.pathsep.join(map(str, folders)) + os.pathsep + os.environ.get("PATH", ""))
    if found is None:
        pytest.skip("PostgreSQL is not installed")
    programs = Path(found).parent
    user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}  # it refuses root
    folder = Path(tempfile.mkdtemp(prefix="mcis-postgresql-", dir="/tmp"))
    password = secrets.token_urlsafe(24)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        (folder / "password").write_text(password)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, **user)

        def run(program: str, *arguments: str) -> None:
            command: list[Any] = [programs / program, *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **user)  # type: ignore[call-overload]
            assert done.returncode == 0, done.stdout + done.stderr

        data, log = str(folder / "data"), str(folder / "log")
        run("initdb", "-D", data, "-U", "mcis", "-A", "scram-sha-256", "--pwfile", str(folder / "password"))
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        # Its output goes to the log alone: a pipe would stay open as long as the server.
        started = subprocess.run(
            [programs / "pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **user,  # type: ignore[call-overload]
        )
        assert started.returncode == 0, (folder / "log").read_text()
        try:
            yield f"postgresql+psycopg2://mcis@127.0.0.1:{port}/postgres", {"PGPASSWORD": password}
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
