"""Tests of jobs: `ray job submit` and `mcis submit` on a cluster with a token, and an unreliable dashboard."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import typer.main
from aiohttp import web

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.cli import app
from mcis.platform.commands.submit import job_command
from mcis.platform.engine.jobs import copy_code, run_job
from mcis.platform.runs.version import git_commit, project_version

COMMANDS: Any = typer.main.get_command(app)
NAMED = ["--name", "x", "--workspace", "/workspace"]
PORT, DASHBOARD = 26379, 28265  # outside the port range of Ray's workers
RAY = str(Path(sys.executable).parent / "ray")
TINY = (
    "classifier.epochs=1",
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "segmenter.channels=24",
    "segmenter.min_steps=2",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "pseudo_masks.min_foreground_fraction=0",
)


@pytest.fixture(scope="module")
def cluster(ray_head: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts a separate head node and yields the environment of its clients."""
    options = ["--num-cpus=4", "--dashboard-host=127.0.0.1", f"--dashboard-port={DASHBOARD}"]
    options += ["--dashboard-agent-listen-port=28365"]  # the default port may belong to another Ray
    # The nodes have all dependencies; otherwise Ray's pip would install them again with the wheel.
    log = tmp_path_factory.mktemp("head") / "head.log"
    with ray_head(log, PORT, *options, PIP_NO_DEPS="1") as env:
        del env["RAY_ADDRESS"]
        listing = [RAY, "job", "list", "--address", f"http://127.0.0.1:{DASHBOARD}"]
        while subprocess.run(listing, env=env, capture_output=True).returncode:
            time.sleep(2)
        yield env


def submitted(root: Path, workspace: Path, *more: str) -> list[str]:
    """Returns the arguments of `mcis submit` for a tiny run."""
    command = [sys.executable, "-m", "mcis.platform.cli", "submit", "voc", "--name", "job", "--voc", str(root)]
    command += ["--recipe", "scratch", "--workspace", str(workspace), "--address", f"http://127.0.0.1:{DASHBOARD}"]
    return [*command, *(f"--set={value}" for value in (*TINY, f"data.classes={root / 'classes.txt'}", *more))]


def jobs(env: dict[str, str]) -> list[str]:
    listing = [RAY, "job", "list", "--address", f"http://127.0.0.1:{DASHBOARD}"]
    done = subprocess.run(listing, env=env, capture_output=True, text=True, check=True)
    return re.findall(r"submission_id='([^']+)'", done.stdout)


@pytest.mark.slow
def test_a_submitted_run_is_followed_reattached_stopped_and_resumed(cluster: dict[str, str], tmp_path: Path) -> None:
    """Submits at once after the start of the head, which responds before it can start jobs."""
    root = tmp_path / "VOC2012"
    workspace = tmp_path / "workspace"
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    refused = {name: value for name, value in cluster.items() if not name.startswith("RAY_AUTH")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how: dict[str, Any] = {"env": cluster, "text": True, "cwd": tmp_path, **pipes}
    without = subprocess.run([*submitted(root, workspace), "--wait", "0"], **how | {"env": refused})

    assert without.returncode == 1
    assert "accepts no job" in without.stderr

    call = submitted(root, workspace, "classifier.epochs=400", "compute.stop_if_not_learning=false")
    with subprocess.Popen(call, **how) as following:
        wait_for(lambda: any((workspace / "store").glob("train_classifier-*/steps.jsonl")), following)
        following.send_signal(signal.SIGINT)
        out, errors = following.communicate(timeout=60)

    assert following.returncode == 130, out + errors
    assert "continues; the same command shows it again" in errors
    (number,) = jobs(cluster)
    with subprocess.Popen(call, **how) as following:
        assert following.stdout is not None
        assert f"job {number} already runs" in following.stdout.readline()
        other = subprocess.run(submitted(root, workspace, "seed=7"), **how)
        assert other.returncode == 1
        assert "with another command" in other.stderr
        stop = [RAY, "job", "stop", number, "--address", f"http://127.0.0.1:{DASHBOARD}"]
        subprocess.run(stop, env=cluster, capture_output=True, check=True)
        out, errors = following.communicate(timeout=120)

    assert following.returncode == 1, out + errors
    assert f"job {number}: STOPPED" in out

    done = subprocess.run(call, **how)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "index: already computed" in done.stdout
    assert "SUCCEEDED" in done.stdout
    assert len(jobs(cluster)) == 2

    scores = json.loads((workspace / "runs" / "job" / "scores.json").read_text())["scores"]
    assert {s["output"] for s in scores} == {"localization_maps", "pseudo_masks", "baseline", "segmentation"}


@pytest.mark.slow
def test_the_command_of_the_documentation_submits_a_job(cluster: dict[str, str], tmp_path: Path) -> None:
    """With the paths and the address of this cluster; `mine.toml` also makes the run small."""
    synthetic.draw(tmp_path / "VOC2012", train=12, val=2, size=64, classes=2)
    photographs = sorted((tmp_path / "VOC2012" / "JPEGImages").glob("*.jpg"))
    rows = [f"{path.relative_to(tmp_path)},{'ab'[number % 2]}" for number, path in enumerate(photographs)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,tags", *rows]))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.toml").write_text("seed = 1\nclassifier.input_size = 96\nclassifier.min_steps = 4\n")

    page = (Path(__file__).resolve().parent.parent / "docs" / "howto" / "cluster.md").read_text()
    (script,) = (block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "ray job submit" in block)
    script = script.replace("http://127.0.0.1:8265", f"http://127.0.0.1:{DASHBOARD}").replace(
        "/mnt/mcis", str(tmp_path)
    )
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-euc", script], env=cluster, cwd=tmp_path / "own", **output)

    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"Job 'raysubmit_\w+' succeeded", done.stdout)
    run = tmp_path / "workspace" / "runs" / "anna-test"
    assert "seed = 1  # mine.toml\n" in (run / "config.toml").read_text()
    assert list((tmp_path / "workspace" / "store").glob("pseudo_masks-*/summary.json"))


