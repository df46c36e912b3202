"""What is written down of a run beside its outputs: its record, its configuration, and its MLflow run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import local_path
from mcis.datasets.tables.large_tables import give_back
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import fingerprint, write_json, write_text
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.tracking import LogModel, Tracker, Watch
from mcis.platform.runs.workspace import RunRecord, Workspace, now


@contextlib.contextmanager
def run_record(
    workspace: Workspace, name: str, *, whole: bool, study: str | None = None, kind: Literal["run", "study"] = "run"
) -> Iterator[None]:
    """Holds a run's name (`hold_run`) while the block runs, and writes down when that began and how it ended.

    Args:
        whole: whether the block goes to the last stage, so that a stage that it does not reach is none of the run's.
    """
    with hold_run(workspace, name):
        began = RunRecord(kind=kind, study=study, began=now())
        if earlier := workspace.record(name):
            if earlier.kind != kind:
                raise UserError(f"{name} is a {earlier.kind}", f"a name of no {earlier.kind}", "take another --name")
            began = dataclasses.replace(began, reached=earlier.reached, outputs=earlier.outputs)
        write_json(workspace.run(name).record, dataclasses.asdict(began))
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UserError, OSError):  # the error that ended the block is the one to report
                workspace.update_record(name, ended=now(), **_end_by(error))
            raise
        record = workspace.record(name) or began
        outputs = {stage: [output] for stage, output in (record.reached | record.current).items()}
        outputs = outputs if whole else record.outputs | outputs
        workspace.update_record(name, ended=now(), outcome="finished", reason=None, outputs=outputs)


def _end_by(error: BaseException) -> dict[str, Any]:
    """What the record says of a call that an error ended."""
    if isinstance(error, KeyboardInterrupt):
        return {"outcome": "interrupted"}
    return {"outcome": "failed", "reason": error.found if isinstance(error, UserError) else type(error).__name__}


def point_to(workspace: Workspace, name: str, stage: str, output: Path) -> None:
    """Writes down that a run points to the output of a stage, before it is computed."""
    record = workspace.record(name) or RunRecord(began=now())
    every = list(dict.fromkeys([*record.outputs.get(stage, []), output.name]))
    current = record.current | {stage: output.name}
    workspace.update_record(name, outputs=record.outputs | {stage: every}, current=current)


def stopped(workspace: Workspace, name: str, reason: str) -> None:
    """Writes down that somebody else ended the process of a run, and why."""
    record = workspace.record(name)
    if record and record.outcome is None:
        workspace.update_record(name, ended=now(), outcome="interrupted", reason=reason)


class OfStudy(NamedTuple):
    """A study that a run belongs to.

    Attributes:
        name: of the study.
        parent: its MLflow run.
        varied: what tells the run from the others of it, by short names; further parameters of the MLflow run.
        watch: is told what trainings log, beside MLflow.
    """

    name: str
    parent: str | None
    varied: Mapping[str, Any]
    watch: Watch | None = None


@contextlib.contextmanager
def run_lifecycle(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    whole: bool,
    recompute: bool,
    study: OfStudy | None,
    log_model: LogModel,
) -> Iterator[Tracker]:
    """Holds a run's name while the block runs, and writes down when that began, of what, and how it ended.

    Args:
        whole: whether the block goes to the last stage.
        recompute: whether stages are computed again, which has curves of its own in MLflow.
        study: that the run belongs to.
        log_model: logs the network that MLflow is to have.
    """
    config, folder, values = resolved.config, workspace.run(name, create=False), dict(leaves(resolved.config))
    parent = study.parent if study else None
    with run_record(workspace, name, whole=whole, study=study.name if study else None):
        if not workspace.outputs(name):
            write_text(folder.config, experiment_text(config, resolved.origins))
        for key, value in leaves(config.weights):  # which may be another run's
            output = local_path(value or "").parent
            if output.parent == workspace.store.resolve():
                point_to(workspace, name, f"weights.{key}", output)
        tracker = Tracker(
            workspace,
            name,
            identity=fingerprint(values, parent),
            parent=parent,
            new_run=recompute,
            watch=study.watch if study else None,
            log_model=log_model,
        )
        with tracker.running():
            tags = {"sources": config.sources, "recipe": config.recipe, "seed": str(config.seed)}
            tags |= {"study": study.name} if study else {}
            tracker.describe({**values, **(study.varied if study else {})}, tags)
            yield tracker


def index_is_made(resolved: Resolved, context: RunContext) -> None:
    """Writes down the configuration and the images of a run that has an index; frees what it was listed with.

    Until then the outputs that the run's record names are those of an earlier call.
    """
    if context.sources:
        context.sources.release()
    give_back()
    write_text(context.folder.config, experiment_text(resolved.config, resolved.origins))
    index = context.result("index", IndexResult)
    assert index.identity is not None  # written with the result
    context.tracker.images(index.identity, index.images)
