"""What a stage receives: the outputs that it reads, the folder that it writes, the tracker, and the workspace."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcis.platform.runs.listing import Sources
from mcis.platform.runs.results import IndexResult, Result, read_result
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder, Workspace


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The state of a run before its next stage.

    Attributes:
        workspace: The workspace, which defines all file names.
        name: Name of the run.
        output: Folder to which the stage writes its output.
        tracker: MLflow run.
        origins: Layer that each configuration value comes from, by dotted key.
        recompute: Whether the stage is recomputed on request and must not reuse anything from earlier calls.
        stage_outputs: Folders of the finished outputs of earlier stages, by stage.
        seconds: Wall time of earlier stages.
        computed: Whether this call computed these stages, rather than finding them finished.
        sources: The image sources; None in contexts that do not run the stage `index`.
        caches: Names of the folders in cache/ that the stage read; code that opens one adds it.
    """

    workspace: Workspace
    name: str
    output: Path
    tracker: Tracker
    origins: Mapping[str, str]
    recompute: bool = False
    stage_outputs: Mapping[str, Path] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, bool] = field(default_factory=dict)
    sources: Sources | None = None
    caches: list[str] = field(default_factory=list)

    def after(self, stage: str, folder: Path, *, seconds: float, computed: bool) -> "RunContext":
        """The context after a stage has finished with its output in `folder`."""
        return replace(
            self,
            stage_outputs={**self.stage_outputs, stage: folder},
            seconds={**self.seconds, stage: seconds},
            computed={**self.computed, stage: computed},
        )

    def result(self, stage: str, kind: type[Result]) -> Result:
        """The result of an earlier stage, as a record of type `kind`."""
        return read_result(self.stage_outputs[stage], kind)

    @property
    def folder(self) -> RunFolder:
        """Files of the run."""
        return self.workspace.run(self.name, create=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """The K class names, from the index."""
        return self.result("index", IndexResult).classes
