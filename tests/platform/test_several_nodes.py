"""Runs on a cluster of several nodes, all on this machine, equal a run on one node, even if nodes are lost.

The nodes have their own mount namespace, in which the driver's folder (home, temporary files, current folder) is empty
and read-only. A task that uses a path of the driver's disk therefore fails.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.files import read_table

NODES = """
import json, sys
from ray.cluster_utils import Cluster

quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
shared = {"object_store_memory": 2**27, "dashboard_agent_listen_port": 0}
head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
cluster = Cluster(initialize_head=True, head_node_args={**shared, **head})
nodes = {}
print(cluster.address, flush=True)
for line in sys.stdin:
    what, name, resources = json.loads(line)
    if what == "add":
        nodes[name] = cluster.add_node(**shared, **resources)
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
"""A head without CPUs. Lines of its standard input add and remove nodes."""


class Nodes:
    """A cluster whose head runs no tasks.

    Attributes:
        env: Environment variables of its drivers.
        folder: Folder of a driver, hidden from all processes of the nodes.
    """

    def __init__(self, folder: Path, ray_folder: Path):
        self.folder = folder / "driver"
        self.folder.mkdir()

        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        clean |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        clean |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

        hide_and_start = 'mount -t tmpfs -o ro,size=4k tmpfs "$1" && exec "$2" -c "$3"'
        command = [*_namespace(), "sh", "-c", hide_and_start, "sh", str(self.folder), sys.executable, NODES]
        self.log = folder / "nodes.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=clean | {"RAY_TMPDIR": str(ray_folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "XDG_CACHE_HOME": str(self.folder)}
        self.env = clean | own | {"RAY_ADDRESS": self._answer()}

    def add(self, name: str, **resources: float) -> None:
        self._ask("add", name, resources)

    def remove(self, name: str) -> None:
        """Kills all processes of a node without a warning."""
        self._ask("remove", name, {})

    def _ask(self, *request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("127.0.0.1:") or line[0].isdigit() or line == "done\n":
                return line.strip()
        raise AssertionError(self.log.read_text())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _namespace() -> list[str]:
    """Command that runs another one in its own mount namespace. Skips the test if this user may not create one."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        command = ["unshare", *options, "--propagation", "private"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0:
                return command
    pytest.skip("this user may not have mounts of its own (unshare --mount)")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    ray_folder = Path(tempfile.mkdtemp(prefix="mcis-", dir="/tmp"))  # Ray's sockets need a short path
    cluster = Nodes(tmp_path, ray_folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    synthetic.draw(root, train=24, val=8, size=64, classes=2)
    return root


TINY = (
    "classifier.epochs=50",
    "classifier.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "segmenter.channels=24",
    "segmenter.min_steps=20",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "pseudo_masks.min_foreground_fraction=0",
    "pseudo_masks.rule=crf",
    "compute.threads=1",
    "compute.shard_rows=4",
    "compute.checkpoint_steps=10",
    "compute.stop_if_not_learning=false",
    "tracking.model=false",
)


def command(root: Path, workspace: Path, *overrides: str) -> list[str]:
    words = [sys.executable, "-m", "mcis.platform.cli", "run", "voc", "--name", "run", "--recipe", "scratch"]
    words += ["--voc", str(root), "--workspace", str(workspace)]
    words += [*TINY, f"data.classes={root / 'classes.txt'}", *overrides]
    return words


def finish(call: list[str], env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(call, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def output(workspace: Path, stage: str) -> Path:
    (folder,) = (path for path in (workspace / "store").glob(f"{stage}-*") if path.is_dir())
    assert (folder / "summary.json").exists()
    return folder


def scores(workspace: Path) -> dict[tuple[str, ...], float]:
    written = json.loads((workspace / "runs/run/scores.json").read_text())["scores"]
    return {(score["output"], score["name"]): score["miou"] for score in written}


def differences(one: Path, other: Path) -> dict[str, float]:
    """The largest absolute differences of weights, maps and scores, and the fraction of pixels with another label."""
    index = read_table(output(one, "index") / "index.parquet", ["image_id"])["image_id"].to_pylist()
    return {
        "train_classifier": _weight_difference(one, other, "train_classifier"),
        "train_segmenter": _weight_difference(one, other, "train_segmenter"),
        "maps": _map_difference(one, other, index),
        "labels": _label_difference(one, other, index, "pseudo_masks", "masks", "labels"),
        "mask": _label_difference(one, other, index, "pseudo_masks", "masks", "mask"),
        "plain": _label_difference(one, other, index, "predict", "predictions", "plain"),
        "crf": _label_difference(one, other, index, "predict", "predictions", "crf"),
        "scores": _score_difference(one, other),
    }


def _weight_difference(one: Path, other: Path, stage: str) -> float:
    weights = torch.load(output(one, stage) / "weights.pt", weights_only=True)["state_dict"]
    other_weights = torch.load(output(other, stage) / "weights.pt", weights_only=True)["state_dict"]
    assert weights.keys() == other_weights.keys()
    return max(float((weights[name] - other_weights[name]).abs().max()) for name in weights)


def _map_difference(one: Path, other: Path, index: list[str]) -> float:
    shards = Shards(output(one, "localize") / "maps")
    other_shards = Shards(output(other, "localize") / "maps")
    tagged = [image_id for image_id in index if image_id in shards]
    assert len(tagged) == 24

    largest = 0.0
    difference = 0.0
    for image_id in tagged:
        maps = image_maps(shards, image_id).maps
        largest = max(largest, float(np.abs(maps).max()))
        difference = max(difference, float(np.abs(maps - image_maps(other_shards, image_id).maps).max()))
    assert largest > 0
    return difference


def _label_difference(one: Path, other: Path, index: list[str], stage: str, table: str, column: str) -> float:
    shards = Shards(output(one, stage) / table)
    other_shards = Shards(output(other, stage) / table)
    labels = np.concatenate([_labels(shards, image_id, column) for image_id in index])
    other_labels = np.concatenate([_labels(other_shards, image_id, column) for image_id in index])
    assert len(labels)
    return float((labels != other_labels).mean())


def _score_difference(one: Path, other: Path) -> float:
    values = scores(one)
    other_values = scores(other)
    assert values.keys() == other_values.keys()
    assert len(values) >= 4
    return max(abs(value - other_values[key]) for key, value in values.items())


def _labels(shards: Shards, image_id: str, column: str) -> NDArray[np.uint8]:
    if image_id not in shards:
        return np.zeros(0, np.uint8)
    return decode_labels(shards.rows(image_id)[column][0].as_py()).reshape(-1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The workspace of a run with two training workers on one node."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    finish(command(root, folder / "workspace", "compute.workers=2"), env, folder)
    return folder / "workspace"


APART = ("compute.workers=2", "compute.worker_cpus=1.6")
"""Two training workers that do not fit on one node with 3 CPUs."""


@contextlib.contextmanager
def running(call: list[str], env: dict[str, str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(call, env=env, cwd=folder, **output) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 1200
    while not condition():
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow(minutes=5)
def test_a_run_on_nodes_of_which_some_are_lost_equals_one_on_one_node(
    nodes: Nodes, root: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Two nodes with a training worker each, of which two are lost, against one node with two workers.

    The first lost node is not replaced: the run fails, and continues when it is repeated. The second is replaced. Two
    workers add the same gradients wherever they are, so results are identical.
    """
    for name in ("a", "b"):
        nodes.add(name, num_cpus=3)
    workspace = tmp_path / "workspace"

    def checkpoint_time() -> int:
        """When the last checkpoint of the classifier was written, 0 if there is none."""
        for file in workspace.glob("store/train_classifier-*/checkpoint.pt"):
            with contextlib.suppress(FileNotFoundError):
                return file.stat().st_mtime_ns
        return 0

    call = command(root, workspace, *APART)
    with running([*call, "compute.wait_minutes=0.1"], nodes.env, nodes.folder) as run:
        wait_for(checkpoint_time, run)
        nodes.remove("b")
        printed, _ = run.communicate(timeout=900)
    assert run.returncode == 1, printed[-5000:]
    assert "after 0.1 minutes the cluster lacks 1 x (1.6 CPU)" in " ".join(printed.split())
    assert "Traceback" not in printed

    nodes.add("c", num_cpus=3)
    time_before = checkpoint_time()
    with running(call, nodes.env, nodes.folder) as run:
        wait_for(lambda: checkpoint_time() > time_before, run)
        nodes.remove("c")
        nodes.add("d", num_cpus=3)
        printed, _ = run.communicate(timeout=1500)
    assert run.returncode == 0, printed[-5000:]
    assert "continues from its last checkpoint; failure 1 of at most 3" in " ".join(printed.split())

    differ = differences(workspace, undisturbed)
    assert not any(differ.values()), differ


MAPPING = """
import sys, time
from functools import partial
from pathlib import Path
import pyarrow as pa
import ray
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table

def add_node(column, table):
    return table.append_column(column, pa.array([ray.get_runtime_context().get_node_id()] * len(table)))

def worker():
    def rows(table):
        time.sleep(0.5)
        return add_node("node", table)
    return rows

ray.init(log_to_driver=False)
compute = ComputeConfig(shard_rows=1, gpu=sys.argv[2] == "1", wait_minutes=float(sys.argv[3]))
table = pa.table({"x": list(range(24))})
options = {"make_worker": worker, "read": partial(add_node, "reader"), "compute": compute, "network": True}
print(map_table(table, Path(sys.argv[1]), label="x", **options))
ray.shutdown()
"""


@pytest.mark.slow
def test_a_mapping_continues_on_the_remaining_node(nodes: Nodes, tmp_path: Path) -> None:
    """Ray is told the number of GPUs. An actor of the lost GPU must move to another one, which is idle."""
    for name in ("a", "b"):
        nodes.add(name, num_cpus=2, num_gpus=1)
    table = tmp_path / "table"
    with running([sys.executable, "-c", MAPPING, str(table), "1", "5"], nodes.env, nodes.folder) as run:
        wait_for(lambda: len({node for _, node in mapped(table)}) == 2, run)
        nodes.remove("b")
        assert len(mapped(table)) < 24, "the mapping had ended before the node was removed"
        printed, _ = run.communicate(timeout=600)
    assert run.returncode == 0, printed
    assert sorted(x for x, _ in mapped(table)) == list(range(24))


@pytest.mark.slow
def test_gpus_added_during_a_mapping_are_used(nodes: Nodes, tmp_path: Path) -> None:
    """At first there is no GPU, then one, then three."""
    table = tmp_path / "table"
    with running([sys.executable, "-c", MAPPING, str(table), "1", "5"], nodes.env, nodes.folder) as run:
        nodes.add("a", num_cpus=1, num_gpus=1)
        wait_for(lambda: mapped(table), run)
        nodes.add("b", num_cpus=2, num_gpus=2)
        printed, _ = run.communicate(timeout=600)
    assert run.returncode == 0, printed
    assert sorted(x for x, _ in mapped(table)) == list(range(24))
    assert len({node for _, node in mapped(table)}) == 2


@pytest.mark.slow
def test_a_node_without_a_gpu_reads_for_one_with_a_gpu(nodes: Nodes, tmp_path: Path) -> None:
    table = tmp_path / "table"
    nodes.add("a", num_cpus=1, num_gpus=1)
    nodes.add("b", num_cpus=2)
    finish([sys.executable, "-c", MAPPING, str(table), "1", "5"], nodes.env, nodes.folder)
    assert sorted(x for x, _ in mapped(table)) == list(range(24))

    rows = [row for file in table.glob("part-*.parquet") for row in read_table(file).to_pylist()]
    (gpu_node,) = {row["node"] for row in rows}
    assert {row["reader"] for row in rows} - {gpu_node}


FATAL_READ = """
import os, sys
from pathlib import Path
import pyarrow as pa
import ray
from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table

def read(table):
    if table["x"].to_pylist() == [7]:
        os.kill(os.getpid(), 9)
    return table

def work(table):
    return table

ray.init(log_to_driver=False)
table = pa.table({"x": list(range(24))})
compute = ComputeConfig(gpu=True, shard_rows=1)
try:
    map_table(table, Path(sys.argv[1]), worker=work, read=read, label="x", compute=compute, network=True)
except UserError as error:
    print(error.found)
ray.shutdown()
"""


@pytest.mark.slow
def test_a_process_that_dies_while_it_reads_for_a_gpu_is_reported(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add("a", num_cpus=1, num_gpus=1)
    printed = finish([sys.executable, "-c", FATAL_READ, str(tmp_path / "table")], nodes.env, nodes.folder)
    assert "shard part-00000007-00000008.parquet cannot be mapped: its process was ended by a signal" in printed


@pytest.mark.slow
def test_cpus_added_during_a_mapping_are_used_and_asked_for(nodes: Nodes, tmp_path: Path) -> None:
    """At first there is one CPU, then three. Tasks that wait are the demand for which an autoscaler starts nodes."""
    table = tmp_path / "table"
    ray_status = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    nodes.add("a", num_cpus=1)
    with running([sys.executable, "-c", MAPPING, str(table), "0", "5"], nodes.env, nodes.folder) as run:
        wait_for(lambda: mapped(table), run)
        wait_for(lambda: "{'CPU': 1.0}: 1+ pending" in finish(ray_status, nodes.env, nodes.folder), run)
        nodes.add("b", num_cpus=2)
        printed, _ = run.communicate(timeout=600)
    assert run.returncode == 0, printed
    assert sorted(x for x, _ in mapped(table)) == list(range(24))
    rows_of_node = Counter(node for _, node in mapped(table))
    assert len(rows_of_node) == 2


@pytest.mark.slow
def test_a_mapping_without_nodes_ends_with_an_error_and_continues_when_repeated(nodes: Nodes, tmp_path: Path) -> None:
    """At first there is no node; then the only one is lost."""
    table = tmp_path / "table"
    call = [sys.executable, "-c", MAPPING, str(table), "0", "0.1"]
    needs = "1 x (1 CPU)"
    with running(call, nodes.env, nodes.folder) as run:
        printed, _ = run.communicate(timeout=300)
    assert f"the mapping `x` needs {needs}; after 0.1 minutes the cluster lacks {needs}" in " ".join(printed.split())

    nodes.add("a", num_cpus=1)
    with running(call, nodes.env, nodes.folder) as run:
        wait_for(lambda: mapped(table), run)
        nodes.remove("a")
        printed, _ = run.communicate(timeout=300)
    assert f"waiting for nodes of the cluster: the mapping `x` needs {needs} more" in " ".join(printed.split())
    assert f"after 0.1 minutes the cluster lacks {needs}" in " ".join(printed.split())
    assert 0 < len(mapped(table)) < 24

    nodes.add("b", num_cpus=1)
    with running(call, nodes.env, nodes.folder) as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert sorted(x for x, _ in mapped(table)) == list(range(24))


LOSSES = """
import sys, time
from pathlib import Path
import pyarrow as pa
import ray
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table

folder = Path(sys.argv[1])

def work(table):
    (folder / "started").touch()
    while not (folder / "may end").exists():
        time.sleep(0.05)
    return table.append_column("node", pa.array([ray.get_runtime_context().get_node_id()]))

ray.init(log_to_driver=False)
compute = ComputeConfig(gpu=sys.argv[2] == "1", wait_minutes=5)
map_table(pa.table({"x": [7]}), folder / "table", worker=work, label="x", compute=compute, network=True)
ray.shutdown()
"""


@pytest.mark.slow(minutes=5)
@pytest.mark.parametrize(("gpu", "losses"), [("0", 3), ("1", 6)])
def test_a_shard_is_mapped_although_it_loses_many_nodes(nodes: Nodes, tmp_path: Path, gpu: str, losses: int) -> None:
    """After three lost nodes, Ray gives up a task or an actor. After six, it has given up two actors."""
    started = tmp_path / "started"
    with running([sys.executable, "-c", LOSSES, str(tmp_path), gpu], nodes.env, nodes.folder) as run:
        for loss in range(losses):
            nodes.add(f"lost {loss}", num_cpus=1, num_gpus=1)
            wait_for(started.exists, run)
            nodes.remove(f"lost {loss}")
            started.unlink()
        (tmp_path / "may end").touch()
        nodes.add("kept", num_cpus=1, num_gpus=1)
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert [x for x, _ in mapped(tmp_path / "table")] == [7]


MEMORY = """
import sys, time
from pathlib import Path
import pyarrow as pa
import ray
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table

def work(table):
    began = time.time()
    time.sleep(0.5)
    return table.append_column("began", pa.array([began])).append_column("ended", pa.array([time.time()]))

ray.init(log_to_driver=False)
compute = ComputeConfig(shard_rows=1, memory_gb=float(sys.argv[2]), wait_minutes=0.1)
map_table(pa.table({"x": list(range(16))}), Path(sys.argv[1]), worker=work, label="x", compute=compute)
ray.shutdown()
"""


def num_overlaps(table: Path) -> int:
    """The number of rows whose work began before that of the row before them had ended."""
    rows = sorted(read_table(table).to_pylist(), key=lambda row: row["began"])
    assert len(rows) == 16
    return len([row for row, following in itertools.pairwise(rows) if following["began"] < row["ended"]])


@pytest.mark.slow
def test_a_node_runs_only_the_tasks_whose_memory_it_has(nodes: Nodes, tmp_path: Path) -> None:
    """A node with two CPUs and 3 GiB runs one task of 2 GiB, two of 1 GiB, and none of 100 GiB."""
    nodes.add("a", num_cpus=2, memory=3 * 2**30)
    call = [sys.executable, "-c", MEMORY]
    finish([*call, str(tmp_path / "large"), "2"], nodes.env, nodes.folder)
    assert num_overlaps(tmp_path / "large") == 0
    finish([*call, str(tmp_path / "small"), "1"], nodes.env, nodes.folder)
    assert num_overlaps(tmp_path / "small") > 0

    needs = "1 x (1 CPU, 100 GiB memory)"
    with running([*call, str(tmp_path / "impossible"), "100"], nodes.env, nodes.folder) as run:
        printed, _ = run.communicate(timeout=300)
    assert f"the mapping `x` needs {needs}; after 0.1 minutes the cluster lacks {needs}" in " ".join(printed.split())


TRIALS = """
import sys
import ray
from ray import tune
from mcis.platform.config.compute import ComputeConfig
from mcis.tuning.trials import trial_resources

def trial(parameters):
    tune.report({"node": ray.get_runtime_context().get_node_id()})

ray.init(log_to_driver=False)
tuner = tune.Tuner(
    tune.with_resources(trial, trial_resources(ComputeConfig(), parallel=1)),
    param_space={"x": tune.grid_search([1, 2, 3])},
    run_config=tune.RunConfig(storage_path=sys.argv[1]),
)
assert [result.metrics["node"] for result in tuner.fit()] == [ray.get_runtime_context().get_node_id()] * 3
"""


@pytest.mark.slow
def test_drivers_of_trials_run_on_the_node_of_the_study(nodes: Nodes, tmp_path: Path) -> None:
    """Even if the head has no CPU and another node is larger, because servers on loopback are on one node only."""
    nodes.add("a", num_cpus=4)
    with running([sys.executable, "-c", TRIALS, str(tmp_path / "tune")], nodes.env, nodes.folder) as run:
        printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed


def mapped(table: Path) -> list[tuple[int, str]]:
    """The mapped rows and the nodes that mapped them."""
    rows = [row for file in table.glob("part-*.parquet") for row in read_table(file).to_pylist()]
    return [(row["x"], row["node"]) for row in rows]
