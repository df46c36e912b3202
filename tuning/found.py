"""What a search came to: its trials, the best of them, and the configuration that it began from."""

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
        epoch: at which it was stopped, or None.
        minutes: that it took, 0 where that is not known.
        cause: why it failed.
    """

    number: int
    values: Values
    state: str
    objective: float | None
    val_map: float | None
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
