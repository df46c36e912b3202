"""What users read of errors that Ray and torch raise: a worker's own message, or which process died of what."""

import contextlib
import re
from collections.abc import Iterator

from mcis.datasets.errors import UserError
from mcis.platform.runs.files import full_disk

IMAGE_AT_FAULT = "where an image may be the cause, repeat it with --from index, which finds and rejects such images"
"""What else a user can do whose process died."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """In the block an error that Ray made of a user's error is raised as that one."""
    try:
        yield
    except Exception as error:
        if user_error := user_error_in(error):
            raise user_error from None
        raise


def user_error_in(error: BaseException) -> UserError | None:
    """The user's error that Ray wrapped, whether a task, an actor or a training worker raised it.

    A full disk is one, wherever in Ray it was met.
    """
    from ray.exceptions import RayError

    causes = list(causes_of(error))
    for cause in causes:
        if isinstance(cause, UserError) and not isinstance(cause, RayError):  # a mixture's text is a traceback
            return cause
    full = (full_disk(each, f"the disk of {getattr(each, 'filename', None) or 'a worker'}") for each in causes)
    return next(filter(None, full), None)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that Ray or Python say caused it."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or any(current is earlier for earlier in seen):
            continue
        seen.append(current)
        yield current
        failures = getattr(current, "worker_failures", None) or {}
        waiting += [
            getattr(current, name, None)
            for name in ("cause", "controller_failure", "health_check_failure", "__cause__", "__context__")
        ]
        waiting += failures.values()


_DEATHS = {
    "OutOfMemoryError": "the machine's memory did not do for its process",  # Ray ends any task where memory is short
    "NodeDiedError": "its node was lost",
    "WorkerCrashedError": "its process was ended by a signal",
    "ActorDiedError": "its process was ended by a signal, or its node was lost",
}
"""What Ray raises where it has done a task or an actor's call again in vain, because the process died; and of what."""


def deaths() -> tuple[type[Exception], ...]:
    """The errors of `_DEATHS`."""
    from ray import exceptions as of_ray

    return tuple(getattr(of_ray, name) for name in _DEATHS)


def death_text(death: BaseException) -> str:
    """What ended a process, for messages."""
    return next(text for base in type(death).__mro__ for name, text in _DEATHS.items() if base.__name__ == name)


_NO_MEMORY = re.compile("out of memory|can't allocate memory|CU(BLAS|DNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")


class MemoryRanOut(UserError):
    """A GPU, or a machine, had no memory for an array of torch."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU, or a machine, had no memory for an array of torch."""
    return type(error).__name__ == "OutOfMemoryError" or bool(_NO_MEMORY.search(str(error)))


@contextlib.contextmanager
def memory_errors(what: str, memory_hint: str) -> Iterator[None]:
    """Turns torch's errors of a GPU, or a machine, without memory for an array into one that says what to lower.

    Args:
        what: what is computed in the block, in words.
        memory_hint: keys of the configuration, in words, by which less is computed at a time.

    Raises:
        MemoryRanOut: it did. The same work again would end in the same way.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryRanOut(
            f"{what}: memory ran out ({str(error).strip().partition(chr(10))[0][:300]})",
            "memory, of the GPU where there is one, for what is computed at a time",
            f"lower {memory_hint}, or end what else uses the memory; then repeat the command: what is finished is kept",
        ) from None
