"""Calls to a server that may be away for a while: made in their order by a thread, each until it succeeds."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Outbox:
    """Calls that wait for their turn; who hands one over does not wait.

    A thread makes them one after the other and ends when none is left. A call that fails because the server is away is
    made again every `pause` seconds, with all others behind it. Any other failure ends the outbox: what waits is
    dropped, and the error is raised by the next `put` or `drain`.

    Args:
        away: whether a call failed because the server is away for now; else the call will never succeed.
        on_away: told of the first failure of each time that the server is away.
    """

    def __init__(
        self, *, away: Callable[[Exception], bool], on_away: Callable[[Exception], None], pause: float = 5.0
    ) -> None:
        self._away, self._on_away, self._pause = away, on_away, pause
        self._calls: deque[tuple[Callable[[], None], Any]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._away_since: float | None = None

    def put(self, call: Callable[[], None], words: Any = None) -> None:
        """Hands a call over, to be made after those before it.

        Args:
            words: what says the same to another process, see `waiting`.

        Raises:
            Exception: an earlier call failed for good.
        """
        with self._changed:
            self._raise_failure()
            self._calls.append((call, words))
            if self._thread is None:
                self._thread = threading.Thread(target=self._make_calls, daemon=True)
                self._thread.start()

    def drain(self, patience: float) -> bool:
        """Waits until all calls are made; gives up where the server is away for `patience` seconds from now on.

        Returns:
            Whether all calls were made. What is left goes on waiting.

        Raises:
            Exception: a call failed for good.
        """
        began = time.monotonic()
        with self._changed:
            while self._calls:
                if self._away_since is not None and time.monotonic() - max(began, self._away_since) > patience:
                    return False
                self._changed.wait(timeout=0.2)
            self._raise_failure()
        return True

    def waiting(self) -> list[Any]:
        """The words of the calls that wait, in their order; the first may be under way."""
        with self._changed:
            return [words for _, words in self._calls]

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._calls)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_calls(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._thread = None
                    return
                call, _ = self._calls[0]
            try:
                call()
            except Exception as error:
                with self._changed:
                    if not self._away(error):
                        self._failure = error
                        self._calls.clear()
                        self._changed.notify_all()
                        continue
                    first, self._away_since = self._away_since is None, self._away_since or time.monotonic()
                if first:
                    self._on_away(error)
                time.sleep(self._pause)
            else:
                with self._changed:
                    self._calls.popleft()
                    self._away_since = None
                    self._changed.notify_all()
