"""Commands of mcis as jobs of a Ray cluster, with this program's own code: how they are submitted and followed."""

import asyncio
import importlib
import itertools
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcis.datasets.errors import UserError, printable
from mcis.datasets.storage.files import (
    PATIENCE,
    credentials_refused,
    holds_credentials,
    with_timeout,
    without_credentials,
)

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_Result = TypeVar("_Result")
_PACKAGES = ("datasets", "models", "platform", "tuning")
_COMMANDS = ("run", "study", "index", "predict")
"""Commands that may stand in front of the arguments; `run` where none does. All of them take --name and --workspace."""
_GROUPS = ("study", "index")
"""Those that have commands of their own."""
_QUIET = (["predict"], ["index", "show"], ["index", "browse"])
"""Those that take no --verbose."""
_PLACES = (
    *("--voc", "--single", "--web", "--lid", "--tags", "--workspace"),
    *("--out", "--download", "--sbd", "--classes", "--list"),
)
"""Options that name a place, which is one of the nodes."""
_FLAGS = ("--verbose", "--check-masks", "--no-check-masks")
"""Options without a value."""
_TAKEN_ALONG = {"--config": "experiment.toml", "study": "study.toml"}
"""What names a file of this machine, and the name of its copy in the folder of a job."""
_STOP_SECONDS = "40"
"""What a job that is stopped has until it is killed: a training writes its checkpoint first."""
_PAUSE = 2.0
"""Seconds between two tries."""
_SILENCE = 60.0
"""Seconds without a word after which the cluster is asked whether there is more: a connection whose other end is gone
says nothing, either."""
_TRIES = 3
"""How often the log of a job that has ended is asked for, where it does not come to its end."""


def job_command(arguments: Sequence[str], files: Path, *, verbose: bool = False) -> list[str]:
    """The command of a job: files that its arguments name are copied into `files`, which becomes its folder.

    Raises:
        UserError: a place that is relative to this machine's folder, a file that cannot be read, or a URI that holds a
            password, key, token or signature, as everyone reads a job's command.
    """
    for text in arguments:
        if holds_credentials(text):
            raise credentials_refused(f"an argument of the job: {without_credentials(text)}")
    files.mkdir()
    words = [*([] if arguments and arguments[0] in _COMMANDS else ["run"]), *arguments]
    head = 2 if words[0] in _GROUPS else 1
    command, rest, plain = words[:head], iter(words[head:]), 0
    for text in rest:
        name, equals, value = text.partition("=")
        if not text.startswith("--"):
            command.append(_of_nodes(_positional(words[:head], plain), text, files))
            plain += 1
        elif name in _FLAGS:
            command.append(text)
        elif equals:
            command += [name, _of_nodes(name, value, files)]
        else:
            command += [text, *(_of_nodes(text, value, files) for value in itertools.islice(rest, 1))]
    if verbose and words[:head] not in _QUIET:
        command.append("--verbose")
    return ["python", "-m", "mcis.platform.cli", *command]


def _positional(command: list[str], number: int) -> str:
    """What an argument without a name is: a place, a study, or else a word."""
    if command == ["study", "run"] and number == 0:
        return "study"
    return "place" if command[0] in ("index", "predict") else ""


def _of_nodes(what: str, value: str, files: Path) -> str:
    """What a value is on the nodes: the same word or place, or the copy of a file in the job's folder."""
    if what == "place" or what in _PLACES:
        if not (value.startswith("/") or "://" in value):
            raise UserError(
                f"{what} {value}", "a place of the nodes: an absolute path, or a URI", "name it as the nodes do"
            )
        return value
    if what not in _TAKEN_ALONG or (what == "study" and not Path(value).suffix):  # one that comes with the project
        return value
    try:
        shutil.copyfile(value, files / _TAKEN_ALONG[what])
    except OSError as error:
        raise UserError(
            f"{what} {value} cannot be read ({error.strerror})", "a file on this machine", "name one"
        ) from None
    return _TAKEN_ALONG[what]


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

    def refused(told: str) -> UserError:
        return UserError(
            f"the cluster at {address} takes no job: {told}",
            "the dashboard of a cluster that is up, and a token where it asks for one",
            "see that `ray job list` works there (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH), and repeat",
        )

    client = _patiently(lambda: with_timeout(PATIENCE, lambda: _client(address)), minutes, refused)
    text = shlex.join(command)
    job = _patiently(lambda: _at_work_on(client, run), minutes, refused)
    if job is not None and job.entrypoint != text:
        raise UserError(
            f"job {job.submission_id} is at work on {run} with another command: {job.entrypoint}",
            "one job at a time for a run",
            f"wait, or stop it by `ray job stop {job.submission_id} --address {address}`, and repeat the command",
        )
    if job is not None and job.submission_id:
        number = job.submission_id
        print(f"job {number} is at work on it since before; its log:", flush=True)
    else:
        environment: dict[str, Any] = {
            "py_modules": [str(_code(folder))],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS},
        }
        if any((folder / "files").iterdir()):  # else the job is in the folder that the node's Ray is in
            environment["working_dir"] = str(folder / "files")
        number = _patiently(lambda: _submitted(client, run, text, environment), minutes, refused)
        print(f"job {number}; `ray job stop {number} --address {address}` stops it; its log:", flush=True)
    try:
        ended = _followed(client, number, address, minutes)
    except KeyboardInterrupt:
        print(f"\njob {number} goes on; the same command shows it again", file=sys.stderr)
        return 130
    print(f"job {number}: {ended.status}" + (f", {ended.message}" if ended.message else ""))
    return 0 if str(ended.status) == "SUCCEEDED" else 1


