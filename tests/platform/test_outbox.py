"""Calls to a server that is away for a while: made in their order, each until it succeeds, none of them waited for."""

import threading
import time
from collections.abc import Callable

import pytest

from mcis.platform.runs.outbox import Outbox


class Server:
    """Takes calls unless it is down."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.asked = 0
        self.down = False

    def call(self, number: int) -> Callable[[], None]:
        def send() -> None:
            self.asked += 1
            if self.down:
                raise ConnectionError("refused")
            self.taken.append(number)

        return send


def outbox(told: list[Exception]) -> Outbox:
    return Outbox(away=lambda error: isinstance(error, ConnectionError), on_away=told.append, pause=0.01)


def test_calls_are_made_in_their_order() -> None:
    server, told = Server(), list[Exception]()
    box = outbox(told)
    for number in range(100):
        box.put(server.call(number))
    assert box.drain(patience=10)
    assert server.taken == list(range(100))
    assert not told
    assert not len(box)


def test_a_server_that_is_away_gets_everything_once_it_is_back() -> None:
    server, told = Server(), list[Exception]()
    box = outbox(told)
    server.down = True
    began = time.monotonic()
    for number in range(50):
        box.put(server.call(number))
    assert time.monotonic() - began < 1
    assert not box.drain(patience=0.1)
    assert len(box) == 50
    server.down = False
    assert box.drain(patience=10)
    assert server.taken == list(range(50))
    assert len(told) == 1, "one message for the whole time"
    assert server.asked > 51


def test_what_will_never_be_taken_is_an_error_of_the_next_call() -> None:
    server, told = Server(), list[Exception]()
    box = outbox(told)

    def refused() -> None:
        raise ValueError("another value")

    box.put(refused)
    with pytest.raises(ValueError, match="another value"):
        box.drain(patience=10)
    with pytest.raises(ValueError, match="another value"):
        box.put(server.call(1))
    assert not server.taken


def test_no_thread_is_left_where_nothing_waits() -> None:
    server, told = Server(), list[Exception]()
    before = threading.active_count()
    for number in range(5):
        box = outbox(told)
        box.put(server.call(number))
        box.drain(patience=10)
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
