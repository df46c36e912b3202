"""The axes of a search: configuration keys and the ranges that their values are drawn from."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcis.datasets.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_FORM = re.compile(r"\s*([\w.]+)\s*=\s*(\w+)\((.*)\)\s*")
_EXAMPLE = "--axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)'"
FORMS = "uniform(low,high), loguniform(low,high), integer(low,high), logint(low,high) or choice(a,b,...)"


def parse_axes(texts: Sequence[str]) -> "dict[str, BaseDistribution]":
    """`KEY=FORM(...)` texts -> Optuna's distributions by dotted key; ends of ranges are included.

    Raises:
        UserError: no text, or one of another form.
    """
    if not texts:
        raise UserError("no --axis", "at least one KEY and its range", f"write for example {_EXAMPLE}")
    axes: dict[str, BaseDistribution] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if not match:
            raise UserError(f"--axis {text}", f"KEY={FORMS}", f"write for example {_EXAMPLE}")
        key, form, inside = match.groups()
        if key in axes:
            raise UserError(f"two --axis {key}", "one range for a key", "leave one of them out")
        axes[key] = _distribution(text, form, [_value(item) for item in inside.split(",")])
    return axes


def _value(text: str) -> Any:
    """As the value of `--set`: JSON where it is that, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _distribution(text: str, form: str, values: list[Any]) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if form == "choice":
        if len(values) < 2 or len({str(value) for value in values}) < len(values) or "" in values:
            raise UserError(f"--axis {text}", "two or more different values", "name them between commas")
        return CategoricalDistribution(values)
    if form not in ("uniform", "loguniform", "integer", "logint"):
        raise UserError(f"--axis {text}", FORMS, f"write for example {_EXAMPLE}")
    whole, logarithmic = form in ("integer", "logint"), form.startswith("log")
    kind: Any = int if whole else (int, float)
    numbers = [value for value in values if isinstance(value, kind) and not isinstance(value, bool)]
    if len(numbers) != 2 or len(values) != 2 or not all(math.isfinite(number) for number in numbers):
        raise UserError(f"--axis {text}", f"two {'whole ' if whole else ''}numbers", "name the lower and the upper end")
    low, high = numbers
    if low >= high or (logarithmic and low <= 0):
        above = " above 0" if logarithmic else ""
        raise UserError(f"--axis {text}", f"a lower end{above} that is less than the upper one", "correct the ends")
    return IntDistribution(low, high, log=logarithmic) if whole else FloatDistribution(low, high, log=logarithmic)


def ends(axis: "BaseDistribution") -> list[Any]:
    """The values that show whether a key takes what lies on its axis: all choices, or both ends of a range.

    Of a range of numbers that are not whole ones, also such a number between.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    assert isinstance(axis, FloatDistribution | IntDistribution)
    between = [] if isinstance(axis, IntDistribution) else [axis.low + (axis.high - axis.low) * 0.6180339887]
    return [axis.low, axis.high, *between]


def lies_on(axes: "Mapping[str, BaseDistribution]", values: Mapping[str, Any]) -> bool:
    """Whether every axis has the value of its key."""
    return all(_is_on(axis, values[key]) for key, axis in axes.items())


def _is_on(axis: "BaseDistribution", value: Any) -> bool:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(axis, CategoricalDistribution):
        return value in axis.choices
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    low, high, *_ = ends(axis)
    return bool(low <= value <= high) and (not isinstance(axis, IntDistribution) or float(value).is_integer())
