"""Space on the nodes of a cluster, and a cluster of one small head whose autoscaler starts what work needs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.gpu_mapping import actors_per_gpu
from mcis.platform.engine.nodes import mapping_task, missing_bundles, tasks_to_submit
from mcis.platform.engine.training import _required_bundles

PORT = 6379  # Ray's fake nodes know no other
GPU, CPU = {"GPU": 1, "CPU": 0.5}, {"CPU": 1}
GIB = 2**30
TASK = {"CPU": 1, "memory": 2 * GIB}
SMALL_TASK = {"CPU": 1, "memory": GIB}


@pytest.mark.parametrize(
    ("bundles", "nodes", "missing"),
    [
        ([GPU, GPU], [{"CPU": 8}, {"CPU": 48, "GPU": 4}], []),
        ([GPU, GPU], [{"CPU": 8}, {"CPU": 48, "GPU": 1}], [GPU]),
        ([GPU], [{"CPU": 0.4, "GPU": 1}, {"CPU": 8}], [GPU]),
        ([CPU, GPU], [{"CPU": 1, "GPU": 1}], [CPU]),
        ([{"CPU": 2}, {"CPU": 2}], [{"CPU": 3}, {"CPU": 1}], [{"CPU": 2}]),
        ([TASK, TASK], [{"CPU": 8, "memory": 4 * GIB}], []),
        ([TASK, TASK], [{"CPU": 8, "memory": 3 * GIB}], [TASK]),
        ([TASK], [{"CPU": 64}, {"memory": 64 * GIB}], [TASK]),
        ([SMALL_TASK, TASK], [{"CPU": 1, "memory": 2 * GIB}, {"CPU": 1, "memory": GIB}], []),
        ([], [], []),
    ],
)
def test_bundles_have_room_on_one_node_each(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]], missing: list[dict[str, float]]
) -> None:
    before = json.dumps(nodes)
    assert missing_bundles(bundles, nodes) == missing
    assert json.dumps(nodes) == before


def test_one_core_is_enough_where_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert missing_bundles(_required_bundles(ComputeConfig(cpus=1), decodes_images=True), [{"CPU": 1.0}]) == []
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert _required_bundles(ComputeConfig(cpus=1), decodes_images=True)[-1] == CPU
    assert CPU not in _required_bundles(ComputeConfig(cpus=1), decodes_images=False), "nothing is decoded"


def test_a_task_of_a_mapping_reserves_memory_in_bytes_if_configured() -> None:
    assert mapping_task(ComputeConfig()) == {"CPU": 1}
    assert mapping_task(ComputeConfig(memory_gb=1.5)) == {"CPU": 1, "memory": 3 * 2**29}


def test_tasks_follow_the_cpus_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many tasks as CPUs, so that some wait and the autoscaler starts nodes; a single machine cannot grow."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert tasks_to_submit([{"CPU": 4}], CPU) == 2
    assert tasks_to_submit([{"CPU": 1}], CPU) == 1
    assert tasks_to_submit([{}, {"CPU": 4}, {"CPU": 32, "GPU": 1}], CPU) == 72
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert tasks_to_submit([{"CPU": 4}], CPU) == 8


def test_tasks_follow_the_memory_that_they_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes hold 1, 3 and 0 tasks."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    nodes = [{"CPU": 4, "memory": 3 * GIB}, {"CPU": 3, "memory": 64 * GIB}, {"CPU": 8}]
    assert tasks_to_submit(nodes[:1], TASK) == 1
    assert tasks_to_submit(nodes, TASK) == 8


@pytest.mark.parametrize(
    ("nodes", "share", "shards", "actors"),
    [
        ([{"CPU": 8, "GPU": 1}], 1.0, 100, 8),
        ([{"CPU": 8, "GPU": 1}, {"CPU": 64}], 1.0, 100, 8),
        ([{"CPU": 8, "GPU": 1}], 0.5, 100, 4),
        ([{"CPU": 8, "GPU": 1}], 0.5, 3, 3),
        ([{"CPU": 8, "GPU": 0.5}], 0.5, 3, 3),
        ([{"CPU": 64, "GPU": 1}], 1.0, 100, 16),
        ([{"CPU": 8, "GPU": 4}], 1.0, 4, 1),
        ([{"GPU": 1}], 1.0, 100, 1),
    ],
)
def test_actors_per_gpu_are_the_cores_next_to_it(
    nodes: list[dict[str, float]], share: float, shards: int, actors: int
) -> None:
    assert actors_per_gpu(nodes, share, shards) == actors


def scaling(workers: dict[str, dict[str, float]]) -> dict[str, object]:
    """A cluster file with a head of one CPU, and up to two nodes of each of some types, which this machine plays."""
    usual = {"node_config": {}, "min_workers": 0, "max_workers": 2}
    types = {name: {"resources": of, **usual} for name, of in workers.items()}
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    keys = (
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    )
    provider = {"type": "fake_multinode", "disable_node_updaters": True, "disable_launch_config_check": True}
    return {key: [] for key in keys} | {
        "cluster_name": "fake",
        "max_workers": 4,
        "upscaling_speed": 16.0,
        "idle_timeout_minutes": 5,
        "provider": provider,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "head_node": {},
        "worker_nodes": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": head, **types},
    }


@pytest.fixture
def cluster(ray_head: Callable[..., Any], tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head of one CPU with its autoscaler, to which this machine plays the nodes; the environment of its clients."""
    file, variables = tmp_path / "cluster.json", {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    variables |= {"AUTOSCALER_HEARTBEAT_TIMEOUT_S": "600", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    file.write_text(json.dumps(scaling({"gpu": {"CPU": 2, "GPU": 2}, "cpu": {"CPU": 4}})))
    options = ("--num-cpus=1", "--num-gpus=0", "--include-dashboard=false", f"--autoscaling-config={file}")
    with ray_head(tmp_path / "head.log", PORT, *options, **variables) as environment:
        yield environment


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
