"""The paper's ablations as studies: one MLflow run each, its trials the children, a table at the end."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.progress import console
from mcis.platform.runtime import ray_session
from mcis.platform.settings import Resolved, Values, leaves, resolve
from mcis.platform.tracking import Tracker
from mcis.platform.workspace import Workspace, fingerprint, write_json, written_aside
from mcis.tuning.search import Trial, run_trials
from mcis.tuning.tables import (
    COLUMNS,
    PAPER_EFFECT,
    Effect,
    effect_picture,
    effect_table,
    headline,
    related_images_picture,
    related_images_table,
)

RELATED = tuple(range(6))
EFFECT_RELATED = (0, 1, 3, 5)


def changed_values(resolved: Resolved) -> Values:
    """The values that differ from defaults, recipe and setting: what a trial has to be told."""
    told = ("command line", "--set")
    return {
        key: value if isinstance(value, int | float | str | list | tuple | None) else str(value)
        for key, value in leaves(resolved.config)
        if resolved.sources[key] in told and key not in ("setting", "recipe")
    }


@contextlib.contextmanager
def _study(
    resolved: Resolved, workspace: Path, name: str, kind: str, swept: Sequence[str], *, verbose: bool
) -> Iterator[tuple[Workspace, Tracker]]:
    """A connected Ray, and the study's MLflow run, which the trials' runs become children of.

    It is made first, since it creates MLflow's store before several trials touch it at once.
    """
    config = resolved.config
    place = Workspace(workspace)
    pipeline.check(config, place)
    with ray_session(config.compute, verbose=verbose):
        identity = fingerprint(name, kind, changed_values(resolved), config.recipe, config.setting)
        tracker = Tracker(place, place.run(name), name, identity=identity)
        status = "FAILED"
        try:
            tracker.tags({"setting": config.setting, "recipe": config.recipe, "study": kind})
            tracker.parameters({key: value for key, value in leaves(config) if key not in swept})
            yield place, tracker
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.finish(status)


def _keep(figures: Any, name: str, picture: Callable[[Any, Path], None], place: Workspace, tracker: Tracker) -> None:
    """Writes the study's figures and their picture, and keeps both with its MLflow run."""
    folder = place.run(name)
    write_json(folder / "study.json", figures)
    with written_aside(folder / "study.png") as aside:
        picture(figures, aside)
    tracker.artifact(folder / "study.json")
    tracker.artifact(folder / "study.png")


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> dict[int, dict[str, float]]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and study.png; the trials are the runs NAME-r0 .. NAME-r5.

    Raises:
        UserError: a classifier without co-attention, an unknown stage, or a trial that failed.
    """
    if resolved.config.classifier.attention == "none":
        raise UserError(
            "the study of related images with classifier.attention=none",
            "a classifier with co-attention",
            "set classifier.attention=co or co+contrastive",
        )
    _known_stage(until)
    trials = [
        Trial(f"{name}-r{related}", {**changed_values(resolved), "localize.related": related}, until)
        for related in RELATED
    ]
    with _study(resolved, workspace, name, "references", ("localize.related",), verbose=verbose) as (place, tracker):
        scores = run_trials(
            resolved.config, trials, workspace=place, study=name, parent=tracker.run_id, parallel=parallel
        )
        figures = {related: headline(scores[f"{name}-r{related}"], related) for related in RELATED}
        _keep({"related_images": figures}, name, lambda _, path: related_images_picture(figures, path), place, tracker)
        for related, row in figures.items():
            for column, value in row.items():
                tracker.metric_at(f"miou.{column.replace(',', '')}", value, related)
    console.print(related_images_table(figures, f"mIoU % by number of related images, {name}"))
    console.print(f"table and picture: {place.run(name) / 'study.json'}, study.png beside it")
    return figures


def effect(
    resolved: Resolved,
    workspace: Path,
    name: str,
    *,
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
        seeds: how many, counted from the configuration's.

    Raises:
        UserError: an unknown stage, or a trial that failed.
    """
    _known_stage(until)
    config = resolved.config
    # Evidence needs no co-attention: the training without it is then the control for what related images bring alone.
    control = EFFECT_RELATED if config.localize.aggregation == "evidence" else (0,)
    cells = [*itertools.product(("none",), control), *itertools.product(("co", "co+contrastive"), EFFECT_RELATED)]
    trials = {
        (attention, related, seed): Trial(
            f"{name}-{attention.replace('+', '-')}-r{related}-s{seed}",
            {
                **changed_values(resolved),
                "classifier.attention": attention,
                "localize.related": related,
                "seed": config.seed + seed,
            },
            until if (attention, related) in {*PAPER_EFFECT, ("none", 3)} else earlier(until, "pseudo_masks"),
        )
        for seed in range(seeds)
        for attention, related in cells
    }
    for trial in trials.values():  # what does not go together shows before the first of them has trained
        resolve(config.setting, config.recipe, trial.values)
    swept = ("classifier.attention", "localize.related", "seed")
    with _study(resolved, workspace, name, "effect", swept, verbose=verbose) as (place, tracker):
        scores = run_trials(
            config,
            list(trials.values()),
            workspace=place,
            study=name,
            parent=tracker.run_id,
            parallel=parallel,
        )
        figures = []
        for attention, related in cells:
            rows = [headline(scores[trials[attention, related, seed].name], related) for seed in range(seeds)]
            figures.append(Effect(attention, related, {c: [row[c] for row in rows] for c in COLUMNS if c in rows[0]}))
        _keep([cell._asdict() for cell in figures], name, lambda _, path: effect_picture(figures, path), place, tracker)
        tracker.metrics(
            {
                f"miou.{column.replace(',', '')}.{cell.attention.replace('+', '-')}.r{cell.related}": mean(values)
                for cell in figures
                for column, values in cell.miou.items()
            }
        )
    console.print(effect_table(figures, f"mIoU %, mean and deviation over {seeds} seeds, {name}"))
    console.print(f"table and picture: {place.run(name) / 'study.json'}, study.png beside it")
    return figures


def _known_stage(until: str) -> None:
    if until not in pipeline.STAGES:
        raise UserError(f"--until {until}", f"one of {', '.join(pipeline.STAGES)}", "choose one of them")


def earlier(one: str, other: str) -> str:
    """The stage of the two that comes first on the journey."""
    return min(one, other, key=pipeline.STAGES.index)
