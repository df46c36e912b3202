"""The checks of `mcis doctor` and `mcis doctor --bench`, one line of the table each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from mcis.datasets.errors import UserError

State = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        state: `ok`, `note` (works, but could be better) or `bad`.
        text: What was found.
        remedy: What to do; empty if there is nothing to do.
        values: Measured numbers by name.
    """

    state: State
    text: str
    remedy: str = ""
    values: Mapping[str, float] = {}


class Check(NamedTuple):
    """A line of the table, and of the file that `--bench` writes: a part of the machine and its `Finding`."""

    part: str
    state: State
    finding: str
    remedy: str
    values: Mapping[str, float]


def run_checks(parts: Mapping[str, Callable[[], Finding]], remedy: str) -> Iterator[Check]:
    """Runs checks one after the other.

    Args:
        parts: Part of the machine -> function that checks it.
        remedy: What to do about a check that raises an unexpected error, which is a finding, too.
    """
    for part, check in parts.items():
        try:
            finding = check()
        except UserError as error:
            finding = Finding("bad", error.found, error.remedy)
        except Exception as error:  # broken parts are what these checks look for
            finding = Finding("bad", f"{type(error).__name__}: {str(error)[:120]}", remedy)
        yield Check(part, *finding)
