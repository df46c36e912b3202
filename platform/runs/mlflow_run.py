"""What MLflow has of a run: each call logs what the MLflow run lacks, so that to repeat it changes nothing."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcis.platform.runs.data_sets import DataSet

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

_MOST_METRICS = 1000
"""Metrics that MLflow takes in a request."""
_MOST_PARAMETERS = 100
_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


class MlflowRun:
    """An MLflow run that is there."""

    def __init__(self, client: "MlflowClient", run_id: str):
        self.client, self.run_id = client, run_id
        self._steps: dict[str, set[int]] = {}  # these have been logged
        self._points: dict[str, set[tuple[int, float]]] = {}
        self._metrics: dict[str, float] | None = None

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters as text: lists as `a, b`; what is longer than MLflow takes ends in an ellipsis."""
        from mlflow.entities import Param

        there = self.client.get_run(self.run_id).data.params
        new = [Param(key, _plain(value)) for key, value in values.items() if key not in there]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self.client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMETERS])

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags."""
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in values.items()])

    def steps(self, network: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Logs the records of a training's step log."""
        from mlflow.entities import Metric

        mark = f"{network}.epoch"  # which every record has; it is logged last, so that a step that has it is whole
        if network not in self._steps:
            self._steps[network] = {metric.step for metric in self.client.get_metric_history(self.run_id, mark)}
        new = [record for record in records if record["step"] not in self._steps[network]]
        self._log(
            [
                Metric(f"{network}.{key}", float(record[key]), int(record["time"] * 1000), record["step"])
                for record in new
                for key in sorted(record.keys() - {"step", "time"}, key="epoch".__eq__)
            ]
        )
        self._steps[network].update(record["step"] for record in new)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Logs final figures."""
        if values and self._metrics is None:
            self._metrics = dict(self.client.get_run(self.run_id).data.metrics)
        there = self._metrics or {}
        new = {key: value for key, value in values.items() if str(there.get(key)) != str(value)}  # which NaN is, too
        self._log_now({(key, 0): value for key, value in new.items()})
        there |= new

    def points(self, key: str, points: Sequence[tuple[int, float]]) -> None:
        """Logs a curve: steps and values."""
        if key not in self._points:
            history = self.client.get_metric_history(self.run_id, key)
            self._points[key] = {(point.step, point.value) for point in history}
        self._log_now({(key, step): value for step, value in points if (step, value) not in self._points[key]})
        self._points[key].update(points)

    def data_sets(self, data_sets: Sequence[DataSet]) -> None:
        """Logs the images that a run reads as data sets."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(of.name, of.digest, of.source_type, of.source, profile=of.profile),
                [InputTag("mlflow.data.context", of.context)],
            )
            for of in data_sets
        ]
        if inputs:
            self.client.log_inputs(self.run_id, datasets=inputs)

    def file(self, path: Path) -> None:
        """Stores a file, or a folder under its name, with the run; one that is gone is left out."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
        elif path.exists():
            self.client.log_artifact(self.run_id, str(path))

    def end(self, status: str) -> None:
        """Ends the MLflow run as FINISHED, FAILED or KILLED."""
        if self.client.get_run(self.run_id).info.status != status:
            self.client.set_terminated(self.run_id, status=status)

    def _log_now(self, values: Mapping[tuple[str, int], float]) -> None:
        """Logs values by key and step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._log([Metric(key, value, now, step) for (key, step), value in values.items()])

    def _log(self, metrics: "list[Metric]") -> None:
        for start in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])


def _plain(value: Any) -> str:
    """A value of the configuration as short text; the rest of a longer one is in the run's config.toml."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
