"""The command `mcis submit`: another command of mcis as a job of a Ray cluster."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, without_credentials
from mcis.platform.commands.options import Verbose, plain_errors

_COMMANDS = ("run", "study", "index", "predict")
"""Commands that may stand in front of the arguments; `run` where none does. All of them take --name and --workspace."""
_PLACES = ("location", "images", *(name for name, source in SOURCES.items() if source.location_kind == "FILE"))
"""Parameters that name a place, beside those that are paths."""
_TAKEN_ALONG = {"config": "experiment.toml", "study": "study.toml"}
"""Parameters that name a file of this machine, and the name of its copy in the folder of a job."""


def submit(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Of the dashboard, as http://host:8265.")
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
        from mcis.platform.engine.jobs import run_job

        with tempfile.TemporaryDirectory(prefix="mcis-") as folder:
            arguments = [*context.args, "--name", name, "--workspace", workspace]
            root = context.find_root().command
            command = job_command(root, arguments, Path(folder) / "files", verbose=verbose)
            status = run_job(address, f"{workspace}/runs/{name}", command, Path(folder), minutes=wait)
        if status:
            raise typer.Exit(status)


def job_command(root: Any, arguments: Sequence[str], files: Path, *, verbose: bool = False) -> list[str]:
    """The command of a job: files that its arguments name are copied into `files`, which becomes its folder.

    `root` is the group of all commands, which read the arguments here as they will on the cluster.

    Raises:
        UserError: an unknown command; a place that is relative to this machine's folder; a file that cannot be read; a
            URI that holds a password, key, token or signature: everyone reads a command.
        Exception: the command line's own, which typer shows, where the command does not take the arguments.
    """
    for text in arguments:
        if holds_credentials(text):
            raise credentials_refused(f"an argument of the job: {without_credentials(text)}")
    files.mkdir()
    words = list(arguments) if arguments and arguments[0] in _COMMANDS else ["run", *arguments]
    command, names = root, list[str]()
    while hasattr(command, "commands"):  # a group
        names = words[: len(names) + 1]
        if names[-1] not in command.commands:
            raise UserError(f"command {' '.join(names)}", f"one of {', '.join(command.commands)}", "name one")
        command = command.commands[names[-1]]
    given = command.make_context(" ".join(names), words[len(names) :]).params
    for parameter in command.params:
        values = given[parameter.name]
        for value in values if isinstance(values, list | tuple) else [values]:
            if copy := _on_nodes(parameter, value, files):
                parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
                words = [f"{a}{b}{copy if Path(c) == Path(value) else c}" for a, b, c in parts]
    shown = ["--verbose"] if verbose and "verbose" in given else []
    return ["python", "-m", "mcis.platform.cli", *words, *shown]


def _on_nodes(parameter: Any, value: Any, files: Path) -> str | None:
    """The name of a file's copy in the job's folder, None for a value that is the same on the nodes."""
    name, called = parameter.name, f"{parameter.opts[0]} {value}"
    if value is None:
        return None
    if name in _TAKEN_ALONG and (name != "study" or Path(value).suffix):  # else a study that comes with the project
        try:
            shutil.copyfile(value, files / _TAKEN_ALONG[name])
        except OSError as error:
            found = f"{called} cannot be read ({error.strerror})"
            raise UserError(found, "a file on this machine", "name one") from None
        return _TAKEN_ALONG[name]
    is_place = name in _PLACES or isinstance(value, Path)
    if is_place and not (os.path.isabs(value) or "://" in str(value)):
        raise UserError(called, "a place of the nodes: an absolute path, or a URI", "name it as the nodes do")
    return None
