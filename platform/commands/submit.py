"""The command `mcis submit`: run another command of mcis as a job on a Ray cluster."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.user_table import is_table
from mcis.datasets.storage.uris import credentials_refused, holds_credentials, without_credentials
from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import Verbose
from mcis.platform.config.resolve import is_assignment

_COMMANDS = ("run", "study", "index", "predict")
"""Commands that the arguments may begin with; without one it is `run`. All of them take --name and --workspace."""
_FILE_PARAMETERS = ("location", "images", *(name for name, source in SOURCES.items() if source.location_kind == "FILE"))
"""Names of the parameters that hold paths as text; the other ones that hold paths have the type Path."""
_COPIED_FILES = {"config": "experiment.toml", "study": "study.toml"}
"""Names of the parameters that name a file on this machine -> name of its copy in the folder of the job."""


def submit(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Address of the dashboard, such as http://host:8265.")
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="Name of the run; the same name resumes it.")],
    workspace: Annotated[
        str, typer.Option("--workspace", "-w", envvar="MCIS_WORKSPACE", help="Folder of the workspace on the nodes.")
    ],
    wait: Annotated[
        float, typer.Option(min=0, help="Minutes to wait for a cluster that does not answer or accept jobs yet.")
    ] = 5,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline as a job on a cluster. All other arguments are those of `mcis run`, or of a command named first.

    The commands are run, study, index and predict. The job gets the code of this mcis, but no data: paths are those of
    the nodes. The job's log is printed as it grows. Ctrl-C leaves the job running, and the same command follows it
    again. After the job has ended, the same command continues where it stopped.
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
    """Returns the command of a job. Files of this machine that its arguments name are copied for it.

    Args:
        root: The group of all commands. They parse the arguments here as they will on the cluster.
        arguments: Words of the command, without `mcis`.
        files: Folder to create for the copies; it becomes the job's working directory.
        verbose: Add --verbose if the command has it.

    Raises:
        UserError: The command is unknown or cannot be a job; it has --model, which excludes --name; a path is relative;
            a file cannot be read; or a URI contains a password, key, token or signature, because everyone can read the
            command of a job.
        Exception: The command does not accept the arguments; typer prints the error.
    """
    for text in arguments:
        if holds_credentials(text):
            raise credentials_refused(f"an argument of the job: {without_credentials(text)}")
    files.mkdir()

    words = list(arguments)
    if not words or words[0] not in _COMMANDS:
        if words and words[0] in root.commands:
            raise UserError(
                f"mcis {words[0]} as a job",
                f"one of {', '.join(_COMMANDS)}",
                "run it on a node, or on this machine if it reaches the data and the workspace",
            )
        words = ["run", *words]
    command, values = _parse(root, words)
    if values.get("model") is not None:
        raise UserError(
            f"--model {values['model']} of a job",
            "the network of the run that --name of the job names",
            "leave --model out, or run `mcis predict` with it on a node",
        )

    for parameter in command.params:
        given = values[parameter.name]
        for value in given if isinstance(given, list | tuple) else [given]:
            copy = _copy_or_check(parameter, value, files)
            if copy is not None:
                words = [_replace_path(word, value, copy) for word in words]

    if verbose and "verbose" in values:
        words.append("--verbose")
    return ["python", "-m", "mcis.platform.cli", *words]


def _parse(root: Any, words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the command that words call, and the values of its parameters."""
    command = root
    path: list[str] = []
    rest = list(words)
    while isinstance(command, TyperGroup):
        if not rest or not (rest[0] in command.commands or is_table(rest[0])):
            found = f"command {' '.join([*path, *rest[:1]])}"
            raise UserError(found, f"one of {', '.join(command.commands)}", "name one of them")
        name, subcommand, rest = command.resolve_command(typer.Context(command), rest)
        path.append(str(name))
        command = subcommand
    return command, command.make_context(" ".join(path), rest).params


def _replace_path(word: str, path: str | Path, copy: str) -> str:
    """Replaces a path in a word of the command line, which is the path or --OPTION=PATH."""
    option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{sign}{copy}" if Path(value) == Path(path) else word


def _copy_or_check(parameter: Any, value: Any, files: Path) -> str | None:
    """Copies the file that a parameter names on this machine, and checks that other paths exist for all nodes.

    Returns:
        The name of the copy in the job's folder, None if nothing was copied.
    """
    if value is None:
        return None
    name = parameter.name
    found = f"{parameter.opts[0]} {value}"

    is_own_study = name == "study" and bool(Path(value).suffix)  # the other studies are part of the project
    if name == "config" or is_own_study:
        try:
            shutil.copyfile(value, files / _COPIED_FILES[name])
        except OSError as error:
            raise UserError(
                f"{found} cannot be read ({error.strerror})", "a file on this machine", "correct the path"
            ) from None
        return _COPIED_FILES[name]

    if _is_path(name, value) and not (os.path.isabs(value) or "://" in str(value)):
        raise UserError(found, "a path on the nodes: absolute, or a URI", "name it as the nodes do")
    return None


def _is_path(parameter: str, value: Any) -> bool:
    """Returns whether the value of a parameter is a path or a URI."""
    if isinstance(value, Path):
        return True
    if parameter == "source":
        return is_table(value)
    return parameter in _FILE_PARAMETERS and not is_assignment(value)
