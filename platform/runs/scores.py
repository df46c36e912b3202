"""Scores: one figure each, with everything that it depends on and the words that say so."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import pydantic

from mcis.platform.runs.files import read_record_of

SCORES, CURVES = "scores.json", "curves.json"
"""Files of the output of the stage `evaluate`: a list of scores, and curves by name."""
Scored = Literal["localization_maps", "pseudo_masks", "baseline", "segmentation"]
"""What a score is of; a baseline is made of tags and saliency maps, without a classifier."""
FULL_SUPERVISION = (
    "supervision is full: the segmentation network was trained on ground-truth masks, as an upper bound of what tags "
    "reach"
)


def grouped(number: int) -> str:
    """A number with thin spaces between thousands: 10 582."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def percent(value: float) -> str:
    """A share in [0, 1] as percent: 12.3 %."""
    return f"{100 * value:.1f}\N{NARROW NO-BREAK SPACE}%"


def _heading(heading: str, text: Callable[[Any], str] = str, *, origin: bool = False) -> dict[str, Any]:
    """A field's heading, and how its value is shown: of how the scored masks were made, or where the score is from."""
    return {"heading": heading, "text": text, "origin": origin}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean IoU and what it means. A value that does not apply to what is scored is None.

    Attributes:
        what: what is scored.
        name: which of them, such as "single round" or "with CRF".
        split, images: the images whose ground truth was compared, and how many they are.
        miou: mean IoU in percent over the labels that occur in truth or prediction; NaN where no pixel was scored.
        iou: IoU in percent by name of the label, background first; None where a label occurs in neither.
        figures: by the names of `metrics.LABEL_SCORES` what each label has, in percent by its name; None where none.
        boundary_miou, boundary_iou: the same as `miou` and `iou` of the boundary regions (`metrics.boundary_iou`); None
            for localization maps, which have no contours before a threshold is chosen.
        confusion: pixels by true and predicted label, a row for each true one, background first; what the figures above
            but boundary IoU follow from.
        threshold: background threshold of localization maps, in [0, 1].
        background_cue: where the background comes from.
        map_scale: how activations became scores in [0, 1] (`maps.scale`).
        related: number of related images that each map was made with.
        method: how maps were made of related images, or refined, or what was known of segmented images, in words.
        scales, hflip: of the images that were segmented, and whether they were also mirrored.
        crf: whether the dense CRF refined the segmentation.
        ignored_share: of its pixels that a pseudo mask ignores in training, mean over the images, in [0, 1]; they are
            scored all the same.
        trained_on: what taught the segmentation network, where it is not tags: `ground truth`.
        seed, recipe, weights: of the configuration; `weights` is the file or source that training began from.
        git: commit of the project that ran, None outside a checkout.
        code: what `version.code_digest` said of it.
    """

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    what: Scored
    name: str
    split: str
    images: int
    miou: float
    iou: dict[str, float | None]
    figures: dict[str, dict[str, float | None]]
    boundary_miou: float | None = None
    boundary_iou: dict[str, float | None] | None = None
    confusion: tuple[tuple[int, ...], ...]
    threshold: float | None = field(default=None, metadata=_heading("threshold", "{:.3g}".format))
    background_cue: str | None = field(default=None, metadata=_heading("background cue"))
    map_scale: str | None = field(default=None, metadata=_heading("map scale"))
    related: int | None = field(default=None, metadata=_heading("related images", grouped))
    method: str | None = field(default=None, metadata=_heading("method"))
    scales: tuple[float, ...] | None = field(
        default=None, metadata=_heading("scales", lambda scales: ", ".join(f"{scale:g}" for scale in scales))
    )
    hflip: bool | None = field(default=None, metadata=_heading("horizontal flip", _yes))
    crf: bool | None = field(default=None, metadata=_heading("CRF", _yes))
    ignored_share: float | None = field(default=None, metadata=_heading("ignored share", percent))
    trained_on: str | None = field(default=None, metadata=_heading("trained on"))
    seed: int = field(metadata=_heading("seed", origin=True))
    recipe: str = field(metadata=_heading("recipe", origin=True))
    weights: str = field(metadata=_heading("weights", origin=True))
    git: str | None = field(metadata=_heading("git", origin=True))
    code: str | None = field(default=None, metadata=_heading("code", origin=True))

    @property
    def title(self) -> str:
        """What is scored, in words: localization maps."""
        return self.what.replace("_", " ")

    def metrics(self) -> dict[str, float]:
        """The score's metrics in MLflow, by names of the characters that it allows: letters, digits, `_-. :/`."""
        text = "".join(c if c.isalnum() or c in "_-. :/" else "" for c in f"{self.what}.{self.name}").replace("  ", " ")
        means = {f"mean_{name}": mean for name, mean in self.means().items()}
        values = {"miou": self.miou, "boundary_miou": self.boundary_miou, **means}
        return {f"{text}.{name}": value for name, value in values.items() if value is not None}

    def means(self) -> dict[str, float]:
        """The mean of each of `figures` over the labels that have a value, percent; those that have one at all."""
        known = {name: [value for value in of.values() if value is not None] for name, of in self.figures.items()}
        return {name: round(fmean(values), 2) for name, values in known.items() if values}

    def made(self) -> dict[str, str]:
        """Heading -> text of how the scored masks were made, as far as it applies."""
        return self._texts(origin=False)

    def _texts(self, *, origin: bool) -> dict[str, str]:
        values = {each: getattr(self, each.name) for each in fields(self) if each.metadata.get("origin") is origin}
        return {each.metadata["heading"]: each.metadata["text"](v) for each, v in values.items() if v not in (None, "")}

    def meaning(self) -> dict[str, str]:
        """Heading -> text for every value that applies, in the order of HEADINGS."""
        return {"split": self.split, "images": grouped(self.images)} | self.made() | self._texts(origin=True)


ORIGIN = tuple(each.name for each in fields(Score) if each.metadata.get("origin"))
"""The headings of the configuration and the revision that a score comes from."""
HEADINGS = ("split", "images", *(each.metadata["heading"] for each in fields(Score) if each.metadata))
"""The headings of what scores mean, in reading order: the images, how the masks were made, where the score is from."""


def read_scores(outputs: Mapping[str, Path]) -> list[Score]:
    """The scores of a run; none where it has not come to them.

    Args:
        outputs: folders of finished stages, by stage.

    Raises:
        UserError: they are damaged, or another version wrote them.
    """
    if "evaluate" not in outputs:
        return []
    expected, remedy = "scores as this version of mcis writes them", "repeat the run's command with --from evaluate"
    return read_record_of(outputs["evaluate"] / SCORES, list[Score], expected, remedy)


def headings_of(meanings: Iterable[Mapping[str, str]], *, but: Collection[str] = ()) -> list[str]:
    """The headings that any of some scores' meanings has, in reading order; those in `but` are left out."""
    used = {heading for meaning in meanings for heading in meaning}
    return [heading for heading in HEADINGS if heading in used and heading not in but]


def same_origin(of: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Heading and text of what all of some scores' meanings have in common of their origin."""
    return {h: of[0][h] for h in ORIGIN if of and h in of[0] and len({meaning.get(h) for meaning in of}) == 1}


class Curve(NamedTuple):
    """mIoU in percent over background thresholds in [0, 1]."""

    thresholds: list[float]
    mious: list[float]
