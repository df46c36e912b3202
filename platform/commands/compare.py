"""The command `mcis compare`: do two runs differ by more than their images would let them?"""

from typing import TYPE_CHECKING, Annotated

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, WorkspaceFolder, complete_run, plain_errors

if TYPE_CHECKING:
    from mcis.platform.runs.scores import Scored

_WHAT: tuple["Scored", ...] = ("localization_maps", "pseudo_masks", "segmentation")


def compare(
    first: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=complete_run)],
    second: Annotated[str, typer.Argument(help="Name of another run.", autocompletion=complete_run)],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    what: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(_WHAT)}; give it again for more. [all]", show_default=False)
    ] = None,
    resamples: Annotated[int, typer.Option(min=100, max=100_000, help="Resamples of the bootstrap.")] = 2000,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Share that an interval is to hold.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resamples.")] = 0,
) -> None:
    """Compare two runs on the same images: differences of mIoU, with paired bootstrap intervals over the images."""
    with plain_errors():
        from mcis.datasets.errors import UserError
        from mcis.platform.commands.terminal import show_differences
        from mcis.platform.runs.workspace import Workspace

        unknown = [name for name in what or () if name not in _WHAT]
        if unknown:
            raise UserError(f"--what {unknown[0]}", f"one of {', '.join(_WHAT)}", "choose one of them for --what")
        opened = Workspace(workspace, create=False)

        from mcis.platform.reporting import comparison

        differences = comparison.compare(
            opened, first, second,
            what=[name for name in _WHAT if not what or name in what],
            resamples=resamples, seed=seed, confidence=confidence,
        )  # fmt: skip
        show_differences(list(differences), first, second, confidence=confidence)
        typer.echo(
            f"intervals over {resamples} resamples of the images, drawn for both runs alike (seed {seed}): they tell "
            "what other images would change, not what another training would"
        )
