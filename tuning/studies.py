"""The paper's ablations as studies: one MLflow run each, its trials the children, a table at the end."""

from pathlib import Path

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.progress import console
from mcis.platform.runtime import ray_session
from mcis.platform.settings import Resolved, Values, leaves
from mcis.platform.tracking import Tracker
from mcis.platform.workspace import Workspace, fingerprint, write_json, written_aside
from mcis.tuning.search import run_trials
from mcis.tuning.tables import headline, related_images_picture, related_images_table

RELATED = tuple(range(6))


def changed_values(resolved: Resolved) -> Values:
    """The values that differ from defaults, recipe and setting: what a trial has to be told."""
    told = ("command line", "--set")
    return {
        key: value if isinstance(value, int | float | str | list | tuple | None) else str(value)
        for key, value in leaves(resolved.config)
        if resolved.sources[key] in told and key not in ("setting", "recipe")
    }


def references(
    resolved: Resolved, workspace: Path, name: str, *, until: str, parallel: int, verbose: bool = False
) -> dict[int, dict[str, float]]:
    """Related images R = 0..5 over one trained classifier (table 7): mIoU in percent by R and column.

    Writes runs/NAME/study.json and related_images.png; the trials are the runs NAME-r0 .. NAME-r5.

    Raises:
        UserError: a classifier without co-attention, an unknown stage, or a trial that failed.
    """
    config = resolved.config
    if config.classifier.attention == "none":
        raise UserError(
            "the study of related images with classifier.attention=none",
            "a classifier with co-attention",
            "set classifier.attention=co or co+contrastive",
        )
    if until not in pipeline.STAGES:
        raise UserError(f"--until {until}", f"one of {', '.join(pipeline.STAGES)}", "choose one of them")
    place = Workspace(workspace)
    pipeline.check(config, place)
    folder = place.run(name)
    values = changed_values(resolved)
    with ray_session(config.compute, verbose=verbose):
        # Creates MLflow's store before several trials touch it at once, and the run that they become children of.
        tracker = Tracker(place, folder, name, identity=fingerprint(name, values, config.recipe))
        status = "FAILED"
        try:
            tracker.tags({"setting": config.setting, "recipe": config.recipe, "study": "references"})
            tracker.parameters({key: value for key, value in leaves(config) if key != "localize.related"})
            scores = run_trials(
                config.setting,
                config.recipe,
                [(f"{name}-r{related}", {**values, "localize.related": related}) for related in RELATED],
                workspace=place,
                study=name,
                parent=tracker.run_id,
                until=until,
                parallel=parallel,
            )
            figures = {related: headline(scores[f"{name}-r{related}"], related) for related in RELATED}
            write_json(folder / "study.json", {"related_images": figures})
            with written_aside(folder / "related_images.png") as aside:
                related_images_picture(figures, aside)
            for related, row in figures.items():
                for column, value in row.items():
                    tracker.metric_at(f"miou.{column.replace(',', '')}", value, related)
            tracker.artifact(folder / "study.json")
            tracker.artifact(folder / "related_images.png")
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.finish(status)
    console.print(related_images_table(figures, f"mIoU % by number of related images, {name}"))
    console.print(f"table: {folder / 'study.json'}, picture: {folder / 'related_images.png'}")
    return figures
