"""The machine's use while a run computes: samples from one thread, which ends with the run."""

import threading
import time
from collections.abc import Mapping

from mcis.datasets.errors import UserError
from mcis.platform.runs.system_metrics import sampled


def test_samples_are_taken_until_the_block_ends() -> None:
    samples: list[Mapping[str, float]] = []
    before = threading.active_count()
    with sampled(samples.append, interval=0.05):
        assert threading.active_count() == before + 1
        deadline = time.monotonic() + 30
        while len(samples) < 2:
            assert time.monotonic() < deadline
            sum(range(10000))
    assert threading.active_count() == before
    for sample in samples:
        assert {"cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage"} <= set(sample)
        assert 0 <= sample["cpu_utilization_percentage"] <= 100
        assert sample["system_memory_usage_megabytes"] > 0
    number = len(samples)
    time.sleep(0.15)
    assert len(samples) == number


def test_a_short_block_has_no_sample() -> None:
    samples: list[Mapping[str, float]] = []
    with sampled(samples.append, interval=60):
        pass
    assert not samples


def test_sampling_ends_where_mlflow_takes_nothing_any_more() -> None:
    asked: list[Mapping[str, float]] = []

    def refuse(values: Mapping[str, float]) -> None:
        asked.append(values)
        raise UserError("the store cannot be used", "a store", "start it")

    with sampled(refuse, interval=0.01):
        time.sleep(0.3)
    assert len(asked) <= 1
