"""A workspace and its data in a bucket of an S3 server: the same run, on one machine, another, and several at once."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.files import csv_table
from mcis.platform.runs.listing import list_images

TINY = (
    "classifier.epochs=2",
    "classifier.batch=4",
    "classifier.channels=24",
    "classifier.input_size=64",
    "localize.related=2",
    "segmenter.channels=24",
    "segmenter.min_steps=4",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "report.panels=2",
    "compute.shard_rows=8",
    "compute.threads=1",
    "compute.stop_if_not_learning=false",
)
S3 = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
S3 |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
RAY_PORT = 26479


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server whose bucket holds synthetic scenes and a table of their tags; yields the environment of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    folder = tmp_path_factory.mktemp("server")
    with (folder / "server.log").open("wb") as log, pytest.MonkeyPatch.context() as environment:
        for name, value in S3.items():
            environment.setenv(name, value)
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(240):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.5)
            _fill(pafs.S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True))
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
            yield kept | S3 | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        finally:
            server.kill()
            server.wait()


def _fill(system: pafs.FileSystem) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "VOC2012"
        synthetic.draw(root, train=20, val=4, size=64, classes=3)
        options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
        drawn = list_images(resolve("voc", "scratch", options).config)
        system.create_dir("bucket")
        rows = []
        for row in drawn.table.to_pylist():
            files = {kind: Path(row[uri]) for kind, uri in (("images", "uri"), ("masks", "mask_uri"))}
            for kind, file in files.items():
                with system.open_output_stream(f"bucket/photos/{kind}/{file.name}") as stream:
                    stream.write(file.read_bytes())
            names = [f"{kind}/{file.name}" for kind, file in files.items()]
            rows.append([names[0], ";".join(drawn.classes[tag] for tag in row["tags"]), row["split"], names[1]])
        with system.open_output_stream("bucket/photos/photos.csv") as stream:
            stream.write(csv_table(["image", "tags", "split", "mask"], rows))


def mcis(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mcis.platform.cli", *arguments]


def run_in(workspace: str, *more: str) -> list[str]:
    """The command of a tiny run on the bucket's photographs."""
    command = mcis("run", "tags", "--tags", "s3://bucket/photos/photos.csv", "--recipe", "scratch", "--name", "a")
    command += ["--workspace", workspace]
    return [*command, *(f"--set={value}" for value in (*TINY, *more))]


def output_of(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def on_disk(bucket: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The scores of the same run in a workspace on a local disk."""
    folder = tmp_path_factory.mktemp("disk")
    output_of(run_in(str(folder / "workspace")), bucket, folder)
    return of_code((folder / "workspace/runs/a/scores.json").read_text())


def scores_in(bucket: dict[str, str], workspace: str) -> str:
    system = pafs.S3FileSystem(endpoint_override=bucket["AWS_ENDPOINT_URL"].removeprefix("http://"), scheme="http")
    with system.open_input_stream(f"{workspace.removeprefix('s3://')}/runs/a/scores.json") as stream:
        return of_code(bytes(stream.read()).decode())


def of_code(scores: str) -> str:
    """Scores without the commit, which changes if a file is edited meanwhile."""
    return "\n".join(str(score | {"git": None}) for score in json.loads(scores)["scores"])


@pytest.mark.slow
def test_a_killed_run_continues_on_another_machine_with_the_same_scores(
    bucket: dict[str, str], on_disk: str, tmp_path: Path
) -> None:
    """It is killed in the classifier's training; the other machine continues from its checkpoint. A third exports."""
    workspace = "s3://bucket/killed"
    kill_in_training(run_in(workspace, "compute.checkpoint_steps=1"), bucket, tmp_path)
    other = bucket | {"MCIS_COPIES": str(tmp_path / "other")}
    out = output_of(run_in(workspace, "compute.checkpoint_steps=1"), other, tmp_path)
    assert "index: already computed" in out
    assert scores_in(bucket, workspace) == on_disk

    third = bucket | {"MCIS_COPIES": str(tmp_path / "third")}
    out = output_of(run_in(workspace), third, tmp_path)
    assert out.count("already computed") == 7, out
    assert "finished" in output_of(mcis("runs", "--workspace", workspace), third, tmp_path)
    exported = tmp_path / "masks"
    output_of(mcis("export", "masks", "--name", "a", "--workspace", workspace, "--out", str(exported)), third, tmp_path)
    assert len(list(exported.rglob("*.png"))) == 20

    output_of(mcis("gc", "--run", "a", "--delete", "--workspace", workspace), third, tmp_path)
    system = pafs.S3FileSystem(endpoint_override=bucket["AWS_ENDPOINT_URL"].removeprefix("http://"), scheme="http")
    left = system.get_file_info(pafs.FileSelector("bucket/killed", recursive=True, allow_not_found=True))
    assert [info.path for info in left if info.type == pafs.FileType.File] == []


def kill_in_training(command: list[str], bucket: dict[str, str], folder: Path) -> None:
    """Starts a command on a machine of its own and kills its processes when it has written a checkpoint."""
    copies = folder / "first"
    with subprocess.Popen(
        command,
        env=bucket | {"MCIS_COPIES": str(copies)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        start_new_session=True,
    ) as running:
        until = time.monotonic() + 300
        while not any(copies.glob("s3/bucket/killed/store/train_classifier-*/checkpoint.pt")):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGKILL)


@pytest.fixture
def nodes(bucket: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head without CPUs and two workers, each of which has a disk of its own where the others have theirs."""
    copies, session = tmp_path / "copies", tempfile.mkdtemp(prefix="mcis-", dir="/tmp")
    copies.mkdir(mode=0o700)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    ray = str(Path(sys.executable).parent / "ray")
    environment = bucket | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "MCIS_COPIES": str(copies)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    own = f"mount -t tmpfs -o mode=700 tmpfs {copies}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", own], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk of a process's own")
    head = [ray, "start", "--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false"]
    head += [f"--temp-dir={session}", "--object-store-memory=200000000", "--block"]
    worker = f"{own} && exec {ray} start --address=127.0.0.1:{RAY_PORT} --num-cpus=3 --block"
    worker += " --object-store-memory=200000000"
    commands = [head, *[["unshare", "--mount", "sh", "-c", worker]] * 2]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = tmp_path / f"node{len(processes)}.log"
            with log.open("wb") as out:
                node = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
                processes.append(node)
            while "Ray runtime started" not in log.read_text():
                assert node.poll() is None, log.read_text()
                time.sleep(0.1)
        yield environment | {"RAY_ADDRESS": f"127.0.0.1:{RAY_PORT}"}
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        subprocess.run(["pkill", "-9", "-f", session], check=False)  # processes that Ray started in groups of their own
        shutil.rmtree(session, ignore_errors=True)


@pytest.mark.slow
def test_a_run_on_nodes_without_a_shared_disk(
    bucket: dict[str, str], nodes: dict[str, str], on_disk: str, tmp_path: Path
) -> None:
    """All stages, and trainings with two workers on two nodes, share files only through the bucket."""
    workspace = "s3://bucket/nodes"
    two = ("compute.workers=2", "compute.worker_cpus=1.5", "compute.decode=threads")
    out = output_of(run_in(workspace, *two), nodes, tmp_path)
    assert "the nodes share no disk" in out
    assert scores_in(bucket, workspace) == on_disk
