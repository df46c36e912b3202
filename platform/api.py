"""What the command line does, as functions. `import mcis` offers them: `mcis.run`, `mcis.index`, `mcis.scores`, ..."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.compute as pc

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import local_path
from mcis.platform import pipeline
from mcis.platform.config.keys import value_of
from mcis.platform.config.resolve import OVERRIDE, Overrides, Resolved, location_values, resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.networks.predictor import Predictor
from mcis.platform.outputs.read_index import OpenedIndex, open_index
from mcis.platform.outputs.relocation import copy_checks, moved_values
from mcis.platform.pipeline import RunResult
from mcis.platform.reporting.compared_runs import open_run_groups
from mcis.platform.reporting.comparison import BootstrapSettings, Comparison
from mcis.platform.reporting.comparison import compare as compare_groups
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.scores import Score, read_scores
from mcis.platform.runs.workspace import Workspace, open_workspace
from mcis.platform.stages.report import panels_of

__all__ = [
    "Predictor",
    "UserError",
    "compare",
    "evaluate",
    "index",
    "panel",
    "relocate",
    "run",
    "run_resolved",
    "scores",
]


class ImportedKind(NamedTuple):
    """A kind of files of another program, and what they replace in a run.

    Attributes:
        values: Configuration values by dotted key, without the folder.
        folder: Key of the folder.
        until: Last stage of the run. None: all.
    """

    values: dict[str, Any]
    folder: str
    until: str | None

    def values_of(self, folder: Path | str) -> dict[str, Any]:
        """Returns the values of a run that trains nothing and scores the files of a folder."""
        scored = {"compute.gpu": False, "compute.stop_if_not_learning": False}  # poor masks are scored like others
        return {**self.values, **scored, self.folder: str(folder)}

    def check_folder(self, resolved: Resolved) -> None:
        """Raises UserError if an override of the configuration replaces the folder."""
        if resolved.origins[self.folder] == OVERRIDE:
            raise UserError(
                f"two folders: the one to score, and {self.folder}", "one folder", f"leave {self.folder} out"
            )

    def check_name(self, name: str, workspace: Path | str | None) -> None:
        """Raises UserError if the name is that of a run without such files, whose outputs would be replaced."""
        file = open_workspace(workspace, create=False).run(name, create=False).config
        if file.is_file() and not value_of(resolve(file=file).config, self.folder):
            raise UserError(
                f"{name} is a run without {self.folder}",
                f"a new name, or that of a run with {self.folder}",
                "choose another --name",
            )


_NO_CLASSIFIER = {"segmenter.init": "pretrained"}
"""Values of runs that end before a segmentation network, which could start from a classifier."""
IMPORTED_KINDS = {
    "predictions": ImportedKind({}, "predict.masks", None),
    "masks": ImportedKind(_NO_CLASSIFIER | {"pseudo_masks.rule": "imported"}, "pseudo_masks.masks", "pseudo_masks"),
    "maps": ImportedKind(_NO_CLASSIFIER, "localize.maps", "localize"),
}
"""Kinds of files of another program that `evaluate` scores."""


def run(
    source: str | Path | None = None,
    *,
    name: str,
    overrides: Overrides = (),
    recipe: str | None = None,
    config: Path | str | None = None,
    workspace: Path | str | None = None,
    until: str | None = None,
    start: str | None = None,
    verbose: bool = False,
    **locations: Path | str | Sequence[Path | str],
) -> RunResult:
    """Runs the pipeline: its nine stages, from the index of the images to the report.

    A second call with the same name computes only what is missing or changed. The stages run on the cluster that
    `RAY_ADDRESS` names, or else on a Ray that is started for the call.

    Args:
        source: A table of images and tags (path or URI of a .csv, .jsonl or .parquet file), or names of image sources
            joined by +, such as "voc+web". None: the sources of `config`.
        name: Name of the run.
        overrides: Values by dotted key, such as `{"localize.related": 5, "seed": 1}`, or texts `key=value`.
        recipe: Name of a recipe. None: that of `config`, or else the default of the source.
        config: Experiment, as `mcis config show --save` or an earlier run wrote it.
        workspace: Folder of all runs. None: the environment variable MCIS_WORKSPACE, or else mcis-workspace.
        until: Last stage. The stages so far are scored and reported.
        start: Compute this stage and all after it again. It may be a later one than `until` if it runs all the same, as
            `evaluate` and `report` do.
        verbose: Print the output of the workers.
        locations: Where each source is: `voc=DIR`, `web=DIR`, `single=[DIR, DIR]`, ...

    Returns:
        The scores, `result.scores`, and the context of the run; `result.context.folder.report` is the report.

    Raises:
        UserError: The configuration, the data or the machine has a problem that the user can solve.
    """
    resolved = _resolve(source, overrides, recipe, config, locations)
    return run_resolved(resolved, name, workspace=workspace, until=until, start=start, verbose=verbose)


def run_resolved(
    resolved: Resolved,
    name: str,
    *,
    workspace: Path | str | None = None,
    until: str | None = None,
    start: str | None = None,
    verbose: bool = False,
    on_checked: Callable[..., object] | None = None,
) -> RunResult:
    """Checks a configuration and runs the pipeline. Arguments and errors are those of `run`.

    Args:
        resolved: The configuration.
        on_checked: Called with the configuration and the listing of its sources before the run starts.
    """
    opened = open_workspace(workspace)
    sources = pipeline.check(resolved.config, opened, name, until=until)
    if on_checked:
        on_checked(resolved.config, sources.listing())

    with ray_session(resolved.config.compute, verbose=verbose):
        return pipeline.run(resolved, opened, name, until=until, start=start, sources=sources)


def evaluate(
    folder: Path | str,
    source: str | Path | None = None,
    *,
    name: str,
    kind: Literal["predictions", "masks", "maps"] = "predictions",
    overrides: Overrides = (),
    recipe: str | None = None,
    config: Path | str | None = None,
    workspace: Path | str | None = None,
    verbose: bool = False,
    **locations: Path | str | Sequence[Path | str],
) -> RunResult:
    """Scores predictions, pseudo masks or localization maps of another program, as a run of its own.

    Nothing is trained. Other arguments, the result and errors are those of `run`.

    Args:
        folder: Files of the other program, named after the images.
        kind: What they are: predictions of the split val (the value `predict.split` selects another), pseudo masks of
            train, or localization maps of train (the value `localize.maps_format` is their format).
    """
    imported_kind = IMPORTED_KINDS[kind]
    resolved = _resolve(source, overrides, recipe, config, locations, imported_kind.values_of(folder))
    imported_kind.check_folder(resolved)
    imported_kind.check_name(name, workspace)
    return run_resolved(resolved, name, workspace=workspace, until=imported_kind.until, verbose=verbose)


def index(
    source: str | Path | None = None,
    *,
    name: str,
    overrides: Overrides = (),
    config: Path | str | None = None,
    workspace: Path | str | None = None,
    verbose: bool = False,
    **locations: Path | str | Sequence[Path | str],
) -> OpenedIndex:
    """Verifies every image of the sources and makes their index, the first stage of a run, without any training.

    Arguments and errors are those of `run`.

    Returns:
        The tables `index` and `rejects`, the names `classes`, and `notes` on the data.
    """
    resolved = _resolve(source, overrides, None, config, locations)
    context = run_resolved(resolved, name, workspace=workspace, until="index", verbose=verbose).context
    return open_index(context.workspace, name)


def relocate(
    name: str, old: Path | str, new: Path | str, *, workspace: Path | str | None = None, verbose: bool = False
) -> RunResult:
    """Makes a run read its files from a new place, after photographs, tables or masks were moved.

    The files are compared with the index: ids and sizes of all, the content of a sample. No image is opened again, and
    no stage after the index is computed again. Masks count as unchanged if their modification times are the same.

    Args:
        name: Name of the run.
        old: Folder that the run's configuration names, or a folder above it; a path or URI.
        new: The folder that holds the files now.
        workspace: See `run`.
        verbose: See `run`.

    Raises:
        UserError: The run has no index, it reads nothing in `old`, or files in `new` are missing or differ.
    """
    opened = open_workspace(workspace, create=False)
    open_index(opened, name, ["split"])  # raises an error if there is no such run
    file = opened.run(name, create=False).config
    config = resolve(file=file).config
    moved = resolve(file=file, overrides=moved_values(config, str(old), str(new)))

    outputs = opened.outputs(name)
    reached = [stage.name for stage in pipeline.STAGES if stage.name in outputs and stage.name != "evaluate"]
    until = None if "predict" in reached else reached[-1]
    sources = pipeline.check(moved.config, opened, name, until=until)
    copy_checks(opened, name, sources.listing().table)
    with ray_session(moved.config.compute, verbose=verbose):
        return pipeline.run(moved, opened, name, until=until, sources=sources)


def scores(run: str | Path, *, workspace: Path | str | None = None) -> list[Score]:
    """Returns the scores of a run; empty if it has none yet.

    Args:
        run: Name of a run of the workspace, or the path of its folder, WORKSPACE/runs/NAME.
        workspace: See `run`.

    Raises:
        UserError: There is no such run.
    """
    if "/" in str(run):
        folder = local_path(str(run)).expanduser().resolve()
    else:
        folder = open_workspace(workspace, create=False).run(str(run), create=False).path
    if not folder.is_dir():
        raise UserError(
            f"no run {run}", "a run's name, or its folder WORKSPACE/runs/NAME", "name a run that `mcis runs` shows"
        )
    return read_scores(Workspace(folder.parent.parent, create=False).outputs(folder.name))


def compare(runs: Sequence[str], *, workspace: Path | str | None = None, seed: int = 0) -> Comparison:
    """Compares scores of runs on the same images; the first run is the baseline.

    Differences of mIoU have bootstrap intervals over the images, and over the seeds if there are several.

    Args:
        runs: At least two; each is the name of a run, the path of its folder, or several of these joined by commas,
            which are seeds of one configuration.
        workspace: See `run`.
        seed: Seed of the bootstrap.

    Raises:
        UserError: A run is absent or has no scores, or the runs have different classes.
    """
    groups = open_run_groups(open_workspace(workspace, create=False).root, runs)
    return compare_groups(groups, BootstrapSettings(seed=seed))


def panel(result: RunResult, image_id: str | Path) -> Panel:
    """Returns an image of a run with its maps, pseudo mask and prediction, as far as the run has come.

    Args:
        result: What `run` returned.
        image_id: Id of an image in the index. A training image is predicted here.

    Raises:
        UserError: The index has no such image.
    """
    context = result.context
    images = open_index(context.workspace, context.name).index
    rows = images.filter(pc.equal(images["image_id"], str(image_id)))
    if not len(rows):
        raise UserError(
            f"no image {image_id!r} in the index of {context.name}",
            "an id of the column image_id",
            f"choose one of those that `mcis index show --name {context.name}` counts",
        )
    config = resolve(file=context.folder.config).config
    return panels_of(config, context, rows, rows["split"][0].as_py())[0]


def _resolve(
    source: str | Path | None,
    overrides: Overrides,
    recipe: str | None,
    config: Path | str | None,
    locations: dict[str, Any],
    values: Mapping[str, Any] | None = None,
) -> Resolved:
    sources = None if source is None else str(source)
    file = None if config is None else Path(config)
    return resolve(sources, recipe, {**location_values(locations), **(values or {})}, overrides, file=file)
