"""Work in threads of this process: items some way ahead of their reader, and a call that may be left alone."""

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
    """What `act` makes of each item, in order; the threads end with the generator.

    Each thread is at most so many items `ahead` of the reader, so that neither items nor results pile up.
    """
    pool = ThreadPoolExecutor(threads)
    coming: deque[Future[_T]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(act, item))
            if len(coming) > ahead * threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_in_background(act: Callable[[], _T]) -> Future[_T]:
    """What `act` will return or raise, in a thread that nobody has to wait for, not even the end of the process."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:  # handed on to whoever asks for the answer
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer
