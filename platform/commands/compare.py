"""The command `mcis compare`: differences between runs, with intervals over images and seeds."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import WorkspaceFolder
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs to compare; the first is the baseline. Names, or folders WORKSPACE/runs/NAME of any workspace. "
            "Separate several seeds of one configuration by commas.",
        ),
    ],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page to write; an existing file is overwritten.",
            show_default="comparisons/<runs>.html in the workspace of the first run",
        ),
    ] = None,
    images: Annotated[
        int,
        typer.Option(min=0, max=200, help="Number of images on the page for maps, pseudo masks and segmentation each."),
    ] = 8,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=FOLDER",
            help="Show the masks of another method on the page: a folder of label PNGs <id>.png. It may be repeated; "
            "one run is then enough.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the images drawn at random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of tables.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print every measure as CSV instead of tables.")] = False,
) -> None:
    """Compare runs: settings, scores, IoU per class, the same images, and whether differences are significant.

    Differences of mIoU to the first run have paired bootstrap intervals over the images, and over the seeds if several
    are given.
    """
    with plain_errors(resumes=False):
        from mcis.datasets.errors import UserError
        from mcis.platform.reporting import comparison_page
        from mcis.platform.reporting.compared_runs import open_run_groups
        from mcis.platform.reporting.other_methods import parse_methods

        if as_json and as_csv:
            raise UserError("--json and --csv", "one of them", "leave one of them out")
        groups = open_run_groups(workspace, runs, min_groups=1 if others else 2)
        methods = parse_methods(others or [], [group.label for group in groups])
        page = Path(os.path.expanduser(html)).absolute() if html else comparison_page.default_file(groups)
        if page.suffix != ".html":
            raise UserError(f"--html {page}", "a file with the suffix .html", "rename the page")

        from mcis.platform.commands.terminal import show_comparison
        from mcis.platform.reporting.comparison import BootstrapSettings
        from mcis.platform.reporting.comparison import compare as compare_groups
        from mcis.platform.reporting.comparison_tables import comparison_csv, comparison_json

        comparison = compare_groups(groups, BootstrapSettings(seed=seed))
        galleries = comparison_page.compared_images(comparison, images, methods)
        comparison_page.write_page(comparison, galleries, page)

        if as_json:
            typer.echo(json.dumps({**comparison_json(comparison), "page": str(page)}, indent=2))
        elif as_csv:
            typer.echo(comparison_csv(comparison), nl=False)
        else:
            show_comparison(comparison)
            for gallery in galleries:
                for remark in gallery.remarks:
                    typer.echo(f"note:  {remark}")
            typer.echo(f"page:  {page}")
