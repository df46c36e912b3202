"""What a search came to: its trials or generations, the best of them, and the configuration that it began from."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcis.platform.config.keys import Values


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial that has ended.

    Attributes:
        number: from 0; the name of its run ends in it.
        values: of the axes, by dotted key.
        state: `done`, `stopped` as it lagged behind, or `failed`.
        objective: None unless it is done.
        val_map: the classifier's mean average precision when it was last validated, percent, or None.
        maps: mIoU, percent, of the maps by which it was stopped, or None.
        epoch: at which it was stopped, or None.
        minutes: that it took, 0 where that is not known.
        cause: why it failed.
    """

    number: int
    values: Values
    state: str
    objective: float | None
    val_map: float | None
    maps: float | None
    epoch: float | None
    minutes: float
    cause: str | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        tried: in the order of their numbers.
        best: of those that are done, or None.
        default: the trial of the configuration as it is, where that lies on the axes and is done.
    """

    tried: list[Tried]
    best: Tried | None
    default: Tried | None

    def counts(self) -> dict[str, int]:
        """Trials by state."""
        states = [tried.state for tried in self.tried]
        return {state: states.count(state) for state in ("done", "stopped", "failed")}


def trial_name(search: str, number: int) -> str:
    """The name of a trial's run."""
    return f"{search}-t{number:03d}"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a generation, before it runs and after.

    Attributes:
        generation, number: from 0; within its generation.
        parent: number of the member of the generation before whose weights it starts from; None in the first one.
        values: of the axes, by dotted key.
        control: whether it and all before it have the values of the configuration as it is.
        objective: what it came to, percent; None before it has run, and where it failed.
        val_map: the classifier's mean average precision on val images, percent, or None.
        cause: why it failed.
    """

    generation: int
    number: int
    parent: int | None
    values: Values
    control: bool = False
    objective: float | None = None
    val_map: float | None = None
    cause: str | None = None


Generation = list[Member]
"""The members of a generation, by number."""


def best_of(generations: Sequence[Generation]) -> Member | None:
    """The member with the highest objective, the earliest of them; None where all failed."""
    done = [member for generation in generations for member in generation if member.objective is not None]
    return max(done, key=lambda member: member.objective or 0.0, default=None)


def control_of(generation: Generation) -> Member | None:
    """The control, where it has come so far."""
    return next((member for member in generation if member.control and member.objective is not None), None)


def line_of(generations: Sequence[Generation], member: Member) -> list[Member]:
    """The members whose weights a member's began as, from the first generation to itself."""
    line = [member]
    while line[0].parent is not None:
        line.insert(0, generations[line[0].generation - 1][line[0].parent])
    return line
