"""Records what happens to a run, next to its outputs: its start and end, its configuration, and its MLflow run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import local_path, names_in
from mcis.datasets.tables.large_tables import release_arrow_memory
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import fingerprint, write_json, write_text
from mcis.platform.runs.locks import hold_run, run_holder
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.tracking import LogModel, OnRecords, Tracker, TrackingRecord
from mcis.platform.runs.workspace import RunRecord, Workspace, now


@contextlib.contextmanager
def run_record(
    workspace: Workspace,
    name: str,
    *,
    runs_all_stages: bool,
    study: str | None = None,
    kind: Literal["run", "study"] = "run",
) -> Iterator[None]:
    """Holds the name of a run (`hold_run`) during the block, and records when the block began and how it ended.

    Args:
        runs_all_stages: Whether the block runs all stages. If it does and ends without an error, outputs that only
            earlier calls used are removed from the record.

    Raises:
        UserError: The name is in use by a run or study of the other kind, or is held by another process.
    """
    with hold_run(workspace, name):
        record = RunRecord(kind=kind, study=study, began=now())
        earlier = workspace.record(name)
        if earlier:
            if earlier.kind != kind:
                raise UserError(
                    f"{name} is the name of a {earlier.kind}",
                    f"the name of a {kind}, or a new name",
                    "choose another --name",
                )
            record = dataclasses.replace(
                record,
                study=study or earlier.study,
                reached=earlier.reached,
                outputs=earlier.outputs,
                tags=earlier.tags,
            )
        write_json(workspace.run(name).record, dataclasses.asdict(record))

        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UserError, OSError):  # the error that ended the block is the one to report
                workspace.update_record(name, ended=now(), **_outcome_of(error))
            raise

        record = workspace.record(name) or record
        outputs = {stage: [output] for stage, output in (record.reached | record.current).items()}
        if not runs_all_stages:
            outputs = record.outputs | outputs
        workspace.update_record(name, ended=now(), outcome="finished", reason=None, outputs=outputs)


def _outcome_of(error: BaseException) -> dict[str, Any]:
    """Fields of `RunRecord` for a call that ended with an error."""
    if isinstance(error, KeyboardInterrupt):
        return {"outcome": "interrupted"}
    return {"outcome": "failed", "reason": error.found if isinstance(error, UserError) else type(error).__name__}


def reference_output(workspace: Workspace, name: str, stage: str, output: Path) -> None:
    """Adds the output of a stage to the outputs that a run uses, before the output is computed.

    `mcis gc` keeps outputs that a run uses.
    """
    record = workspace.record(name) or RunRecord(began=now())
    outputs = list(dict.fromkeys([*record.outputs.get(stage, []), output.name]))
    workspace.update_record(
        name, outputs=record.outputs | {stage: outputs}, current=record.current | {stage: output.name}
    )


def reference_cache(workspace: Workspace, name: str, cache: str) -> None:
    """Adds a cache to those that the stage in progress of a run reads. The caller holds the lock of the cache."""
    record = workspace.record(name) or RunRecord(began=now())
    workspace.update_record(name, caches=list(dict.fromkeys([*record.caches, cache])))


def caches_in_use(workspace: Workspace, *, except_run: str) -> set[str]:
    """Names of the caches that stages in progress read, except for those of one run. For errors see `read_record`."""
    caches: set[str] = set()
    for name in names_in(workspace.runs):
        if name == except_run or not run_holder(workspace, name):
            continue
        record = workspace.record(name)
        if record:
            caches.update(record.caches)
    return caches


def record_interruption(workspace: Workspace, name: str, reason: str) -> None:
    """Records that the process of a run was ended by another process, and why."""
    record = workspace.record(name)
    if record and record.outcome is None:
        workspace.update_record(name, ended=now(), outcome="interrupted", reason=reason)


class ParentStudy(NamedTuple):
    """The study of which a run is a trial.

    Attributes:
        name: Name of the study.
        parent: id of the study's MLflow run.
        varied: Values in which the trials differ, by short name; logged as additional parameters of the MLflow run.
        metrics: Metrics of the MLflow run that do not depend on the run's outputs, such as the paper's mIoU.
        on_records: Called with new records of the trial's trainings.
    """

    name: str
    parent: str | None
    varied: Mapping[str, Any]
    metrics: Mapping[str, float]
    on_records: OnRecords | None = None


@contextlib.contextmanager
def run_lifecycle(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    runs_all_stages: bool,
    recompute: bool,
    study: ParentStudy | None,
    log_model: LogModel,
) -> Iterator[Tracker]:
    """Holds the name of a run during the block, and records its start, its end and its configuration, also in MLflow.

    Args:
        runs_all_stages: See `run_record`.
        recompute: Whether stages are computed again, which starts a new MLflow run.
        study: The study of which the run is a trial.
        log_model: Logs the trained network to MLflow.
    """
    config = resolved.config
    folder = workspace.run(name, create=False)
    parameters = dict(leaves(config))
    if study:
        parent = study.parent
    else:  # of a trial that is run again by itself, for example after its files were moved
        earlier = TrackingRecord.read(folder)
        parent = earlier.parent if earlier else None

    with run_record(workspace, name, runs_all_stages=runs_all_stages, study=study.name if study else None):
        if not workspace.outputs(name):
            write_text(folder.config, experiment_text(config, resolved.origins))
        for key, value in leaves(config.weights):  # weights may be the output of another run
            output = local_path(value or "").parent
            if output.parent == workspace.store.resolve():
                reference_output(workspace, name, f"weights.{key}", output)

        tracker = Tracker(
            workspace,
            name,
            identity=fingerprint(parameters, parent),
            parent=parent,
            new_run=recompute,
            on_records=study.on_records if study else None,
            log_model=log_model,
        )
        with tracker.running():
            tags = {"sources": config.sources, "recipe": config.recipe, "seed": str(config.seed)}
            record = workspace.record(name)
            if record:
                tags |= record.tags | ({"study": record.study} if record.study else {})
            if study:
                parameters.update(study.varied)
            tracker.describe(parameters, tags)
            if study:
                tracker.metrics(study.metrics)
            yield tracker


def record_index(resolved: Resolved, context: RunContext) -> None:
    """Records the configuration and the images of a run once its index exists, and frees the memory of the listing.

    Until then, `config.toml` belongs to the outputs of the previous call, which the record of the run still contains.
    """
    if context.sources:
        context.sources.release()
    release_arrow_memory()
    write_text(context.folder.config, experiment_text(resolved.config, resolved.origins))
    index = context.result("index", IndexResult)
    assert index.identity is not None  # written with the result
    context.tracker.images(index.identity, index.images)
