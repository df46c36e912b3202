"""The commands `mcis run`, `mcis demo` and `mcis config show`: the pipeline, and its configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcis.platform.commands.options import (
    DEFAULT_WORKSPACE,
    Assignments,
    Configuration,
    From,
    Name,
    Until,
    Verbose,
    WorkspaceFolder,
    grouped,
    plain_errors,
)

if TYPE_CHECKING:
    from mcis.platform.config.resolve import Resolved

config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)


@grouped
def run(
    configuration: Configuration,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    until: Until = None,
    start: From = None,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline: index, classifier, localization maps, pseudo masks, segmenter, predictions, scores, report.

    A second call with the same name computes only what is missing or changed.
    """
    with plain_errors(verbose):
        resolved = configuration.resolve()

        from mcis.platform import api
        from mcis.platform.commands.terminal import show_outlook, show_result

        options: dict[str, Any] = {"until": until, "start": start}
        show_result(api.run(resolved, name, workspace=workspace, verbose=verbose, show=show_outlook, **options))


def demo(
    name: Name = "demo",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Run the whole pipeline on an embedded data set, drawn on the spot: from tags to masks."""
    with plain_errors(verbose):
        from mcis.platform import api
        from mcis.platform.commands.terminal import console, show_outlook, show_result

        configuration = demo_configuration(workspace, assignments or [])
        show_result(api.run(configuration, name, workspace=workspace, verbose=verbose, show=show_outlook))
        if configuration.config.pseudo_masks.reads_saliency:
            console.print("Saliency maps are painted from the truth here: masks and segmentation owe much to them.")


def demo_configuration(workspace: Path, assignments: Sequence[str] = ()) -> "Resolved":
    """Recipe `photos` on the embedded data, which is drawn where it does not exist yet: tags, no saliency maps.

    Its images are small and few: smaller inputs, fewer updates, a stage more to train.
    """
    from mcis.datasets.synthetic import devkit
    from mcis.platform.config.resolve import resolve
    from mcis.platform.runs.files import disk_errors
    from mcis.platform.runs.progress import console
    from mcis.platform.runs.workspace import Workspace

    root = Workspace(workspace).data / "synthetic" / "VOC2012"
    if not root.exists():
        console.print("drawing the embedded data set")
        with disk_errors(root.parent):
            devkit.draw(root)
    options = {
        "data.voc": str(root),
        "data.classes": str(root / "classes.txt"),
        "classifier.input_size": 256,
        "classifier.min_steps": 480,
        "affinity_net.crop": 160,
        "segmenter.crop": 160,
        "segmenter.min_steps": 200,
        "segmenter.trainable_stages": 4,
    }
    return resolve("voc", "photos", options, assignments)


@config_app.command(
    epilog="Examples: `mcis config show voc --recipe released --set localize.related=5` · "
    "`mcis config show voc --voc DIR --recipe scratch --save exp.toml`"
)
@grouped
def show(
    configuration: Configuration,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="As TOML, for `mcis run --config FILE`.")] = None,
) -> None:
    """Show every key with its value, where the value comes from, and what it means."""
    with plain_errors():
        from mcis.platform.config.experiment import experiment_text
        from mcis.platform.config.keys import leaves, meanings
        from mcis.platform.reporting.terminal import make_table
        from mcis.platform.runs.progress import console

        resolved = configuration.resolve()
        if save:
            from mcis.platform.runs.files import write_text

            write_text(save, experiment_text(resolved.config, resolved.origins))
            typer.echo(f"experiment: {save}")
            return
        about = meanings(resolved.config)
        rows = [(key, value, resolved.origins[key], about[key]) for key, value in leaves(resolved.config)]
        console.print(make_table("Configuration", ("key", "value", "from", "meaning"), rows))
