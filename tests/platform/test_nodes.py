"""Space on the nodes of a cluster, and a cluster of one small head whose autoscaler starts what work needs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.engine.nodes import missing_bundles

DASHBOARD = 28267  # outside the range that Ray takes for its workers
ADDRESS = "127.0.0.1:6379"  # Ray's fake nodes know no other port
RAY = str(Path(sys.executable).parent / "ray")
GPU, CPU = {"GPU": 1, "CPU": 0.5}, {"CPU": 1}


@pytest.mark.parametrize(
    ("bundles", "nodes", "missing"),
    [
        ([GPU, GPU], [{"CPU": 8}, {"CPU": 48, "GPU": 4}], []),
        ([GPU, GPU], [{"CPU": 8}, {"CPU": 48, "GPU": 1}], [GPU]),
        ([GPU], [{"CPU": 0.4, "GPU": 1}, {"CPU": 8}], [GPU]),
        ([CPU, GPU], [{"CPU": 1, "GPU": 1}], [CPU]),
        ([{"CPU": 2}, {"CPU": 2}], [{"CPU": 3}, {"CPU": 1}], [{"CPU": 2}]),
        ([], [], []),
    ],
)
def test_bundles_have_room_on_one_node_each(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]], missing: list[dict[str, float]]
) -> None:
    before = json.dumps(nodes)
    assert missing_bundles(bundles, nodes) == missing
    assert json.dumps(nodes) == before


def scaling(workers: dict[str, dict[str, float]]) -> dict[str, object]:
    """A cluster file with a head of one CPU, and up to two nodes of each of some types, which this machine plays."""
    types = {
        name: {"resources": of, "node_config": {}, "min_workers": 0, "max_workers": 2} for name, of in workers.items()
    }
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    keys = (
        "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands",
        "head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
    )  # fmt: skip
    provider = {"type": "fake_multinode", "disable_node_updaters": True, "disable_launch_config_check": True}
    return {key: [] for key in keys} | {
        "cluster_name": "fake", "max_workers": 4, "upscaling_speed": 16.0, "idle_timeout_minutes": 5,
        "provider": provider, "auth": {"ssh_user": "nobody"}, "docker": {}, "file_mounts": {},
        "file_mounts_sync_continuously": False, "head_node": {}, "worker_nodes": {},
        "head_node_type": "ray.head.default", "available_node_types": {"ray.head.default": head, **types},
    }  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The head with its autoscaler, which asks for a token; yields the environment of its clients."""
    folder = tempfile.mkdtemp(prefix="mcis-", dir="/tmp")  # Ray's sockets need a short path
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(scaling({"gpu": {"CPU": 2, "GPU": 2}, "cpu": {"CPU": 4}})))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "600"}
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ADDRESS}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    start = [RAY, "start", "--head", "--port=6379", "--num-cpus=1", "--num-gpus=0", "--dashboard-host=127.0.0.1"]
    start += [f"--dashboard-port={DASHBOARD}", "--dashboard-agent-listen-port=28366"]
    start += [f"--temp-dir={folder}", "--object-store-memory=300000000", f"--autoscaling-config={file}", "--block"]
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(
            start,
            env={n: v for n, v in env.items() if n != "RAY_ADDRESS"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        for _ in range(60):
            if subprocess.run([RAY, "status", "--address", ADDRESS], env=env, capture_output=True).returncode == 0:
                break
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            time.sleep(2)
        yield env
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-9", "-f", folder], check=False)  # the fake nodes are the monitor's children
        shutil.rmtree(folder, ignore_errors=True)


ASK = """
import sys, ray
from mcis.datasets.errors import UserError
from mcis.platform.engine.nodes import wait_for_nodes

ray.init(logging_level="ERROR")
assert not ray.cluster_resources().get("GPU")
wait_for_nodes([{"GPU": 1, "CPU": 0.5}] * 3, 3, "a training")
assert ray.cluster_resources()["GPU"] >= 3, ray.cluster_resources()
try:
    wait_for_nodes([{"GPU": 8}], 0.05, "another")
except UserError as error:
    print(error.found)
"""


@pytest.mark.slow
def test_gpus_come_when_they_are_asked_for_and_what_cannot_come_is_said(cluster: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", ASK], env=cluster, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting for nodes of the cluster: a training needs 3 x (1 GPU, 0.5 CPU) more" in done.stdout
    assert "another needs 1 x (8 GPU); after 0.05 minutes the cluster lacks 1 x (8 GPU)" in done.stdout


@pytest.mark.slow
def test_a_job_of_a_head_of_one_cpu_has_its_workers_started_and_ends_as_on_one_machine(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """Through `mcis submit`, with the cluster's token."""
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    command = ["voc", "--name", "run", "--recipe", "small", "--voc", str(root)]
    command += ["--set", f"data.classes={root / 'classes.txt'}"]
    for value in (
        "classifier.epochs=1", "classifier.channels=24", "classifier.input_size=64", "classifier.batch=8",
        "segmenter.channels=24", "segmenter.steps=2", "segmenter.batch=4", "segmenter.width=16", "segmenter.crop=64",
        "pseudo_masks.smallest=0", "compute.threads=1", "compute.workers=2",
    ):  # fmt: skip
        command += ["--set", value]
    alone = {name: value for name, value in cluster.items() if not name.startswith("RAY_")}
    scores = []
    for name, env in (("cluster", cluster), ("alone", alone)):
        workspace = tmp_path / name
        call = [sys.executable, "-m", "mcis.platform.cli", "run"]
        if name == "cluster":
            call = [*call[:-1], "submit", "--address", f"http://127.0.0.1:{DASHBOARD}"]
        call += [*command, "--workspace", str(workspace)]
        if name == "cluster":
            call += ["--set", "compute.worker_cpus=1.5", "--set", "compute.decode=threads"]
        done = subprocess.run(call, env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("waiting for nodes of the cluster" in done.stdout) == (name == "cluster")
        written = json.loads((workspace / "runs/run/scores.json").read_text())["scores"]
        scores.append([(each["what"], each["name"], each["miou"]) for each in written])
    assert scores[0] == scores[1]
