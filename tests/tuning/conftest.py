"""Fixtures for studies and searches: a configuration with a few synthetic images, and a database server."""

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
    """Returns a function that draws a devkit and returns its configuration: recipe `scratch` with tiny networks."""

    def build(*overrides: str, train: int = 16, val: int = 4, classes: int = 2, epochs: int = 1) -> Resolved:
        root = tmp_path / "VOC2012"
        synthetic.draw(root, train=train, val=val, size=64, classes=classes)
        options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
        return resolve("voc", "scratch", options, (*TINY, f"classifier.epochs={epochs}", *overrides))

    return build


@pytest.fixture
def postgresql() -> Iterator[tuple[str, dict[str, str]]]:
    """An empty PostgreSQL database on loopback: its address, and the environment variable with its password."""
    programs = _find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server = _PostgresqlServer(programs)
    try:
        server.start()
        try:
            yield server.address, {"PGPASSWORD": server.password}
        finally:
            server.stop()
    finally:
        shutil.rmtree(server.folder, ignore_errors=True)


def _find_programs() -> Path | None:
    """The folder of PostgreSQL's programs; None if it is not installed."""
    folders = glob.glob("/usr/lib/postgresql/*/bin")
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    initdb = shutil.which("initdb", path=path)
    return Path(initdb).parent if initdb else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class _PostgresqlServer:
    """A PostgreSQL server with a database cluster in a temporary folder.

    Args:
        programs: Folder of PostgreSQL's programs.
    """

    def __init__(self, programs: Path):
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="mcis-postgresql-", dir="/tmp"))
        self.password = secrets.token_urlsafe(24)
        self.port = _free_port()
        self.address = f"postgresql+psycopg2://mcis@127.0.0.1:{self.port}/postgres"
        self.options: dict[str, Any] = {"cwd": self.folder}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            self.options |= {"user": "postgres", "group": "postgres"}

    def start(self) -> None:
        password_file = self.folder / "password"
        password_file.write_text(self.password)
        if "user" in self.options:
            for path in (self.folder, password_file):
                shutil.chown(path, self.options["user"], self.options["group"])
        data = str(self.folder / "data")
        self._run("initdb", "-D", data, "-U", "mcis", "-A", "scram-sha-256", "--pwfile", str(password_file))

        settings = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        log = self.folder / "log"
        # The server inherits the output of pg_ctl, so a pipe would stay open as long as the server runs.
        started = subprocess.run(
            [self.programs / "pg_ctl", "-D", data, "-l", log, "-w", "-o", settings, "start"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self.options,
        )
        assert started.returncode == 0, log.read_text()

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([self.programs / program, *arguments], capture_output=True, text=True, **self.options)
        assert done.returncode == 0, done.stdout + done.stderr
