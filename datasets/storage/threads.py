"""Work in threads of this process, some items ahead of the reader and never all at once."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_AHEAD = 4
_Item = TypeVar("_Item")
_T = TypeVar("_T")


def in_threads(
    act: Callable[[_Item], _T], items: Iterable[_Item], *, threads: int, name: str = "mcis"
) -> Generator[_T, None, None]:
    """What `act` makes of each item, in order; the threads end with the generator.

    Each thread is at most four items ahead of the reader, so that neither items nor results pile up.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    coming: deque[Future[_T]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(act, item))
            if len(coming) > _AHEAD * threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
