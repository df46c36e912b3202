"""Submits commands of mcis as jobs of a Ray cluster, with the code of this program, and follows them."""

import functools
import importlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcis.datasets.errors import UserError, one_line, printable
from mcis.datasets.storage.faults import REMOTE_TIMEOUT, with_timeout
from mcis.platform.runs.version import job_variables

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_Result = TypeVar("_Result")
_PACKAGES = ("datasets", "models", "platform", "tuning")
_STOP_SECONDS = "40"
"""Seconds between the request to stop a job and its kill."""
_POLL_INTERVAL = 2.0
"""Seconds between two requests to a cluster."""
_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
_COMMAND = re.compile(r"\bmcis(?:\.platform\.cli)? ((?:run|study|index|predict) .*)", re.DOTALL)
"""A command that writes a run, in the entrypoint of a job."""
_NAME = re.compile(r"\s(?:--name|-n)[\s=](\S+)")
_WORKSPACE = re.compile(r"\s(?:--workspace|-w)[\s=](\S+)")


def run_job(address: str, run: str, command: Sequence[str], folder: Path, *, minutes: float) -> int:
    """Submits a job, or finds the running job of the same run, and prints its log until it ends.

    Args:
        address: Address of the cluster's dashboard.
        run: Folder of the run on the nodes, by which its job is found.
        command: The command of the job.
        folder: A folder whose subfolder `files` is the job's working directory. The code is copied next to it.
        minutes: Minutes to wait for a cluster that does not accept jobs yet.

    Returns:
        The exit status of this command: 0 if the job succeeded.

    Raises:
        UserError: The cluster does not answer or refuses the job, or another command of the same run is running.
    """
    from ray.job_submission import JobSubmissionClient

    refusal = UserError(
        f"the cluster at {address} accepts no job",
        "the dashboard of a running cluster, and a token if it asks for one",
        "check that `ray job list` works there (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH), and repeat",
    )
    entrypoint = shlex.join(command)
    environment: dict[str, Any] = {
        "py_modules": [str(copy_code(folder))],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS, **job_variables()},
    }
    if any((folder / "files").iterdir()):  # otherwise the job runs in the folder in which the node's Ray was started
        environment["working_dir"] = str(folder / "files")

    client = _repeat(lambda: JobSubmissionClient(address), minutes, refusal)
    submit = functools.partial(_submit_or_find, client, address, run, entrypoint, environment)
    job_id, text = _repeat(submit, minutes, refusal, timeout=None)
    print(text, flush=True)
    try:
        ended = _follow(client, job_id, address, minutes)
    except KeyboardInterrupt:
        print(f"\njob {job_id} continues; the same command shows it again", file=sys.stderr)
        return _INTERRUPTED
    print(f"job {job_id}: {ended.status}" + (f", {ended.message}" if ended.message else ""))
    return 0 if str(ended.status) == "SUCCEEDED" else 1


def _submit_or_find(
    client: "JobSubmissionClient", address: str, run: str, entrypoint: str, environment: dict[str, Any]
) -> tuple[str, str]:
    """Submits a job, unless a job of the same run and command is running already.

    An earlier call may have submitted it without receiving the answer.

    Args:
        client: The cluster.
        address: See `run_job`.
        run: See `run_job`.
        entrypoint: The command of the job, as text.
        environment: The job's runtime environment: code, working directory and environment variables.

    Returns:
        The id of the job, and what to print about it.

    Raises:
        UserError: A job of the same run has another command.
    """
    job = _running_job(client, run)
    if job is None:
        job_id = client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"run": run})
        return job_id, f"job {job_id}; `ray job stop {job_id} --address {address}` stops it; its log:"
    if _words(job.entrypoint) != _words(entrypoint):
        raise UserError(
            f"job {job.submission_id} already runs on {run} with another command: {job.entrypoint}",
            "one job at a time for a run",
            f"wait, or stop it by `ray job stop {job.submission_id} --address {address}`, and repeat the command",
        )
    return str(job.submission_id), f"job {job.submission_id} already runs; its log:"


