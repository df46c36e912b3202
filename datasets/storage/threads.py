"""Runs work in threads of this process: mapping items ahead of their reader, and calls that may be abandoned."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_T = TypeVar("_T")


def map_in_threads(
    act: Callable[[_Item], _T], items: Iterable[_Item], *, threads: int, ahead: int = 4
) -> Generator[_T]:
    """Applies `act` to each item in threads and yields the results in order. The threads end with the generator.

    Args:
        ahead: Maximum number of items per thread that are processed ahead of the reader, which bounds memory.
    """
    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[_T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(act, item))
            if len(pending) > ahead * threads:
                yield pending.popleft().result()

        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_in_background(act: Callable[[], _T]) -> Future[_T]:
    """Calls `act` in a daemon thread, which nothing waits for, not even the end of the process."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
