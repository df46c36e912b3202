"""The whole journey on one screen: eight stages, what each needs, and which part of the configuration it depends on.

A stage's output is kept under a key: the fingerprint of its part of the configuration, of its outer inputs and of the
keys of the stages it needs. What has the same key is the same and is not computed again, in this run or in another.
"""

import contextlib
import dataclasses
import importlib
import time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.platform.config.resolve import Resolved, leaves
from mcis.platform.config.sections import Config, Section, WeightsConfig
from mcis.platform.runs.context import SUMMARY, RunContext
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace, disk_errors, fingerprint, read_json, write_json


class Stage(NamedTuple):
    """A room of the journey; its door is `run(config, context)` in `mcis.platform.stages.<name>`.

    Attributes:
        needs: stages whose output it reads; of those of `evaluate`, the ones that were reached.
        sections: parts of the configuration that its result depends on.
        version: raised when the meaning of its output changes, so that older outputs are not taken for new ones.
    """

    name: str
    needs: tuple[str, ...]
    sections: tuple[str, ...]
    version: int = 1


JOURNEY = (
    Stage("index", (), ("data", "setting"), version=2),
    Stage("train_classifier", ("index",), ("seed", "classifier")),
    Stage("localize", ("index", "train_classifier"), ("seed", "classifier", "localize"), version=2),
    Stage("pseudo_masks", ("index", "localize"), ("maps", "pseudo_masks")),
    Stage("train_segmenter", ("index", "train_classifier", "pseudo_masks"), ("seed", "classifier", "segmenter")),
    Stage("predict", ("index", "train_segmenter"), ("segmenter", "predict"), version=2),
    Stage(
        "evaluate",
        ("index", "localize", "pseudo_masks", "predict"),
        ("seed", "recipe", "weights", "maps", "evaluate"),
        version=4,
    ),
    Stage("report", (), ()),
)
STAGES = tuple(stage.name for stage in JOURNEY)


class RunResult(NamedTuple):
    """What a run came to: its folder, the entries of scores.json, stage seconds, and which stages were computed."""

    context: RunContext
    scores: list[dict[str, Any]]


def _check_stage(option: str, name: str | None) -> None:
    if name is not None and name not in STAGES:
        raise UserError(f"{option} {name}", f"one of {', '.join(STAGES)}", f"choose one of them for {option}")


def check(
    config: Config, workspace: Workspace, name: str, *, until: str | None = None, start: str | None = None
) -> None:
    """Finds what would end the run later, up to its last stage: names and stages that are none, unreadable lists,
    absent folders, images that a stage asks for and the sources do not have, weights that cannot be had.

    Raises:
        UserError: the first such problem, before a Ray is started for it.
    """
    from mcis.platform.runs.listing import listing

    _check_stage("--until", until)
    _check_stage("--from", start)
    workspace.run(name, new=False)
    found = listing(config)
    last = STAGES.index(until) if until else len(STAGES)
    if last >= STAGES.index("localize"):
        _check_images(config, found.table, last)
    if config.weights == WeightsConfig() or last == 0:
        return
    from mcis.models.backbones import load_pretrained
    from mcis.platform.networks.build import build_backbone
    from mcis.platform.networks.pretrained import classifier_weights, segmenter_weights
    from mcis.platform.networks.trained import load_trained_classifier, trained_classifier

    if trained := trained_classifier(config):
        load_trained_classifier(config, trained, found.classes)
    for section, path in (
        (config.classifier, classifier_weights(config, workspace)),
        (config.segmenter, segmenter_weights(config, workspace)),
    ):
        if path:
            load_pretrained(build_backbone(section.backbone, channels=section.channels), path)


def _check_images(config: Config, listed: pa.Table, last: int) -> None:
    """What stages up to `last` ask of the images that are listed; the index may reject some of them yet."""
    from mcis.platform.stages.localize import check_domain
    from mcis.platform.stages.predict import predicted_split
    from mcis.platform.stages.pseudo_masks import background_cue

    train = listed.filter(
        pc.and_(pc.equal(listed["split"], "train"), pc.greater(pc.list_value_length(listed["tags"]), 0))
    )
    if config.localize.related:
        check_domain(config, np.array(train["domain"].to_pylist()) == "source")
    if last >= STAGES.index("pseudo_masks"):
        background_cue(config.pseudo_masks, train)
    if last >= STAGES.index("predict"):
        counts = listed["split"].value_counts().to_pylist()
        predicted_split(config, {each["values"]: each["counts"] for each in counts})


