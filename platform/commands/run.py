"""The commands `mcis run`, `mcis demo` and `mcis config show`: the pipeline, and its configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import (
    Configuration,
    From,
    Gpu,
    Name,
    Overrides,
    Seed,
    Until,
    Verbose,
    WorkspaceFolder,
    grouped,
)
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace

if TYPE_CHECKING:
    from mcis.platform.config.resolve import Resolved

DEMO_SETTINGS = {
    "classifier.input_size": 256,
    "classifier.min_steps": 480,
    "affinity_net.crop": 160,
    "segmenter.crop": 160,
    "segmenter.min_steps": 200,
    "segmenter.trainable_stages": 4,
}
"""Values by key that differ from the recipe `photos` for the synthetic scenes, which are small and few: inputs are
smaller, steps are fewer and one more stage of the segmenter is trained."""

config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)


@grouped
def run(
    name: Name,
    configuration: Configuration,
    overrides: Overrides,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    until: Until = None,
    start: From = None,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline: its nine stages, from the index of the images to the report.

    A second call with the same name computes only what is missing or changed.
    """
    with plain_errors(verbose):
        resolved = configuration.resolve(overrides)

        from mcis.platform import api
        from mcis.platform.commands.terminal import show_outlook, show_result

        result = api.run_resolved(
            resolved, name, workspace=workspace, until=until, start=start, verbose=verbose, on_checked=show_outlook
        )
        show_result(result)


@grouped
def demo(
    overrides: Overrides,
    name: Name = "demo",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    seed: Seed = None,
    gpu: Gpu = False,
    verbose: Verbose = False,
) -> None:
    """Run the whole pipeline, from tags to masks, on a small synthetic data set."""
    with plain_errors(verbose):
        from mcis.platform import api
        from mcis.platform.commands.terminal import show_outlook, show_result
        from mcis.platform.runs.progress import console

        resolved = demo_configuration(workspace, overrides.texts(seed=seed, gpu=gpu))
        result = api.run_resolved(resolved, name, workspace=workspace, verbose=verbose, on_checked=show_outlook)
        show_result(result)
        if resolved.config.pseudo_masks.may_use_saliency:
            console.print("The demo's saliency maps are made from the ground truth, which raises the scores.")


def demo_configuration(workspace: Path, overrides: Sequence[str] = ()) -> "Resolved":
    """Returns the configuration of the demo: recipe `photos`, with tags and without saliency maps.

    The synthetic data set is made if it does not exist.
    """
    from mcis.datasets.synthetic import devkit
    from mcis.platform.config.resolve import resolve
    from mcis.platform.runs.files import disk_errors
    from mcis.platform.runs.progress import console

    root = Workspace(workspace).data / "synthetic" / "VOC2012"
    if not root.exists():
        console.print("making the synthetic data set of the demo")
        with disk_errors(root.parent):
            devkit.draw(root)

    options: dict[str, Any] = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), **DEMO_SETTINGS}
    return resolve("voc", "photos", options, overrides)


@config_app.command(
    epilog="Examples: `mcis config show photos.csv` · `mcis config show voc --recipe released localize.related=5` · "
    "`mcis config show voc --voc DIR --recipe scratch --save exp.toml`"
)
@grouped
def show(
    configuration: Configuration,
    overrides: Overrides,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an experiment file (TOML) for `mcis run --config FILE`.")
    ] = None,
) -> None:
    """Show every key with its value, where the value comes from, and what it means."""
    with plain_errors():
        from mcis.platform.commands.terminal import show_configuration
        from mcis.platform.config.experiment import experiment_text

        resolved = configuration.resolve(overrides)
        if save:
            from mcis.platform.runs.files import write_text

            write_text(save, experiment_text(resolved.config, resolved.origins))
            typer.echo(f"experiment: {save}")
            return

        show_configuration(resolved.config, resolved.origins)
