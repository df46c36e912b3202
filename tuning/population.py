"""Population based training (Jaderberg et al. 2017) in generations: what each member starts from and its values.

Between two generations the lagging quarter takes over weights and values of the best quarter and changes the values.
Ray Tune's scheduler of this name is not used: it draws from the global state of Python's generator, so that a repeated
search would take another way; it moves values beyond the ends of their ranges; and it changes the values of a trial
that it pauses, while here each member of a generation is a run of its own, whose stages have keys of its configuration.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.platform.config.keys import Values
from mcis.tuning.axes import on_range, value_at
from mcis.tuning.found import Generation, Member

_QUARTER = 4
_ANEW = 0.25
"""Probability that a value is drawn anew rather than moved (the default of Ray Tune, too)."""
_MOVE = 0.2
"""Share by which a number grows or shrinks (the paper's factors 1.2 and 0.8)."""


def first_generation(axes: Mapping[str, BaseDistribution], default: Values, *, members: int, seed: int) -> Generation:
    """The control, with the values of the configuration, which need not lie on the axes; the others' are drawn.

    Args:
        default: the configuration's values of the axes, by dotted key.
    """
    first = [Member(generation=0, number=0, parent=None, values=dict(default), control=True)]
    for number in range(1, members):
        values = {key: value_at(axes[key], where) for key, _, where in _shares(axes, seed, 0, number).of_axes}
        first.append(Member(generation=0, number=number, parent=None, values=values))
    return first


def next_generation(before: Generation, axes: Mapping[str, BaseDistribution], *, seed: int) -> Generation:
    """What the members go on with: their own weights and values, or, where they lag behind or failed, changed ones.

    A member that lags takes over one of the best quarter, each with equal chance. The control never lags, but it may
    fail; others may take it over.

    Args:
        before: members that have run, at least one of them without failing.
    """
    best, lagging = _best(before), _lagging(before)
    after = []
    for member in before:
        generation, number = member.generation + 1, member.number
        if member in lagging:
            shares = _shares(axes, seed, generation, number)
            parent = best[int(shares.parent * len(best))]
            values = {key: explored(axes[key], parent.values[key], *of_axis) for key, *of_axis in shares.of_axes}
            after.append(Member(generation=generation, number=number, parent=parent.number, values=values))
        else:
            after.append(replace(member, generation=generation, parent=number, objective=None, val_map=None))
    return after


def explored(axis: BaseDistribution, value: Any, whether: float, where: float) -> Any:
    """Another value of an axis: drawn anew with probability 1/4, or where the axis has no such value, else moved.

    A number moves by a fifth of it up or down, a whole one by at least 1, not beyond the ends of its range; a choice to
    one of its neighbors, where it has one on that side.

    Args:
        whether, where: numbers in [0, 1) that decide.
    """
    up = where >= 0.5
    if whether >= _ANEW:
        if isinstance(axis, CategoricalDistribution) and value in axis.choices:
            position = axis.choices.index(value) + (1 if up else -1)
            return axis.choices[min(max(position, 0), len(axis.choices) - 1)]
        if isinstance(axis, IntDistribution | FloatDistribution) and type(value) in (int, float):
            step = abs(value) * _MOVE
            step = max(1, round(step)) if isinstance(axis, IntDistribution) else step
            return on_range(axis, value + step if up else value - step)
    return value_at(axis, where)


def _best(members: Generation) -> Generation:
    done = [member for member in members if member.objective is not None]
    return sorted(done, key=lambda member: -(member.objective or 0.0))[: max(1, len(members) // _QUARTER)]


def _lagging(members: Generation) -> Generation:
    """Those that failed, and of the others the last, a quarter in all if so many did not fail."""
    failed = [member for member in members if member.objective is None]
    best = _best(members)
    others = [member for member in members if member not in failed + best and not member.control]
    last = sorted(others, key=lambda member: member.objective or 0.0)
    return failed + last[: max(0, len(members) // _QUARTER - len(failed))]


class _Shares(NamedTuple):
    """Numbers in [0, 1) that decide for a member: whom it takes over; for each axis, by key, whether and where to."""

    parent: float
    of_axes: list[tuple[str, float, float]]


def _shares(axes: Mapping[str, BaseDistribution], seed: int, generation: int, number: int) -> _Shares:
    drawn = uniforms(Draw.POPULATION, seed, generation, np.array([number]), count=1 + 2 * len(axes))[0].tolist()
    return _Shares(drawn[0], list(zip(sorted(axes), drawn[1::2], drawn[2::2], strict=True)))
