"""Scales gray pixels of more than 8 bits, whose black and white a file does not state, to 8 bits."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ValueRange: TypeAlias = tuple[float, float]
"""Values that become black and white, such as (0, 4095). The second is larger."""

WHOLE_RANGE: ValueRange = (0, 65535)
"""Range of integers of more than 8 bits if none is given."""


def scaled_to_bytes(values: NDArray[np.number], value_range: ValueRange | None) -> NDArray[np.uint8]:
    """Scales finite values to 0..255, rounded to nearest. Values outside of the range are clipped.

    Args:
        values: (H, W).
        value_range: Values that become 0 and 255. None: WHOLE_RANGE, for integers.
    """
    if value_range is None:
        return ((values.astype(np.int64) + 128) // 257).astype(np.uint8)

    low, high = value_range
    scaled = values.astype(np.float64)
    scaled -= low  # in place, because large pictures need much memory
    scaled *= 255 / (high - low)
    np.clip(scaled, 0, 255, out=scaled)
    return np.rint(scaled, out=scaled).astype(np.uint8)


def range_problem(kind: str, low: float, high: float, value_range: ValueRange | None) -> str | None:
    """Returns why gray pixels of more than 8 bits are rejected, or None if they are read.

    Args:
        kind: "integers" or "floats", see `PictureCheck`.
        low: Smallest value.
        high: Largest value.
        value_range: Values that become black and white, if they are given.
    """
    fits = kind == "integers" and WHOLE_RANGE[0] <= low and high <= WHOLE_RANGE[1]
    if value_range is not None or fits:
        return None
    name = "integer" if kind == "integers" else "floating-point"
    return (
        f"unsupported: {name} pixels from {low:g} to {high:g}, whose range is unknown; name the values of black and "
        f"white, for example by data.value_range={range_text(likely_range(kind, low, high))}"
    )


def likely_range(kind: str, low: float, high: float) -> ValueRange:
    """Returns the range that values from `low` to `high` of gray pixels of more than 8 bits probably have.

    Integers have 8, 10, 12, 14 or 16 bits, and floating-point values are fractions, unless the values are others.
    """
    black = 0.0 if 0 <= low <= high / 2 else low
    tops = (255, 1023, 4095, 16383, 65535) if kind == "integers" else (1, 255)
    for top in tops:
        if black < top and high <= top:
            return black, top
    return black, max(high, black + 1)


def range_text(value_range: ValueRange) -> str:
    """Returns a range as it is written in overrides, such as 0,4095."""
    low, high = value_range
    return f"{low:.9g},{high:.9g}"