def _at_work_on(client: "JobSubmissionClient", run: str) -> "JobDetails | None":
    """The job that is at work under a run's place."""
    jobs = with_timeout(PATIENCE, client.list_jobs)
    return next((job for job in jobs if _is_at_work(job) and (job.metadata or {}).get("run") == run), None)


def _submitted(client: "JobSubmissionClient", run: str, command: str, environment: dict[str, Any]) -> str:
    """The number of a new job, or of the one that an earlier try has started whose answer was lost."""
    job = _at_work_on(client, run)
    if job is not None and job.submission_id and job.entrypoint == command:
        return job.submission_id
    return client.submit_job(entrypoint=command, runtime_env=environment, metadata={"run": run})


def _followed(client: "JobSubmissionClient", number: str, address: str, minutes: float) -> "JobDetails":
    """Shows the log of a job until the job has ended, through as many connections as that takes; the ended job.

    Raises:
        UserError: the cluster has not answered for some minutes.
    """

    def away(told: str) -> UserError:
        if "does not exist" in told:
            return UserError(
                f"the cluster at {address} knows no job {number} any more",
                "a head that stays up while its job is at work",
                "repeat the command: it goes on where the job stopped",
            )
        return UserError(
            f"the cluster at {address} has not answered for {minutes:g} minutes: {told}",
            "a connection to its dashboard until the job has ended",
            f"job {number} goes on without it: see to the connection, and the same command shows it again",
        )

    shown, tries = 0, 0
    while True:
        shown, whole = asyncio.run(_show_log(client, number, shown))
        job = _patiently(lambda: with_timeout(PATIENCE, lambda: client.get_job_info(number)), minutes, away)
        tries += not _is_at_work(job)
        if tries and (whole or tries == _TRIES):
            return job
        time.sleep(_PAUSE)


async def _show_log(client: "JobSubmissionClient", number: str, shown: int) -> tuple[int, bool]:
    """Shows the log from its character `shown` on, by one connection.

    Returns:
        How many characters are shown now, and whether the log was closed, rather than its connection lost.
    """
    from aiohttp import ClientError

    lines: Any = client.tail_job_logs(number)  # from the first line on, with each connection
    position = 0
    while True:
        try:
            part = await _next_part(client, number, lines, position)
        except StopAsyncIteration:
            return max(shown, position), True
        except (OSError, RuntimeError, ClientError):
            return max(shown, position), False
        print(printable(part[max(0, shown - position) :]), end="", flush=True)
        position += len(part)


async def _next_part(client: "JobSubmissionClient", number: str, lines: Any, position: int) -> str:
    """The next part of a log, which is waited for while the cluster has no more of it either.

    Raises:
        StopAsyncIteration: the log is closed.
        OSError, RuntimeError, ClientError: the connection is lost.
    """
    part = asyncio.ensure_future(anext(lines))
    while not (await asyncio.wait([part], timeout=_SILENCE))[0]:
        log = await asyncio.to_thread(with_timeout, PATIENCE, lambda: client.get_job_logs(number))
        job = await asyncio.to_thread(with_timeout, PATIENCE, lambda: client.get_job_info(number))
        if len(log) > position or not _is_at_work(job):
            raise TimeoutError("the connection has not brought what there is")
    return str(await part)


def _client(address: str) -> "JobSubmissionClient":
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


def _is_at_work(job: "JobDetails") -> bool:
    return str(job.status) in ("PENDING", "RUNNING")


def _patiently(call: Callable[[], _Result], minutes: float, refused: Callable[[str], UserError]) -> _Result:
    """The result of a call, which is repeated while the cluster does not answer or no agent of it takes jobs yet.

    Raises:
        UserError: it went on so for some minutes, or the cluster refused; `refused` makes it of what was told.
    """
    from ray.exceptions import RayError

    end = time.monotonic() + 60 * minutes
    while True:
        try:
            return call()
        except (OSError, RuntimeError, RayError) as error:
            if not _may_pass(error) or time.monotonic() > end:
                raise refused(" ".join(str(error).split())[:300]) from None
        time.sleep(_PAUSE)


def _may_pass(error: Exception) -> bool:
    """Whether it says that nobody answered, rather than what the answer was."""
    unanswered = isinstance(error, OSError) and not isinstance(error, ValueError)  # which an address is that is none
    return unanswered or bool(re.search("No available agent|status code 50[234]", str(error)))


def _code(folder: Path) -> Path:
    """The program's own code as a package that can be imported, below `folder`, whichever way it is installed."""
    package = folder / "mcis"
    for name in _PACKAGES:
        source = Path(next(iter(importlib.import_module(f"mcis.{name}").__path__)))
        shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    return package
