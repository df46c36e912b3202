"""The paper's ablations as studies: one MLflow run each, its trials the children, a table at the end."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.keys import Values, leaves
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.listing import listing
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace, fingerprint, write_json, written_aside
from mcis.tuning.search import Outcome, Trial, run_trials
from mcis.tuning.tables import (
    COLUMNS,
    PAPER_EFFECT,
    Effect,
    Meaning,
    caption,
    effect_picture,
    effect_table,
    headline,
    meaning,
    related_images_picture,
    related_images_table,
)

RELATED = tuple(range(6))
TRAININGS = ("none", "co", "co+contrastive")
EFFECT_RELATED = (0, 1, 3, 5)


def _check(resolved: Resolved, trials: Sequence[Trial], place: Workspace, until: str, swept: Sequence[str]) -> None:
    """What cannot be studied shows before the first trial has trained.

    Raises:
        UserError: an unknown stage, or one without scores; a value that the study itself sets; no ground truth; or
            what would end one of the trials.
    """
    config = resolved.config
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    if until not in stages:
        raise UserError(f"--until {until}", f"a stage with scores: {', '.join(stages)}", "choose one of them")
    told = sorted(key for key in swept if resolved.origins[key] in ("command line", "--set"))
    if told:
        raise UserError(
            f"{' and '.join(told)} by --set", "values that the study does not set itself", "leave them out of --set"
        )
    masks = listing(config).table["mask_uri"]
    if masks.null_count == len(masks):
        raise UserError(
            "no image has a ground-truth mask", "masks of some training or val images, for scores", "name their folder"
        )
    for trial in trials:
        resolve(config.setting, config.recipe, trial.values)
    # Related images and seeds ask for nothing that another trial of the same training does not.
    for trial in {trial.values.get("classifier.attention"): trial for trial in trials}.values():
        one = resolve(config.setting, config.recipe, trial.values).config
        pipeline.check(one, place, trial.name, until=until)


@contextlib.contextmanager
def _study(
    resolved: Resolved, place: Workspace, name: str, kind: str, swept: Sequence[str], *, verbose: bool
) -> Iterator[Tracker]:
    """A connected Ray, and the study's MLflow run, which the trials' runs become children of.

    It is made first, since it creates MLflow's store before several trials touch it at once.
    """
    config = resolved.config
    with ray_session(config.compute, verbose=verbose):
        identity = fingerprint(name, kind, resolved.changed(), config.recipe, config.setting)
        tracker = Tracker(place, name, identity=identity)
        status = "FAILED"
        try:
            tracker.tags({"setting": config.setting, "recipe": config.recipe, "study": kind})
            tracker.parameters({key: value for key, value in leaves(config) if key not in swept})
            yield tracker
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.finish(status)


def _keep(
    resolved: Resolved, name: str, kind: str, means: dict[str, Meaning], cells: list[dict[str, Any]], place: Workspace
) -> tuple[Path, Path]:
    """Writes a study's figures and what they mean; the file, and where its picture belongs."""
    config, folder = resolved.config, place.run(name)
    about = {"study": kind, "setting": config.setting, "recipe": config.recipe, "changed": resolved.changed()}
    write_json(folder.study, {**about, "means": means, "cells": cells})
    return folder.study, folder.study_picture