def wait_for(happens: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    for _ in range(1500):
        if happens():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    pytest.fail("it did not happen")


def test_a_job_uses_absolute_paths_and_uploads_experiments(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("seed = 3\n")
    mine = str(tmp_path / "mine.toml")
    given = ["voc", "--voc=/data/a=b", "--config", mine, "--set", "seed=4", *NAMED]
    command = job_command(COMMANDS, given, tmp_path / "files")
    expected = ["run", "voc", "--voc=/data/a=b", "--config", "experiment.toml", "--set", "seed=4", *NAMED]

    assert command[3:] == expected
    assert (tmp_path / "files" / "experiment.toml").read_text() == "seed = 3\n"

    study = ["study", "run", "table5", "--tags", "s3://bucket/table.csv", *NAMED]
    assert job_command(COMMANDS, study, tmp_path / "other")[3:] == study
    table = ["study", "run", "table5", "s3://bucket/table.csv", "localize.related=5", *NAMED]
    assert job_command(COMMANDS, table, tmp_path / "table")[3:] == table
    indexed = ["index", "/data/table.csv", "data.min_side=40", *NAMED]
    assert job_command(COMMANDS, indexed, tmp_path / "indexed")[3:] == indexed
    of_own = job_command(COMMANDS, ["study", "run", mine, "tags", "--seeds=2", *NAMED], tmp_path / "own")
    assert of_own[3:] == ["study", "run", "study.toml", "tags", "--seeds=2", *NAMED]
    assert (tmp_path / "own" / "study.toml").read_text() == "seed = 3\n"

    with_project = ["study", "run", "table2", "tags", *NAMED, "--config=./mine.toml"]
    taken_along = [*with_project[:-1], "--config=experiment.toml"]
    assert job_command(COMMANDS, with_project, tmp_path / "library")[3:] == taken_along


@pytest.mark.parametrize(
    "wrong",
    [
        ["voc", "--voc", "VOC2012"],
        ["voc", "--workspace=w"],
        ["voc", "--config", "absent.toml"],
        ["study", "run", "absent.toml", "tags"],
        ["predict", "/photos", "--out", "predicted"],
        ["predict", "/photos", "more", "--out", "/predicted"],
        ["index", "tags", "photos.csv"],
        ["index", "photos.csv"],
        ["photos.csv"],
        ["study", "run", "effect", "photos.csv"],
        ["index", "browse", "--out=page.html"],
        ["index", "nothing"],
        ["voc", "--vox", "/data"],
        ["voc", "--until", "nothing"],
    ],
)
def test_relative_and_missing_paths_are_errors(tmp_path: Path, wrong: list[str]) -> None:
    message = r"nodes|cannot be read|command index nothing|No such option: --vox|is not one of"
    named = NAMED[: 2 if "--workspace=w" in wrong else None]
    with pytest.raises(Exception, match=message):
        job_command(COMMANDS, [*wrong, *named], tmp_path / "files")


@pytest.mark.parametrize("words", [["evaluate", "/masks", "voc"], ["saliency", "voc", "/data/voc"], ["demo"]])
def test_commands_that_cannot_be_jobs_are_refused_here(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError, match=f"mcis {words[0]} as a job") as caught:
        job_command(COMMANDS, [*words, *NAMED], tmp_path / "files")
    assert caught.value.expected == "one of run, study, index, predict"


def test_a_job_predicts_with_the_network_of_its_run(tmp_path: Path) -> None:
    words = ["predict", "/photos", "--out", "/out"]
    assert job_command(COMMANDS, [*words, *NAMED], tmp_path / "files")[3:] == [*words, *NAMED]
    with pytest.raises(UserError, match="--model /network of a job"):
        job_command(COMMANDS, [*words, "--model", "/network", *NAMED], tmp_path / "refused")


def test_a_job_uses_its_own_code_even_if_the_node_has_an_installed_mcis(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "mcis"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    package = copy_code(tmp_path / "job")

    paths = [str(package.parent), str(installed.parent)]
    code = f"import sys; sys.path[:0] = {paths}; import mcis, mcis.datasets.errors; print(mcis.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(package / "__init__.py"), done.stderr


def test_a_job_shows_its_workers_on_request(tmp_path: Path) -> None:
    for number, (words, shows) in enumerate({"study run table5": True, "index show": False}.items()):
        arguments = [*words.split(), *NAMED]
        command = job_command(COMMANDS, arguments, tmp_path / str(number), verbose=True)
        assert command[3:] == ([*arguments, "--verbose"] if shows else arguments)


RUN = "/workspace/runs/first"
COMMAND = ["python", "-m", "mcis.platform.cli", "run", "voc"]
LOG = [f"line {number}\n" for number in range(8)]


class Dashboard:
    """Fake of Ray's job API with what following a job needs. Each complete read of the log finds two more lines."""

    def __init__(self) -> None:
        self.lines = LOG
        self.cut = set[int]()
        self.status = "RUNNING"
        self.entrypoint = shlex.join(COMMAND)
        self.metadata: dict[str, str] | None = {"run": RUN}
        self.job_exists = True
        self.listed = True
        self.submissions = self.looks = self.port = 0
        self.variables: dict[str, str] = {}

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": ray.__version__})

    async def package(self, _: web.Request) -> web.Response:
        """The package exists already."""
        return web.Response()

    async def submit(self, request: web.Request) -> web.Response:
        """Starts the job, and drops the response."""
        job = await request.json()
        assert job["metadata"] == {"run": RUN}
        self.metadata = job["metadata"]
        self.variables = job["runtime_env"]["env_vars"]
        self.entrypoint = job["entrypoint"]
        self.submissions += 1
        self.listed = True
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def job(self, _: web.Request) -> web.Response:
        if not self.job_exists:
            return web.Response(text="Job raysubmit_1 does not exist", status=404)
        return web.json_response(self.details())

    async def jobs(self, _: web.Request) -> web.Response:
        return web.json_response([self.details()] if self.listed else [])

    def details(self) -> dict[str, object]:
        return {
            "type": "SUBMISSION",
            "submission_id": "raysubmit_1",
            "status": self.status,
            "entrypoint": self.entrypoint,
            "metadata": self.metadata,
        }

    async def logs(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.looks in self.cut:
            assert request.transport is not None
            request.transport.abort()
        elif 2 * self.looks >= len(self.lines):
            self.status = "SUCCEEDED"
        return web.json_response({"logs": "".join(self.lines[: 2 * self.looks])})

    @contextlib.contextmanager
    def up(self) -> Iterator[str]:
        """Serves in a thread, always at the same port, and yields the address."""
        loop = asyncio.new_event_loop()
        started = threading.Event()
        stop = asyncio.Event()

        async def serve() -> None:
            served = web.Application()
            served.router.add_get("/api/version", self.version)
            served.router.add_get("/api/packages/{tail:.*}", self.package)
            served.router.add_post("/api/jobs/", self.submit)
            served.router.add_get("/api/jobs/", self.jobs)
            served.router.add_get("/api/jobs/raysubmit_1", self.job)
            served.router.add_get("/api/jobs/raysubmit_1/logs", self.logs)
            runner = web.AppRunner(served, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port)
            await site.start()
            self.port = runner.addresses[0][1]
            started.set()
            await stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()

        assert started.wait(10)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dashboard:
    (tmp_path / "files").mkdir()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("mcis.platform.engine.jobs._POLL_INTERVAL", 0.05)
    return Dashboard()


def test_an_interrupted_log_is_shown_once(
    dashboard: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboard.lines = [*LOG, "\tcat\x1b]0;title\x07\n"]
    dashboard.cut = {2, 3}
    with dashboard.up() as address:
        assert run_job(address, RUN, COMMAND, tmp_path, minutes=1) == 0
    head, *shown = capsys.readouterr().out.splitlines(keepends=True)
    assert "already runs" in head
    assert shown == [*LOG, "\tcat?]0;title?\n", "job raysubmit_1: SUCCEEDED\n"], "no control characters"


def test_a_job_of_ray_job_submit_is_followed(
    dashboard: Dashboard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same words in another order, without the metadata of `mcis submit`; then another command of the same run."""
    dashboard.entrypoint = "mcis run --name first --workspace /workspace voc --gpu"
    dashboard.metadata = None
    dashboard.status = "PENDING"
    command = [*COMMAND, "--gpu", "--name", "first", "--workspace", "/workspace"]
    with dashboard.up() as address:
        assert run_job(address, RUN, command, tmp_path, minutes=1) == 0
        waiting = capsys.readouterr().out.splitlines()[:2]
        dashboard.status = "RUNNING"
        with pytest.raises(UserError, match="raysubmit_1 already runs on /workspace/runs/first with another command"):
            run_job(address, RUN, [*command, "seed=3"], tmp_path, minutes=1)
        assert dashboard.submissions == 0
        assert waiting == ["job raysubmit_1 already runs; its log:", "waiting for the cluster to start the job"]

        dashboard.entrypoint = "mcis run --name second --workspace /workspace voc --gpu"
        assert run_job(address, RUN, command, tmp_path, minutes=1) == 0
    assert dashboard.submissions == 1, "the job of another run is not followed"


def test_a_job_is_submitted_once_if_the_response_is_lost(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.listed = False
    with dashboard.up() as address:
        assert run_job(address, RUN, COMMAND, tmp_path, minutes=1) == 0
    assert dashboard.submissions == 1


def test_a_job_knows_the_version_and_the_commit_of_its_code(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may have the dependencies only, and the copied code is in no checkout."""
    version, commit = project_version(), git_commit()
    dashboard.listed = False
    with dashboard.up() as address:
        assert run_job(address, RUN, COMMAND, tmp_path, minutes=1) == 0

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert project_version() == "unknown"
    for name, value in dashboard.variables.items():
        monkeypatch.setenv(name, value)
    assert (project_version(), git_commit()) == (version, commit)


def test_a_job_that_ended_with_its_head_is_reported_and_restarted(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.job_exists = False
    with dashboard.up() as address:
        with pytest.raises(UserError, match=r"no longer answers questions about job raysubmit_1: .* does not exist"):
            run_job(address, RUN, COMMAND, tmp_path, minutes=1)
        dashboard.job_exists = True
        dashboard.listed = False
        assert run_job(address, RUN, COMMAND, tmp_path, minutes=1) == 0

    assert dashboard.submissions == 1


def test_the_job_continues_without_the_dashboard(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.cut = set(range(1, 1000))
    with dashboard.up() as address, pytest.raises(UserError, match="no longer answers questions about job") as caught:
        run_job(address, RUN, COMMAND, tmp_path, minutes=0.01)
    assert "shows the job again if that still runs" in caught.value.remedy


@pytest.mark.parametrize(
    "arguments",
    [
        ["tags", "--tags", "s3://AKIA:hunter2@bucket/a.csv"],
        ["tags", "--tags=abfs://c@acct/a.csv?sig=hunter2"],
        ["tags", "--set", "data.tags.table=s3://AKIA:hunter2@bucket/a.csv"],
        ["predict", "s3://bucket/a.jpg?X-Amz-Credential=hunter2", "--out", "/out"],
    ],
)
def test_credentials_in_arguments_of_a_job_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(UserError, match="password, key, token or signature") as caught:
        job_command(COMMANDS, arguments, tmp_path / "files")
    assert "hunter2" not in str(caught.value)
