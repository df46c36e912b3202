"""What MLflow has of a run: each call logs what the MLflow run lacks, so that to repeat it changes nothing."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcis.platform.runs.data_sets import DataSet

if TYPE_CHECKING:
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
        self._logged: dict[str, dict[int, str]] = {}  # the last value by key and step

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
        """Logs the records of a training's step log, each once: a restart logs steps again, at another speed."""
        self._log(
            (f"{network}.{key}", record["step"], float(value), record["time"])
            for record in records
            for key, value in record.items()
            if key not in ("step", "time") and record["step"] not in self._steps(f"{network}.{key}")
        )

    def points(self, points: Mapping[str, Mapping[int, float]]) -> None:
        """Logs figures by key and step."""
        now = time.time()
        self._log((key, step, value, now) for key, of in points.items() for step, value in of.items())

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

    def _steps(self, key: str) -> dict[int, str]:
        """The last value of each step that MLflow has, as text, which compares NaN too."""
        if key not in self._logged:
            history = self.client.get_metric_history(self.run_id, key)
            self._logged[key] = {of.step: str(of.value) for of in sorted(history, key=lambda of: of.timestamp)}
        return self._logged[key]

    def _log(self, points: Iterable[tuple[str, int, float, float]]) -> None:
        """Logs keys, steps, values and times in seconds, but for values that MLflow has."""
        from mlflow.entities import Metric

        new = {
            (key, step): Metric(key, value, int(seconds * 1000), step)
            for key, step, value, seconds in points
            if self._steps(key).get(step) != str(value)
        }
        metrics = list(new.values())
        for start in range(0, len(metrics), _MOST_METRICS):
            batch = metrics[start : start + _MOST_METRICS]
            self.client.log_batch(self.run_id, metrics=batch)
            for of in batch:
                self._logged[of.key][of.step] = str(of.value)


def _plain(value: Any) -> str:
    """A value of the configuration as short text; the rest of a longer one is in the run's config.toml."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
