"""Counts the images of an index whose pixels have no clear meaning, and describes how they are read."""

from collections import defaultdict
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import join_shortened
from mcis.datasets.images.value_range import WHOLE_RANGE, ValueRange, likely_range, range_text

_MAX_EXAMPLES = 6
"""Number of image ids that are kept for each note; notes show five of them."""
_SMALL_PART = 0.5
"""Share of a range below which the values that occur are reported as a small part of it."""


@dataclass
class _Group:
    """Images with unclear pixels of one kind: their number, the ids of some, and the range of their values."""

    count: int = 0
    image_ids: list[str] = field(default_factory=list)
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, rows: pa.Table) -> None:
        self.count += len(rows)
        self.image_ids += rows["image_id"].slice(0, max(0, _MAX_EXAMPLES - len(self.image_ids))).to_pylist()
        if rows["low"].null_count < len(rows):
            self.low = min(self.low, pc.min(rows["low"]).as_py())
            self.high = max(self.high, pc.max(rows["high"]).as_py())

    def examples(self) -> str:
        names = join_shortened(self.image_ids[:5])
        return f"{names} and {self.count - 5} more" if self.count > 5 else names


class UnclearPixels:
    """Counts images by the kind of their pixels, `PictureCheck.pixels`.

    Args:
        value_range: `data.value_range`.
    """

    def __init__(self, value_range: ValueRange | None):
        self.value_range = value_range
        self._groups: dict[str, _Group] = defaultdict(_Group)

    def add(self, images: pa.Table) -> None:
        """Adds accepted images, rows of CHECKED_SCHEMA."""
        unclear = images.filter(images["pixels"].is_valid())
        for kind in unclear["pixels"].unique().to_pylist():
            self._groups[kind].add(unclear.filter(pc.equal(unclear["pixels"], kind)))

    def notes(self) -> list[str]:
        """Returns one note for each kind that occurs."""
        notes = []
        for kind, group in sorted(self._groups.items()):
            if kind in ("integers", "floats"):
                notes.append(self._gray_note(kind, group))
            elif kind == "deep color":
                notes.append(_deep_color_note(group))
            else:
                found, remedy = _NOTES[kind]
                notes.append(f"{group.count} image(s) {found}: {group.examples()}. {remedy}")
        return notes

    def _gray_note(self, kind: str, group: _Group) -> str:
        black, white = self.value_range or WHOLE_RANGE
        pixels = "more than 8 bits" if kind == "integers" else "floating-point pixels"
        note = (
            f"{group.count} gray image(s) have {pixels} and values from {group.low:g} to {group.high:g}; {black:g} is "
            f"read as black and {white:g} as white (data.value_range): {group.examples()}"
        )
        if min(group.high, white) - max(group.low, black) >= _SMALL_PART * (white - black):
            return note
        likely = range_text(likely_range(kind, group.low, group.high))
        return f"{note}. The values use a small part of this range; if theirs is another, set data.value_range={likely}"


def _deep_color_note(group: _Group) -> str:
    note = f"{group.count} color image(s) have 16 bits per channel, of which the upper 8 are used: {group.examples()}"
    if group.high >= _SMALL_PART * WHOLE_RANGE[1]:
        return note
    _, white = likely_range("integers", 0, group.high)
    factor = round((WHOLE_RANGE[1] + 1) / (white + 1))
    return (
        f"{note}. No value is above {group.high:g} of {WHOLE_RANGE[1]}, so they are dark; convert them, for example by "
        f"magick FILE -evaluate multiply {factor} FILE.png"
    )


_NOTES = {
    "transparent": (
        "are transparent in most of their pixels, which are read as white",
        "To read the colors below the transparency, convert them, for example by magick FILE -alpha off FILE.png",
    ),
    "black": (
        "are almost black, with no value above 31 of 255",
        "If their values have another range, convert them, for example by magick FILE -auto-level FILE.png",
    ),
    "white": ("are almost white, with no value below 224 of 255", "Remove them if they show nothing"),
}
"""Kind of pixels -> what is said of the images, and what to do."""