def _running_job(client: "JobSubmissionClient", run: str) -> "JobDetails | None":
    """Returns the job of a run that is pending or running, or None. `ray job submit` may have started it."""
    for job in client.list_jobs():
        runs = ((job.metadata or {}).get("run"), _run_of(job.entrypoint))
        if _is_running(job) and job.submission_id and run in runs:
            return job
    return None


def _run_of(entrypoint: str) -> str | None:
    """Returns the folder of the run that the entrypoint of a job names by its options, or None."""
    command = _COMMAND.search(entrypoint)
    name = command and _NAME.search(command[1])
    workspace = command and _WORKSPACE.search(command[1])
    return f"{workspace[1]}/runs/{name[1]}" if name and workspace else None


def _words(entrypoint: str) -> list[str]:
    """Returns the sorted words of a command of mcis, however it is started. Their order has no effect on most runs."""
    command = _COMMAND.search(entrypoint)
    return sorted(command[1].split() if command else [entrypoint])


def _is_running(job: "JobDetails") -> bool:
    return str(job.status) in ("PENDING", "RUNNING")


def _follow(client: "JobSubmissionClient", job_id: str, address: str, minutes: float) -> "JobDetails":
    """Prints the log of a job as it grows, until the job ends. Returns the ended job."""
    refusal = UserError(
        f"the cluster at {address} no longer answers questions about job {job_id}",
        "a head that stays up, and a connection to its dashboard, until the job has ended",
        "repeat the command: it shows the job again if that still runs, and otherwise continues the run",
    )
    printed = 0
    is_waiting = False
    while True:
        job = _repeat(lambda: client.get_job_info(job_id), minutes, refusal)
        if str(job.status) == "PENDING" and not is_waiting:
            print("waiting for the cluster to start the job", flush=True)
            is_waiting = True
        log = _repeat(lambda: client.get_job_logs(job_id), minutes, refusal)
        print(printable(log[printed:]), end="", flush=True)
        printed = max(printed, len(log))
        if not _is_running(job):
            return job
        time.sleep(_POLL_INTERVAL + printed / 1e6)  # each request transfers the whole log


def _repeat(
    request: Callable[[], _Result], minutes: float, refusal: UserError, *, timeout: float | None = REMOTE_TIMEOUT
) -> _Result:
    """Repeats a request while the cluster does not answer, or has no agent yet that accepts jobs.

    Args:
        request: The request.
        minutes: Minutes after which to give up.
        refusal: The error. The answer of the cluster is added to it.
        timeout: Seconds that a request may take. None: any, because submitting a job copies its files to the cluster.

    Returns:
        The answer.

    Raises:
        UserError: The cluster did not answer in time, or refused the request.
    """
    from ray.exceptions import RayError

    deadline = time.monotonic() + 60 * minutes
    while True:
        try:
            return request() if timeout is None else with_timeout(timeout, request)
        except (OSError, RuntimeError, RayError) as error:
            if not _may_pass(error) or time.monotonic() > deadline:
                found = f"{refusal.found}: {one_line(str(error), 300)}"
                raise UserError(found, refusal.expected, refusal.remedy) from None
        time.sleep(_POLL_INTERVAL)


def _may_pass(error: Exception) -> bool:
    """Returns whether a request may succeed later: there was no answer, or no agent accepts jobs yet.

    A ValueError means an invalid address; it may also be an OSError.
    """
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        return True
    return bool(re.search("No available agent|status code 50[234]", str(error)))


def copy_code(folder: Path) -> Path:
    """Copies the code of this program below `folder` as a package, however it is installed. Returns the package."""
    package = folder / "mcis"
    for name in _PACKAGES:
        source = Path(next(iter(importlib.import_module(f"mcis.{name}").__path__)))
        shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)

    # Without an `__init__.py`, Python would prefer an mcis that is installed on the node.
    init = importlib.import_module("mcis").__file__
    assert init is not None
    shutil.copyfile(init, package / "__init__.py")
    return package