def _end(outcome: Outcome, tracker: Tracker, files: Sequence[Path], means: dict[str, Meaning]) -> None:
    """Keeps a study's files with its MLflow run, says what its columns mean, and raises what went wrong."""
    for path in files:
        tracker.artifact(path)
    console.print(caption(means))
    console.print(f"table and picture: {files[0]}, {files[1].name} beside it")
    if outcome.failure:
        raise outcome.failure


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> dict[int, dict[str, float]]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0 .. NAME-r5. Contrastive features need
    related images, so that R = 0 is without.

    Raises:
        UserError: what cannot be studied (see `_check`); or a trial failed, after the table of the others.
    """
    place, swept = Workspace(workspace), ("localize.related",)
    method = resolved.config.localize.method
    alone: Values = {"localize.method.contrastive": False} if method.contrastive else {}
    trials = {
        related: Trial(
            f"{name}-r{related}",
            {**resolved.changed(), "localize.related": related, **(alone if not related else {})},
            until,
        )
        for related in RELATED
    }
    _check(resolved, list(trials.values()), place, until, swept)
    with _study(resolved, place, name, "references", swept, verbose=verbose) as tracker:
        outcome = run_trials(
            resolved.config,
            list(trials.values()),
            workspace=place,
            study=name,
            parent=tracker.run_id,
            parallel=parallel,
        )
        found = {r: outcome.scores[trial.name] for r, trial in trials.items() if trial.name in outcome.scores}
        figures = {related: headline(scores, related) for related, scores in found.items()}
        means = meaning([(scores, related) for related, scores in found.items()])
        cells = [{"related": related, "miou": row} for related, row in figures.items()]
        files = _keep(resolved, name, "references", means, cells, place)
        with written_aside(files[1]) as aside:
            related_images_picture(figures, aside, name, caption(means))
        for related, row in figures.items():
            for column, value in row.items():
                tracker.metric_at(f"miou.{column.replace(',', '')}", value, related)
        console.print(related_images_table(figures, f"mIoU % by number of related images, {name}"))
        _end(outcome, tracker, files, means)
    return figures


def effect(
    resolved: Resolved,
    workspace: Path,
    name: str,
    *,
    trainings: Sequence[str] = TRAININGS,
    related: Sequence[int] = EFFECT_RELATED,
    seeds: int,
    until: str,
    parallel: int,
    verbose: bool = False,
) -> list[Effect]:
    """What co-attention brings (tables 5 and 6): training with neither, one or both, times related images R.

    Each cell is the mean over seeds of whole runs. Up to the pseudo masks all cells are computed; `until=evaluate`
    takes those of the paper's two tables, and the control, on to the segmenter. Writes runs/NAME/study.json and
    study.png; the trials are the runs NAME-<training>-r<R>-s<seed>.

    Args:
        trainings: values of `classifier.attention`. Without co-attention, related images are for evidence alone; such
            cells are the control for what they bring without its training.
        related: numbers R of related images.
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: what cannot be studied (see `_check`); or a trial failed, after the table of the others.
    """
    place, swept, config = Workspace(workspace), ("classifier.attention", "localize.related"), resolved.config
    unknown = sorted(set(trainings) - set(TRAININGS))
    if unknown or not trainings or not related:
        raise UserError(f"--training {', '.join(unknown)}", f"some of {', '.join(TRAININGS)}", "choose of them")
    cells = [
        (attention, r)
        for attention, r in itertools.product(trainings, sorted(set(related)))
        if attention != "none" or r == 0 or config.localize.method.name == "evidence"
    ]
    trials = {
        (attention, r, seed): Trial(
            f"{name}-{attention.replace('+', '-')}-r{r}-s{seed}",
            {
                **resolved.changed(),
                "classifier.attention": attention,
                "localize.related": r,
                "seed": config.seed + seed,
            },
            until if (attention, r) in {*PAPER_EFFECT, ("none", 3)} else earlier(until, "pseudo_masks"),
        )
        for seed in range(seeds)
        for attention, r in cells
    }
    _check(resolved, list(trials.values()), place, until, swept)
    with _study(resolved, place, name, "effect", (*swept, "seed"), verbose=verbose) as tracker:
        outcome = run_trials(
            config, list(trials.values()), workspace=place, study=name, parent=tracker.run_id, parallel=parallel
        )
        figures, every = [], []
        for attention, r in cells:
            names = [trials[attention, r, seed].name for seed in range(seeds)]
            found = [outcome.scores[each] for each in names if each in outcome.scores]
            rows = [headline(scores, r) for scores in found]
            every += [(scores, r) for scores in found]
            if rows:
                figures.append(Effect(attention, r, {c: [row[c] for row in rows] for c in COLUMNS if c in rows[0]}))
        means = meaning(every)
        files = _keep(resolved, name, "effect", means, [cell._asdict() for cell in figures], place)
        with written_aside(files[1]) as aside:
            effect_picture(figures, aside, name, caption(means))
        tracker.metrics(
            {
                f"miou.{column.replace(',', '')}.{cell.attention.replace('+', '-')}.r{cell.related}": mean(values)
                for cell in figures
                for column, values in cell.miou.items()
            }
        )
        console.print(effect_table(figures, f"mIoU %, mean and deviation over {seeds} seeds, {name}"))
        _end(outcome, tracker, files, means)
    return figures


def earlier(one: str, other: str) -> str:
    """The stage of the two that comes first on the journey."""
    return min(one, other, key=pipeline.STAGE_NAMES.index)
