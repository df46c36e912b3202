"""Resources of trials: Ray Tune starts a trial when its CPUs and GPUs are free, and its stages run in them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.platform.config.compute import ComputeConfig
from mcis.tuning.trials import common_compute, stage_bundles

TRIALS = """
import functools, json, sys, time
from pathlib import Path

import pyarrow as pa
import ray
from ray import tune

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.runtime import reserved_resources
from mcis.tuning.trials import trial_resources

folder = Path(sys.argv[1])
options = json.loads(sys.argv[2])
compute = ComputeConfig(**options["compute"])
ray.init(address="local", num_cpus=options["cpus"], num_gpus=options["gpus"], _memory=options["memory"],
         object_store_memory=10**8, include_dashboard=False, log_to_driver=False)


def group_of(table):
    time.sleep(0.3)
    group = ray.util.get_current_placement_group()
    return table.append_column("group", pa.array([group and group.id.hex()] * len(table)))


def trial(parameters):
    began = time.time()
    rows = pa.table({"x": range(8)})
    for label, network in (("networks", True), ("others", False)):
        out = folder / f"{label}{parameters['number']}"
        map_table(rows, out, worker=group_of, label=label, compute=compute, network=network, shard_rows=2)
    group = ray.util.get_current_placement_group().id.hex()
    tune.report({"began": began, "ended": time.time(), "group": group, "reserved": reserved_resources()})


resources = trial_resources(compute, options["parallel"])
tuner = tune.Tuner(
    tune.with_resources(trial, resources),
    param_space={"number": tune.grid_search(list(range(options["trials"])))},
    tune_config=tune.TuneConfig(max_concurrent_trials=options["parallel"]),
    run_config=tune.RunConfig(storage_path=str(folder), name="tune", verbose=0),
)
names = ("began", "ended", "group", "reserved")
print(json.dumps([{name: result.metrics[name] for name in names} for result in tuner.fit()]))
"""


def run_trials(
    folder: Path, *, cpus: int, gpus: int, parallel: int, trials: int, memory: int | None = None, **compute: Any
) -> list[Any]:
    """Runs trials that map tables with sleeping workers on a Ray with these logical CPUs, GPUs and bytes of memory."""
    options: dict[str, Any] = {"cpus": cpus, "gpus": gpus, "memory": memory}
    options |= {"parallel": parallel, "trials": trials, "compute": compute}
    command = [sys.executable, "-c", TRIALS, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    reports: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == trials
    return reports


def at_a_time(reports: list[Any]) -> int:
    """The maximum number of trials that ran at the same time."""
    changes = [(report["began"], 1) for report in reports] + [(report["ended"], -1) for report in reports]
    running = 0
    most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def groups_of(folder: Path, label: str, number: int) -> set[str | None]:
    """The placement groups in which the shards of a trial were mapped."""
    import pyarrow.parquet as pq

    files = sorted((folder / f"{label}{number}").glob("part-*.parquet"))
    assert len(files) == 4
    return {group for file in files for group in pq.read_table(file)["group"].to_pylist()}


@pytest.mark.slow
def test_trials_are_queued_by_gpus_and_run_in_the_resources_that_they_reserve(tmp_path: Path) -> None:
    """Four trials at a time are asked for; a logical GPU holds two, with a half for each."""
    reports = run_trials(tmp_path, cpus=12, gpus=1, parallel=4, trials=4, gpu=True, gpu_share=0.5)
    assert at_a_time(reports) == 2
    assert all(report["reserved"]["GPU"] == 0.5 for report in reports)
    for number, report in enumerate(reports):
        assert groups_of(tmp_path, "networks", number) == {report["group"]}
        assert groups_of(tmp_path, "others", number) == {report["group"]}


@pytest.mark.slow
def test_trials_on_two_cpus_take_turns(tmp_path: Path) -> None:
    reports = run_trials(tmp_path, cpus=2, gpus=0, parallel=3, trials=3)
    assert at_a_time(reports) == 1
    assert all(report["reserved"] == {"CPU": 1.5} for report in reports)


@pytest.mark.slow
def test_trials_share_the_memory_that_their_tasks_reserve(tmp_path: Path) -> None:
    """Each of two trials has CPUs for three tasks, but memory for one."""
    reports = run_trials(tmp_path, cpus=8, gpus=0, memory=3 * 2**30, parallel=2, trials=2, memory_gb=1)
    assert all(report["reserved"] == {"CPU": 1.5, "memory": 2**30} for report in reports)
    for number, report in enumerate(reports):
        assert groups_of(tmp_path, "others", number) == {report["group"]}


def test_a_trial_reserves_its_worker_and_a_share_of_the_cpus(ray_local: None) -> None:
    assert stage_bundles(ComputeConfig(), 2) == [{"CPU": 0.5}, {"CPU": 1.0}]
    assert stage_bundles(ComputeConfig(gpu=True, gpu_share=0.25), 2) == [{"CPU": 0.5, "GPU": 0.25}, {"CPU": 1.0}]
    assert stage_bundles(ComputeConfig(memory_gb=2**-10), 2) == [{"CPU": 0.5}, {"CPU": 1.0, "memory": 2**20}]


@pytest.mark.parametrize(
    ("parallel", "compute"), [(1, ComputeConfig()), (2, ComputeConfig(workers=2)), (2, ComputeConfig(decode="tasks"))]
)
def test_other_trials_take_what_is_free(ray_local: None, parallel: int, compute: ComputeConfig) -> None:
    assert stage_bundles(compute, parallel) == []


def test_trials_that_run_at_a_time_reserve_the_same_resources() -> None:
    sections = {"one": ComputeConfig(), "two": ComputeConfig(max_failures=1), "three": ComputeConfig(gpu=True)}
    assert common_compute({name: sections[name] for name in ("one", "two")}, 2) == ComputeConfig()
    with pytest.raises(UserError, match=r"--parallel 2, but compute\.gpu is False in one and True in three"):
        common_compute(sections, 2)
    with pytest.raises(UserError, match=r"--parallel 2, but compute\.memory_gb is 0\.0 in one and 2\.0 in two"):
        common_compute({"one": ComputeConfig(), "two": ComputeConfig(memory_gb=2)}, 2)
    assert common_compute(sections, 1) == ComputeConfig()
