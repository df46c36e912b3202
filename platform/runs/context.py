"""What a stage is given beside its configuration: the outputs that it reads, the folder that it writes, the tracker."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcis.platform.runs.listing import Sources
from mcis.platform.runs.results import IndexResult, Result, read_result
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder, Workspace


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One run as the next stage sees it; `after` makes the context of the stage behind.

    Attributes:
        workspace: all file names.
        name: of the run.
        part: the folder that the stage writes into; it is the finished output once the stage has returned.
        tracker: MLflow.
        origins: where each value of the configuration comes from, by its key.
        recompute: whether the stage is computed again on purpose, so that nothing kept from earlier calls may be used.
        inputs: finished folders of the stages that ran before, by stage.
        seconds, computed: wall seconds of these stages, and whether this call computed them.
        sources: what they hold, until the index is made of it.
        caches: names of the folders below cache/ that the stage read; whoever opens one adds it.
    """

    workspace: Workspace
    name: str
    part: Path
    tracker: Tracker
    origins: Mapping[str, str]
    recompute: bool = False
    inputs: Mapping[str, Path] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, bool] = field(default_factory=dict)
    sources: Sources | None = None
    caches: list[str] = field(default_factory=list)

    def after(self, stage: str, folder: Path, *, seconds: float, computed: bool) -> "RunContext":
        """The context once a stage has finished, with its output in `folder`."""
        return replace(
            self,
            inputs={**self.inputs, stage: folder},
            seconds={**self.seconds, stage: seconds},
            computed={**self.computed, stage: computed},
        )

    def result(self, stage: str, kind: type[Result]) -> Result:
        """The result of a stage that ran before, as a record of type `kind`."""
        return read_result(self.inputs[stage], kind)

    @property
    def folder(self) -> RunFolder:
        """The files of the run."""
        return self.workspace.run(self.name, create=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """The K class names, from the index."""
        return self.result("index", IndexResult).classes