def run(
    resolved: Resolved,
    workspace: Workspace,
    name: str,
    *,
    until: str | None = None,
    start: str | None = None,
    parent: str | None = None,
    tags: dict[str, str] | None = None,
) -> RunResult:
    """Walks the journey in a Ray that is connected, and computes what is missing or changed.

    Args:
        until: last stage; what there is by then is scored and reported all the same.
        start: this stage and all after it are computed again.
        parent: MLflow run of a study that this run belongs to.
        tags: further tags of the MLflow run.
    """
    config = resolved.config
    folder = workspace.run(name)
    values = dict(leaves(config))
    write_json(
        folder / "config.json", {k: {"value": v, "from": resolved.sources[k]} for k, v in _plain(values).items()}
    )
    if start == "index":
        workspace.verdicts.unlink(missing_ok=True)
    if start:
        (folder / "mlflow.json").unlink(missing_ok=True)  # what is computed again has curves of its own
    tracker = Tracker(workspace, folder, name, identity=fingerprint(_plain(values), parent), parent=parent)
    try:
        tracker.parameters(values)
        tracker.tags({"setting": config.setting, "recipe": config.recipe, "seed": str(config.seed), **(tags or {})})
        result = _walk(resolved, workspace, name, tracker, until=until, start=start)
    except BaseException as error:
        with contextlib.suppress(UserError):  # the error that ended the run is the one to tell
            tracker.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    tracker.finish("FINISHED")
    return result


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str | int | float | bool | type(None) | tuple) else str(v) for k, v in values.items()}


def _walk(
    resolved: Resolved, workspace: Workspace, name: str, tracker: Tracker, *, until: str | None, start: str | None
) -> RunResult:
    config, folder = resolved.config, workspace.run(name)
    identities: dict[str, str] = {}
    context = RunContext(
        workspace=workspace, name=name, folder=folder, part=folder, inputs={}, tracker=tracker, sources=resolved.sources
    )
    last = STAGES.index(until) if until else len(STAGES)
    again = STAGES.index(start) if start else len(STAGES)
    for number, stage in enumerate(JOURNEY):
        scored = stage.name == "evaluate" and "localize" in context.inputs
        if number > last and not scored and stage.name != "report":
            continue
        module = importlib.import_module(f"mcis.platform.stages.{stage.name}")
        began = time.monotonic()
        if stage.name == "report":
            context.computed["report"] = True
            module.run(config, context)
            break
        key = _key(stage, config, context, module, identities)
        computed = _compute(stage, key, config, context, module, afresh=number >= again)
        context.inputs[stage.name] = workspace.finished(stage.name, key)
        context.seconds[stage.name] = time.monotonic() - began
        context.computed[stage.name] = computed
        identities[stage.name] = context.summary(stage.name).get("content", key)
        write_json(folder / "run.json", {n: str(p.relative_to(workspace.root)) for n, p in context.inputs.items()})
        what = f"{context.seconds[stage.name]:.1f} s" if computed else "is there already"
        console.print(f"[bold]{stage.name}[/bold]: {what}")
    return RunResult(context, read_json(folder / "scores.json")["scores"])


def _key(stage: Stage, config: Config, context: RunContext, module: Any, identities: dict[str, str]) -> str:
    sections = {name: _section(config, name) for name in stage.sections}
    outer = module.inputs(config, context) if hasattr(module, "inputs") else None
    return fingerprint(
        stage.name, stage.version, sections, outer, {n: identities[n] for n in stage.needs if n in identities}
    )


def _section(config: Config, name: str) -> Any:
    value = getattr(config, name)
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _compute(stage: Stage, key: str, config: Config, context: RunContext, module: Any, *, afresh: bool) -> bool:
    """Computes the stage if its output is not there; True if it did."""
    workspace = context.workspace
    with workspace.lock(stage.name, key):
        finished = workspace.finished(stage.name, key)
        if (finished / SUMMARY).exists() and not afresh:
            return False
        if afresh:
            workspace.forget(stage.name, key)
        part = workspace.part(stage.name, key)
        began = time.monotonic()
        with disk_errors(part):
            part.mkdir(parents=True, exist_ok=True)
            summary = module.run(config, dataclasses.replace(context, part=part))
        write_json(part / SUMMARY, {**summary, "seconds": time.monotonic() - began, "stage": stage.name, "key": key})
        workspace.finish(stage.name, key)
        return True
