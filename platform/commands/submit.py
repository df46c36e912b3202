"""The command `mcis submit`: another command of mcis as a job of a Ray cluster."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mcis.platform.commands.options import Verbose, plain_errors


def submit(
    context: typer.Context,
    address: Annotated[
        str,
        typer.Option(
            envvar="RAY_API_SERVER_ADDRESS", help="Of the cluster's dashboard, such as http://127.0.0.1:8265."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the run; the same name goes on where it stopped.")],
    workspace: Annotated[str, typer.Option(envvar="MCIS_WORKSPACE", help="Its folder on the nodes.")],
    wait: Annotated[
        float, typer.Option(min=0, help="Minutes to wait for a cluster that does not answer or takes no jobs yet.")
    ] = 5,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline as a job on a cluster; all other arguments are those of `mcis run`, or of a command named first.

    The commands are run, study, index and predict. The job has the code of this mcis, no data: places are those of the
    nodes. Its log is shown as it comes; Ctrl-C leaves the job at work, and the same command shows it again. Once it has
    ended, the same command goes on where it stopped.
    """
    with plain_errors(verbose):
        from mcis.platform.engine.jobs import job_command, run_job

        with tempfile.TemporaryDirectory(prefix="mcis-") as folder:
            arguments = [*context.args, "--name", name, "--workspace", workspace]
            command = job_command(arguments, Path(folder) / "files", verbose=verbose)
            status = run_job(address, f"{workspace}/runs/{name}", command, Path(folder), minutes=wait)
        if status:
            raise typer.Exit(status)
