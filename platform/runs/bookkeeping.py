"""What is written down of a run beside its outputs: its record, its configuration, and its MLflow run."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from mcis.datasets.storage.copies import place_of
from mcis.datasets.tables.large_tables import give_back
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.keys import leaves
from mcis.platform.config.resolve import Resolved
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.data_sets import data_sets
from mcis.platform.runs.record import point_to, recomputed, recorded
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.sync import LogModel
from mcis.platform.runs.tracking import Tracker, Watch
from mcis.platform.runs.workspace import Workspace, fingerprint, read_table, write_text


@contextlib.contextmanager
def bookkept(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    whole: bool,
    recompute: bool,
    parent: str | None,
    study: str | None,
    varied: Mapping[str, Any] | None,
    watch: Watch | None,
    log_model: LogModel,
) -> Iterator[Tracker]:
    """Holds a run's name while the block runs, and writes down when that began, of what, and how it ended.

    Args:
        whole: whether the block goes to the last stage.
        recompute: whether stages are computed again, which has curves of its own in MLflow, those of a call that goes
            on with it included.
        parent, study, varied, watch: see `pipeline.run`.
        log_model: logs the network that MLflow is to have.
    """
    config, folder, values = resolved.config, workspace.run(name, create=False), dict(leaves(resolved.config))
    with recorded(workspace, name, whole=whole, study=study):
        if not folder.stages.exists():
            write_text(folder.config, experiment_text(config, resolved.origins))
        for key, value in leaves(config.weights):  # which may be another run's
            output = place_of(value or "").parent
            if output.parent == workspace.store.resolve():
                point_to(workspace, name, f"weights.{key}", output)
        tracker = Tracker(
            workspace,
            name,
            identity=fingerprint(values, parent),
            parent=parent,
            new_run=recompute and not recomputed(workspace, name),
            watch=watch,
            log_model=log_model,
        )
        with tracker.running(system_metrics=config.tracking.system_metrics):
            tracker.parameters({**values, **(varied or {})})
            tags = {"setting": config.setting, "recipe": config.recipe, "seed": str(config.seed)}
            tracker.tags(tags | ({"study": study} if study else {}))
            yield tracker


def index_is_made(resolved: Resolved, context: RunContext) -> None:
    """Writes down the configuration and the images of a run that has an index; frees what it was listed with.

    Until then the outputs that the run's folder names are those of an earlier call.
    """
    if context.sources:
        context.sources.forget()
    give_back()
    write_text(context.folder.config, experiment_text(resolved.config, resolved.origins))
    index = read_table(context.inputs["index"] / "index.parquet", ["domain", "split"])
    digest = context.result("index", IndexResult).identity
    assert digest is not None  # written with the result
    context.tracker.data_sets(data_sets(resolved.config, index, digest))
