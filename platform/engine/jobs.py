"""Commands of mcis as jobs of a Ray cluster, with this program's own code: how they are submitted and followed."""

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
from mcis.datasets.storage.faults import PATIENCE, with_timeout

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_Result = TypeVar("_Result")
_PACKAGES = ("datasets", "models", "platform", "tuning")
_STOP_SECONDS = "40"
"""What a job that is stopped has until it is killed."""
_PAUSE = 2.0
"""Seconds between two looks at a cluster."""


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
    from ray.job_submission import JobSubmissionClient

    refused = (
        f"the cluster at {address} takes no job",
        "the dashboard of a cluster that is up, and a token where it asks for one",
        "see that `ray job list` works there (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH), and repeat",
    )

    def submit() -> tuple[str, str]:
        """The job's number, and what to say of it."""
        at_work = (job for job in client.list_jobs() if _is_at_work(job) and (job.metadata or {}).get("run") == run)
        job = next(at_work, None)  # it may be that of an earlier try, whose answer was lost
        if job is None:
            number = client.submit_job(entrypoint=text, runtime_env=environment, metadata={"run": run})
            return number, f"; `ray job stop {number} --address {address}` stops it; its log:"
        if job.entrypoint != text:
            raise UserError(
                f"job {job.submission_id} is at work on {run} with another command: {job.entrypoint}",
                "one job at a time for a run",
                f"wait, or stop it by `ray job stop {job.submission_id} --address {address}`, and repeat the command",
            )
        return str(job.submission_id), " is at work on it since before; its log:"

    text = shlex.join(command)
    stop = {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS}
    environment: dict[str, Any] = {"py_modules": [str(_code(folder))], "env_vars": stop}
    if any((folder / "files").iterdir()):  # else the job is in the folder that the node's Ray is in
        environment["working_dir"] = str(folder / "files")
    client = _patiently(lambda: JobSubmissionClient(address), minutes, refused)
    number, told = _patiently(submit, minutes, refused, most=None)
    print(f"job {number}{told}", flush=True)
    try:
        ended = _followed(client, number, address, minutes)
    except KeyboardInterrupt:
        print(f"\njob {number} goes on; the same command shows it again", file=sys.stderr)
        return 130
    print(f"job {number}: {ended.status}" + (f", {ended.message}" if ended.message else ""))
    return 0 if str(ended.status) == "SUCCEEDED" else 1


def _is_at_work(job: "JobDetails") -> bool:
    return str(job.status) in ("PENDING", "RUNNING")


def _followed(client: "JobSubmissionClient", number: str, address: str, minutes: float) -> "JobDetails":
    """Shows the log of a job as it grows until the job has ended; the ended job."""
    away = (
        f"the cluster at {address} tells nothing of job {number} any more",
        "a head that stays up, and a connection to its dashboard, until the job has ended",
        "repeat the command: it shows the job again where that goes on without it, and else goes on where it stopped",
    )
    shown = 0
    while True:
        job = _patiently(lambda: client.get_job_info(number), minutes, away)
        log = _patiently(lambda: client.get_job_logs(number), minutes, away)
        print(printable(log[shown:]), end="", flush=True)
        shown = max(shown, len(log))
        if not _is_at_work(job):
            return job
        time.sleep(_PAUSE + shown / 1e6)  # a log comes whole each time


def _patiently(
    call: Callable[[], _Result], minutes: float, refused: tuple[str, str, str], *, most: float | None = PATIENCE
) -> _Result:
    """The result of a call, which is repeated while the cluster does not answer or no agent of it takes jobs yet.

    Args:
        refused: found, expected and remedy of the error, to which is added what the cluster told.
        most: seconds that the call may take; None = any, as what is submitted is copied to the cluster.

    Raises:
        UserError: it went on so for some minutes, or the cluster refused.
    """
    from ray.exceptions import RayError

    end = time.monotonic() + 60 * minutes
    while True:
        try:
            return call() if most is None else with_timeout(most, call)
        except (OSError, RuntimeError, RayError) as error:
            # A ValueError is an address that is none; other errors are what the cluster has answered.
            unanswered = isinstance(error, OSError) and not isinstance(error, ValueError)
            may_pass = unanswered or re.search("No available agent|status code 50[234]", str(error))
            if not may_pass or time.monotonic() > end:
                found, expected, remedy = refused
                raise UserError(f"{found}: {one_line(str(error), 300)}", expected, remedy) from None
        time.sleep(_PAUSE)


def _code(folder: Path) -> Path:
    """The program's own code as a package that can be imported, below `folder`, whichever way it is installed."""
    package = folder / "mcis"
    for name in _PACKAGES:
        source = Path(next(iter(importlib.import_module(f"mcis.{name}").__path__)))
        shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        shutil.copyfile(source.parent / "__init__.py", package / "__init__.py")
    return package
