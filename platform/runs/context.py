"""What a stage is given beside its configuration: where its inputs lie, where it writes, and who keeps account."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace, read_json

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of one stage of one run.

    Attributes:
        workspace: all file names.
        name, folder: of the run.
        part: the folder the stage writes into; it is renamed to its final name when the stage returns.
        inputs: finished folders of the stages that were run before, by stage.
        tracker: MLflow.
        sources: where each value of the configuration comes from.
        seconds, computed: wall seconds of each stage so far, and whether this call computed it.
    """

    workspace: Workspace
    name: str
    folder: Path
    part: Path
    inputs: dict[str, Path]
    tracker: Tracker
    sources: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    computed: dict[str, bool] = field(default_factory=dict)

    def summary(self, stage: str) -> dict[str, Any]:
        """What a finished stage said of itself."""
        summary: dict[str, Any] = read_json(self.inputs[stage] / SUMMARY)
        return summary

    @property
    def classes(self) -> tuple[str, ...]:
        """The K class names, from the index."""
        return tuple(self.summary("index")["classes"])
