"""Shared fixtures: a local Ray cluster, a wheel, servers for MLflow and S3, and a browser, created on first use."""

import collections
import contextlib
import http.server
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    import pyarrow.fs as pafs
    from selenium.webdriver import Chrome

hypothesis.settings.register_profile(
    "mcis", deadline=None, max_examples=60
)  # no deadline, because a busy machine is slow
hypothesis.settings.load_profile("mcis")
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("datasets", "models", "platform", "tuning")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests share the cores: torch's threads should not spin
os.environ.pop("COLUMNS", None)  # set in pytest-xdist's processes; rich would keep this width, whatever a test sets
if shutil.which("nvidia-smi"):  # without GPUs, Ray would take the variable for a limit
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests use a GPU only if it is named: docs/howto/gpu.md


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files whose slow tests take longest first, so that no process is left alone with one of them at the end.

    A slow test takes about a minute, unless its mark says how many: `pytest.mark.slow(minutes=6)`.
    """
    minutes: collections.Counter[Path] = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark:
            minutes[item.path] += mark.kwargs.get("minutes", 1)
    items.sort(key=lambda item: -minutes[item.path])


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Restores SIGINT for commands that tests start. A shell ignores it for background jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Uses one thread, because the tensors of the tests are small."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """Starts a local Ray with 4 logical CPUs for the whole session. Tests use `ray` and leave it running.

    With fewer CPUs, two training workers, their controller and a data task would wait for each other. Ray generates a
    token by default; this one stays in the process and its children, while Ray would write it to the home directory.
    """
    import ray

    # Ray's sockets are in this folder and socket paths are limited to about 100 characters, so TMPDIR may be too long.
    folder = tempfile.mkdtemp(prefix="mcis-", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_AUTH_MODE", raising=False)
        # A process keeps the first token that its Ray reads, and a test of the command line may have read one.
        environment.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16))
        environment.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            object_store_memory=512 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_head() -> Callable[..., contextlib.AbstractContextManager[dict[str, str]]]:
    """Starts a separate Ray head with token authentication: `with ray_head(log, port, *options) as env`.

    Yields the environment of its clients, which includes `variables`. All its processes are killed after the block.
    """

    @contextlib.contextmanager
    def head(log: Path, port: int, *options: str, **variables: str) -> Iterator[dict[str, str]]:
        folder = tempfile.mkdtemp(prefix="mcis-", dir="/tmp")  # Ray's sockets need a short path
        programs = Path(sys.executable).parent
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{programs}:{environment['PATH']}"}
        start = [str(programs / "ray"), "start", "--head", f"--port={port}", f"--temp-dir={folder}", "--block"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*start, "--object-store-memory=300000000", *options],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            subprocess.run(["pkill", "-9", "-f", folder], check=False)  # nodes started by its autoscaler
            shutil.rmtree(folder, ignore_errors=True)

    return head


@pytest.fixture(scope="session")
def few_scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lists `train` and `val` of 16 and 8 of the scenes that the demo draws, for `data.train_list`
    and `data.val_list`. Their tags are not those of the scenes."""
    folder = tmp_path_factory.mktemp("few_scenes")
    for split, count in (("train", 16), ("val", 8)):
        scenes = [f"{split}_{number:06}" for number in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(scenes))
        tags = [f"{scene} {number % 8}" for number, scene in enumerate(scenes)]
        (folder / f"{split}_cls.txt").write_text("\n".join(tags))
    return folder


