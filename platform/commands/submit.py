"""The command `mcis submit`: another command of mcis as a job of a Ray cluster, with this program's own code."""

import asyncio
import importlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mcis.datasets.errors import UserError
from mcis.datasets.files import credentials_refused, holds_credentials, without_credentials
from mcis.platform.commands.options import Verbose, plain_errors

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_Result = TypeVar("_Result")
_PACKAGES = ("datasets", "models", "platform", "tuning")
_COMMANDS = ("run", "study", "index", "predict", "sync", "compare")
"""Commands that may stand in front of the arguments; `run` where none does."""
_PLACES = ("--voc", "--single", "--web", "--lid", "--tags", "--workspace")
"""Options that name a place, which is one of the nodes."""
_EXPERIMENT = "experiment.toml"
"""Name of an experiment in the folder of a job."""
_STOP_SECONDS = "40"
"""What a job that is stopped has until it is killed: a training writes its checkpoint first."""


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
    wait: Annotated[float, typer.Option(min=0, help="Minutes to wait for a cluster that does not take jobs yet.")] = 5,
    verbose: Verbose = False,
) -> None:
    """Run the pipeline as a job on a cluster; all other arguments are those of `mcis run`, or of a command named first.

    The job has the code of this mcis, no data: places are those of the nodes. Its log is shown as it comes; Ctrl-C
    leaves the job at work, and the same command shows it again. Once it has ended, the same command goes on where it
    stopped.
    """
    with plain_errors(verbose):
        with tempfile.TemporaryDirectory(prefix="mcis-") as folder:
            command = job_command([*context.args, "--name", name, "--workspace", workspace], Path(folder) / "files")
            status = run_job(address, f"{workspace}/runs/{name}", command, Path(folder), minutes=wait)
        if status:
            raise typer.Exit(status)


def job_command(arguments: Sequence[str], files: Path) -> list[str]:
    """The command of a job: experiments that its arguments name are copied into `files`, which becomes its folder.

    Raises:
        UserError: a place that is relative to this machine's folder, an experiment that cannot be read, or a URI that
            holds a password, key, token or signature, as everyone reads a job's command.
    """
    for text in arguments:
        if holds_credentials(text):
            raise credentials_refused(f"an argument of the job: {without_credentials(text)}")
    files.mkdir()
    command: list[str] = [] if arguments[0] in _COMMANDS else ["run"]
    option = ""
    for text in arguments:
        name, equals, value = text.partition("=")
        if option:
            command += [option, _of_nodes(option, text, files)]
            option = ""
        elif text in (*_PLACES, "--config"):
            option = text
        elif equals and name in (*_PLACES, "--config"):
            command += [name, _of_nodes(name, value, files)]
        else:
            command.append(text)
    return ["python", "-m", "mcis.platform.cli", *command, *([option] if option else [])]


def _of_nodes(option: str, value: str, files: Path) -> str:
    """What an option's value is on the nodes: the same place, or the copy of an experiment in the job's folder."""
    if option in _PLACES:
        if not (value.startswith("/") or "://" in value):
            raise UserError(
                f"{option} {value}", "a place of the nodes: an absolute path, or a URI", "name it as the nodes do"
            )
        return value
    try:
        shutil.copyfile(value, files / _EXPERIMENT)
    except OSError as error:
        raise UserError(
            f"--config {value} cannot be read ({error.strerror})", "an experiment on this machine", "name one"
        ) from None
    return _EXPERIMENT


def run_job(address: str, run: str, command: Sequence[str], folder: Path, *, minutes: float) -> int:
    """Submits a job, or finds the one that is at work under the run's place, and shows its log to the end.

    Args:
        run: the place of the run on the nodes, by which its job is found.
        folder: with `files`, the job's own folder; the code is put beside it.
        minutes: to wait for a cluster that does not take jobs yet.

    Returns:
        The exit status of this command: 0 where the job succeeded.

    Raises:
        UserError: the cluster does not answer, or takes no job; or another command is at work under the run's place.
    """
    client = _patiently(lambda: _client(address), address, minutes)
    text = shlex.join(command)
    job = next(
        (each for each in client.list_jobs() if _is_at_work(each) and (each.metadata or {}).get("run") == run), None
    )
    if job is not None and job.entrypoint != text:
        raise UserError(
            f"job {job.submission_id} is at work on {run} with another command: {job.entrypoint}",
            "one job at a time for a run",
            f"wait, or stop it by `ray job stop {job.submission_id} --address {address}`, and repeat the command",
        )
    if job is not None and job.submission_id:
        number = job.submission_id
        typer.echo(f"job {number} is at work on it since before; its log:")
    else:
        environment: dict[str, Any] = {
            "py_modules": [str(_code(folder))],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS},
        }
        if any((folder / "files").iterdir()):  # else the job is in the folder that the node's Ray is in
            environment["working_dir"] = str(folder / "files")
        number = _patiently(
            lambda: client.submit_job(entrypoint=text, runtime_env=environment, metadata={"run": run}), address, minutes
        )
        typer.echo(f"job {number}; `ray job stop {number} --address {address}` stops it; its log:")
    try:
        asyncio.run(_show_log(client, number))
    except KeyboardInterrupt:
        typer.echo(f"\njob {number} goes on; the same command shows it again", err=True)
        return 130
    status = client.get_job_info(number)
    typer.echo(f"job {number}: {status.status}" + (f", {status.message}" if status.message else ""))
    return 0 if str(status.status) == "SUCCEEDED" else 1


def _client(address: str) -> "JobSubmissionClient":
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


def _is_at_work(job: "JobDetails") -> bool:
    return str(job.status) in ("PENDING", "RUNNING")


def _patiently(call: Callable[[], _Result], address: str, minutes: float) -> _Result:
    """The result of a call, which is repeated while the cluster does not answer or no agent of it takes jobs yet.

    Raises:
        UserError: it went on so for some minutes, or the cluster refused.
    """
    from ray.exceptions import RayError

    end = time.monotonic() + 60 * minutes
    while True:
        try:
            return call()
        except (ConnectionError, RuntimeError, RayError) as error:
            passing = isinstance(error, ConnectionError) or "No available agent" in str(error)
            if not passing or time.monotonic() > end:
                first = " ".join(str(error).split())[:300]
                raise UserError(
                    f"the cluster at {address} takes no job: {first}",
                    "the dashboard of a cluster that is up, and a token where it asks for one",
                    "see that `ray job list` works there (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH), and repeat",
                ) from None
        time.sleep(2)


def _code(folder: Path) -> Path:
    """The program's own code as a package that can be imported, below `folder`, whichever way it is installed."""
    package = folder / "mcis"
    for name in _PACKAGES:
        source = Path(next(iter(importlib.import_module(f"mcis.{name}").__path__)))
        shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    return package


async def _show_log(client: "JobSubmissionClient", number: str) -> None:
    lines: Any = client.tail_job_logs(number)
    async for part in lines:
        typer.echo(part, nl=False)
