"""Turns errors of Ray and torch into errors for users: a worker's own message, or what ended its process."""

import contextlib
import re
from collections.abc import Iterator

from mcis.datasets.errors import UserError, recompute_command
from mcis.platform.config.compute import uses_cluster
from mcis.platform.runs.files import full_disk

IMAGE_AT_FAULT = (
    "if an image may be the cause, make the index again, which finds and rejects such images: "
    f"{recompute_command('index')}"
)
"""A further remedy if a process died."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Raises the UserError that an error of Ray wraps, instead of that error."""
    try:
        yield
    except Exception as error:
        user_error = user_error_in(error)
        if user_error:
            raise user_error from None
        raise


def user_error_in(error: BaseException) -> UserError | None:
    """Returns the UserError that an error of Ray wraps, of a task, an actor or a training worker.

    An error of a full disk becomes a UserError too, wherever Ray met it.
    """
    from ray.exceptions import RayError

    causes = list(causes_of(error))
    for cause in causes:
        # A class that Ray derives from both has a traceback as its text.
        if isinstance(cause, UserError) and not isinstance(cause, RayError):
            return cause

    for cause in causes:
        file = getattr(cause, "filename", None) or "a worker"
        disk_error = full_disk(cause, f"the disk of {file}")
        if disk_error:
            return disk_error
    return None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and all its causes, as far as Ray or Python record them, nearest first."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop(0)
        if current is None or any(current is earlier for earlier in seen):
            continue
        seen.append(current)
        yield current

        for name in ("cause", "controller_failure", "health_check_failure", "__cause__", "__context__"):
            pending.append(getattr(current, name, None))
        worker_failures = getattr(current, "worker_failures", None) or {}
        pending += worker_failures.values()


_DEATHS = {
    "OutOfMemoryError": "its process was ended because the machine ran out of memory",
    "NodeDiedError": "its node was lost",
    "WorkerCrashedError": "its process was ended by a signal",
    "ActorDiedError": "its process was ended by a signal, or its node was lost",
}
"""Ray's errors of a process that died, after all retries, and what ended it."""


def death_types() -> tuple[type[Exception], ...]:
    """Returns the classes of errors that `_DEATHS` names."""
    from ray import exceptions

    return tuple(getattr(exceptions, name) for name in _DEATHS)


def death_in(error: BaseException) -> Exception | None:
    """Returns the error of `death_types` that an error is or wraps, if any.

    The call of an actor wraps it if a process died that computed an argument.
    """
    return next((cause for cause in causes_of(error) if isinstance(cause, death_types())), None)


def is_node_loss(death: Exception) -> bool:
    """Returns whether a process died with its node, which is no property of its work.

    The error of an actor says so only in its text.

    Args:
        death: An error of `death_types`.
    """
    from ray.exceptions import NodeDiedError

    return isinstance(death, NodeDiedError) or "its node has died" in str(death)


def death_text(death: BaseException) -> str:
    """Returns what ended a process, for messages.

    Args:
        death: An error of `death_types`.
    """
    names = [base.__name__ for base in type(death).__mro__]
    return next(_DEATHS[name] for name in names if name in _DEATHS)


def fewer_processes() -> str:
    """Returns which setting makes fewer processes of a mapping on CPUs run on a node, for remedies."""
    return "raise compute.memory_gb" if uses_cluster() else "lower compute.cpus"


_NO_MEMORY = re.compile("out of memory|can't allocate memory|CU(BLAS|DNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")


class MemoryRanOut(UserError):
    """There was not enough memory, of a GPU or of the machine, for a tensor."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Returns whether an error of torch says that memory, of a GPU or of the machine, ran out."""
    return type(error).__name__ == "OutOfMemoryError" or bool(_NO_MEMORY.search(str(error)))


@contextlib.contextmanager
def memory_errors(task: str, memory_hint: str) -> Iterator[None]:
    """Turns torch's errors of memory that ran out into errors that say what to lower.

    Args:
        task: Description of what the block computes, used in messages.
        memory_hint: What reduces memory, used in messages, such as `lower localize.batch`.

    Raises:
        MemoryRanOut: Memory ran out. The same work would fail again.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise MemoryRanOut(
            f"{task}: memory ran out ({first_line[:300]})",
            "enough memory, of the GPU if there is one, for what is computed at a time",
            f"{memory_hint}, or end what else uses the memory; then repeat the command: finished work is kept",
        ) from None
