"""What the command line does, from Python.

from mcis.platform.api import Predictor, index, panel, run, scores

mine = run("tags", "mine", tags="photos.csv", assignments=["seed=1"])  # mcis run tags --name mine --tags ...
print([score.miou for score in mine.scores], mine.context.folder.report)
made = panel(mine, "photos/0001.jpg")  # made.image, .maps, .pseudo_mask, .prediction
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import local_path
from mcis.platform import pipeline
from mcis.platform.config.resolve import Resolved, location_values, resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.networks.predictor import Predictor
from mcis.platform.outputs.read_index import OpenedIndex, open_index
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.report import panels_of

__all__ = ["Predictor", "index", "panel", "run", "scores"]


def run(
    sources: str | Resolved | None,
    name: str,
    *,
    workspace: Path | str | None = None,
    recipe: str | None = None,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    until: str | None = None,
    start: str | None = None,
    verbose: bool = False,
    show: Callable[..., object] | None = None,
    **locations: Path | str,
) -> pipeline.RunResult:
    """Checks a configuration, and runs the pipeline in a Ray of its own or a cluster's, as `mcis run` does.

    Errors are those of `resolve`, `pipeline.check` and `pipeline.run`.

    Args:
        sources, recipe, config, assignments, locations: see `resolve`, whose `file` is `config`; or what it returned.
        until, start: see `pipeline.run`.
        show: what to call before the run with the configuration and what the listed hold.
    """
    if isinstance(sources, Resolved):
        resolved = sources
    else:
        resolved = resolve(sources, recipe, location_values(locations), assignments, file=config)
    opened = Workspace(local_path(str(workspace or os.environ.get("MCIS_WORKSPACE", "mcis-workspace"))))
    listed = pipeline.check(resolved.config, opened, name, until=until)
    if show:
        show(resolved.config, listed.listing())
    with ray_session(resolved.config.compute, verbose=verbose):
        return pipeline.run(resolved, opened, name, until=until, start=start, sources=listed)


def index(sources: str | Resolved | None, name: str, **given: Any) -> OpenedIndex:
    """The index of some images, without any training; it takes what `run` takes."""
    context = run(sources, name, **given, until="index").context
    return open_index(context.workspace, name)


def scores(run: Path | str) -> list[Score]:
    """The scores of a run, by its folder, WORKSPACE/runs/NAME; none where it has come to none. UserError: no run."""
    folder = local_path(str(run)).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"no run {run}", "its folder, WORKSPACE/runs/NAME", "name one that `mcis runs` shows")
    return read_scores(Workspace(folder.parent.parent, create=False).outputs(folder.name))


def panel(run: pipeline.RunResult, image_id: str | Path) -> Panel:
    """What a run has made of an image of its index, as far as it has come; a training image is predicted here.

    UserError: there is no such image in its index.
    """
    context = run.context
    index = open_index(context.workspace, context.name).index
    rows = index.filter(pc.equal(index["image_id"], str(image_id)))
    if not len(rows):
        raise UserError(f"no image {image_id!r} in the index of {context.name}", "an `image_id` of it", "see `index`")
    return panels_of(resolve(file=context.folder.config).config, context, rows, rows["split"][0].as_py())[0]
