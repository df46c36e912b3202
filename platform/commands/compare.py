"""The command `mcis compare`: what differs between runs, and is it more than their images and seeds would let them?"""

import os
from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.options import DEFAULT_WORKSPACE, WorkspaceFolder, plain_errors


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs, the first of which is the baseline: names, or folders WORKSPACE/runs/NAME of any workspace. "
            "Several joined by commas are the seeds of one configuration.",
        ),
    ],
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; what lies there is replaced.",
            show_default="comparisons/<runs>.html in the workspace of the first run",
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=0, max=200, help="Images that the page shows of each kind.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resamples and of the images at random.")] = 0,
) -> None:
    """Compare runs: configurations, scores, IoU per class, the same images, and whether there is a difference.

    Differences of mIoU to the first run have paired bootstrap intervals over the images, and over the seeds where
    several are given.
    """
    with plain_errors(resumes=False):
        from mcis.datasets.errors import UserError
        from mcis.platform.reporting import comparison_page
        from mcis.platform.reporting.compared_runs import open_cases

        cases = open_cases(workspace, runs)
        page = Path(os.path.expanduser(html)).absolute() if html else comparison_page.default_file(cases)
        if page.suffix != ".html":
            raise UserError(f"--html {page}", "a file *.html, which is written anew", "name the page so")

        from mcis.datasets.errors import one_line
        from mcis.platform.reporting.comparison import Settings
        from mcis.platform.reporting.comparison import compare as compare_cases
        from mcis.platform.reporting.terminal import print_table
        from mcis.platform.runs.progress import console

        comparison = compare_cases(cases, Settings(seed=seed))
        shown = comparison_page.compared_images(comparison, images)
        for table in comparison.tables():
            print_table(table.title, table.columns, table.rows, numbers=table.numbers)
        for remark in comparison.remarks():
            console.print(one_line(remark))
        comparison_page.write_page(comparison, shown, page)
        typer.echo(f"page:  {page}")