@pytest.fixture(scope="session")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates an empty SQLite store of MLflow. Tests copy it, because creating one takes seconds."""
    from mlflow.tracking import MlflowClient

    from mcis.platform.runs import tracking_store  # imported first: it disables MLflow's telemetry  # noqa: F401

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system in memory, for example 64k; skips the test without permission to mount."""
    mounted: list[Path] = []

    def mount(size: str, **options: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        given = ",".join([f"size={size}", *(f"{name}={value}" for name, value in options.items())])
        if subprocess.run(["mount", "-t", "tmpfs", "-o", given, "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("this user may not mount a small disk")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


class TrackingServer:
    """MLflow server on a local port that can be stopped and started again.

    Args:
        store: URL of the database, as in SQLAlchemy.
        environment: Additional environment variables, for example the password of the database.
    """

    def __init__(self, folder: Path, store: str, environment: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = store
        self.folder = folder
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it responds."""
        import requests

        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", self.store, "--artifacts-destination", str(self.folder), "--workers", "1"]
        environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment | self.environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while True:
            try:
                if requests.get(f"{self.uri}/health", timeout=5).ok:
                    return
            except requests.RequestException:
                log_text = (self.folder / "server.log").read_text()
                assert self.process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.2)

    def stop(self) -> None:
        """Kills the server."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def tracking_server(tmp_path: Path) -> Iterator[Callable[..., TrackingServer]]:
    """Starts MLflow servers on a new or a given database. They are stopped after the test."""
    servers: list[TrackingServer] = []

    def start(store: str | None = None, environment: dict[str, str] | None = None) -> TrackingServer:
        folder = tmp_path / f"server-{len(servers)}"
        folder.mkdir()
        server = TrackingServer(folder, store or f"sqlite:///{folder / 'mlflow.db'}", environment or {})
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the project's wheel without network, from a copy, so that the checkout does not change."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", out, copy], capture_output=True, text=True)

    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("mcis-*.whl")
    return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Chrome"]:
    """Starts a headless Chromium of 1280 x 1000 pixels that logs its console and requests."""
    from selenium import webdriver

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"no {' and no '.join(missing)} on the PATH (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    profile = tmp_path_factory.mktemp("browser")
    arguments = ["--headless=new", "--window-size=1280,1000", "--disable-dev-shm-usage", "--hide-scrollbars"]
    arguments += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    for argument in (*arguments, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox refuses root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(executable_path=str(programs["chromedriver"])))
    driver.get("about:blank")
    yield driver
    driver.quit()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for local copies of buckets."""
    from mcis.datasets.storage.folders import COPIES_VARIABLE

    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / "copies"))
    return tmp_path / "copies"


@pytest.fixture
def bucket(place: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[pafs.FileSystem]":
    """Starts an S3 server with an empty bucket and yields its file system."""
    import pyarrow.fs as pafs
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    system = pafs.S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True)
    system.create_dir(f"bucket-{port}")  # file systems are cached by URI, so bucket names must differ
    yield pafs.SubTreeFileSystem(f"bucket-{port}", system)
    running.stop()


class FaultyS3:
    """Local read-only S3 server with configurable errors and delays.

    Attributes:
        files: Path /BUCKET/KEY -> content.
        faults: path -> HTTP error statuses of the next requests, one per request.
        slow: path -> number of next requests whose content is sent at ten bytes per second.
        num_requests: path -> number of requests.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[int]] = {}
        self.slow: dict[str, int] = {}
        self.num_requests: collections.Counter[str] = collections.Counter()
        self.server: http.server.ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        """Starts the server, on the same port as before."""
        s3 = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                s3.num_requests[path] += 1
                fault = s3.faults[path].pop(0) if s3.faults.get(path) else None
                body = b"" if fault else s3.files.get(path, b"")
                self.send_response(fault or (200 if path in s3.files else 404))
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.end_headers()
                if self.command == "GET":
                    slow = s3.slow.get(path, 0)
                    s3.slow[path] = max(0, slow - 1)
                    for first in range(0, len(body), 1 if slow else max(1, len(body))):
                        time.sleep(0.1 if slow else 0)
                        self.wfile.write(body[first:][: 1 if slow else len(body)])

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stops the server, which then refuses connections."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def uri(self, path: str) -> str:
        """Returns the URI of the file /BUCKET/KEY."""
        return f"s3:/{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http"


@pytest.fixture
def faulty_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Starts a `FaultyS3`. Its URIs contain the endpoint, so Ray workers started earlier can use them."""
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = FaultyS3()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def no_more_files() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context in which this process cannot open files: EMFILE, a transient error."""
    import resource

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)

    return block


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without pauses, in this process."""
    import tenacity

    from mcis.datasets.storage import faults

    monkeypatch.setattr(faults, "RETRY_POLICY", faults.RETRY_POLICY.copy(wait=tenacity.wait_none()))
