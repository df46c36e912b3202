"""What the tests share: one small Ray cluster of this machine and one built wheel, made when first asked for."""

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("datasets", "models", "platform", "tuning")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tests' tensors are small: several threads are slower, much so on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A Ray of this machine with 4 logical CPUs for the whole session; tests use `ray` and leave it running.

    Four, because two train workers, their controller and a data task wait for each other in silence on fewer. Ray
    asks for a token by default; this one stays in the process and its children, where Ray would otherwise write one
    into the home directory.
    """
    import ray

    # Ray's sockets lie below this folder and a socket's path holds about 100 characters, so TMPDIR may be too long.
    folder = tempfile.mkdtemp(prefix="mcis-", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_AUTH_MODE", raising=False)
        # A process keeps the first token that its Ray reads, and a test of the command line may have started one.
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built without network from a copy, so that the checkout stays as it is."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", out, copy], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("mcis-*.whl")
    return path


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run that has trained a segmenter, of random weights, in a workspace of its own; returns its folder.

    `sides` are the longer sides of the images that its index has.
    """

    def make(classes: int, *assignments: str, sides: Sequence[int] = ()) -> Path:
        import pyarrow as pa
        import torch

        from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA
        from mcis.platform.config.experiment import experiment_text
        from mcis.platform.config.resolve import resolve
        from mcis.platform.networks.build import build_segmenter
        from mcis.platform.networks.checkpoints import WEIGHTS, save_weights
        from mcis.platform.runs.results import IndexResult, write_result
        from mcis.platform.runs.workspace import Workspace, write_table, write_text

        workspace = Workspace(tmp_path / "workspace")
        index, segmenter = (workspace.finished(stage, "drawn") for stage in ("index", "train_segmenter"))
        row = {"domain": "target", "split": "train", "tags": [0], "height": 16}
        texts = {"image_id", "uri", "content_hash"}
        rows = [row | {"width": side} | dict.fromkeys(texts, str(n)) for n, side in enumerate(sides)]
        write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
        write_table(index / "rejects.parquet", REJECTS_SCHEMA.empty_table())
        names = tuple(f"class {k}" for k in range(classes))
        write_result(index, IndexResult(classes=names, counts={"images": {}}), stage="index", key="drawn", seconds=0.0)
        resolved = resolve("voc", "small", assignments=assignments)
        torch.manual_seed(0)
        network = build_segmenter(resolved.config.segmenter, classes)
        *_, last, _ = network.parameters()
        torch.nn.init.normal_(last)  # else nearly every pixel has the same label
        save_weights(network, segmenter / WEIGHTS, {})
        write_text(workspace.run("drawn").config, experiment_text(resolved.config, resolved.origins))
        workspace.record_outputs("drawn", {"index": index, "train_segmenter": segmenter})
        return workspace.run("drawn").path

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Chrome"]:
    """A Chromium without a window, 1280 x 1000 pixels, that logs its console and what it requests."""
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
