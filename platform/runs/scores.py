"""Defines which outputs are scored against the ground truth, and the record of a score with its settings.

`SCORED_OUTPUTS` lists everything that is scored. Tables on the terminal, pages, plots, MLflow metrics, studies and
search objectives derive from it. Measures other than IoU are registered in `mcis.models.metrics.LABEL_SCORES`.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import pydantic
from pydantic_core import PydanticCustomError

from mcis.datasets.errors import recompute_command
from mcis.platform.runs.files import read_record_of

SCORES = "scores.json"
"""File in the output of the stage `evaluate`: the list of scores."""
CURVES = "curves.json"
"""File in the output of the stage `evaluate`: curves by the name of their score."""
SALIENCY_SUPERVISION = "salient object detectors are trained on masks of other images"
"""Part of every score that depends on saliency maps."""
REGIONS_SUPERVISION = "the program that made them may have been trained on masks"
"""Part of every score that depends on segments or detections of another program."""
FULL_SUPERVISION = (
    "supervision is full: the segmentation network was trained on the masks of the data set; if these are the ground "
    "truth, its scores are an upper bound for training with tags"
)


class Variant(NamedTuple):
    """A score that a run can have for an output: an output has several if it is scored in several versions.

    Attributes:
        key: Name in `mcis runs --json`.
        title: Name in tables and messages.
        heading: Abbreviated title, for tables with a column per score.
        study_column: Name in `study.json` and in the MLflow metrics of studies.
        objective: Name of the objective of `mcis study search` that maximizes this score.
        crf: Value of `Score.crf` of these scores; None if the CRF does not apply to the output.
    """

    key: str
    title: str
    heading: str
    study_column: str
    objective: str
    crf: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredOutput:
    """An output that is scored against the ground truth.

    Attributes:
        title: Name in tables and messages.
        page_title: Heading on pages.
        color: Index of its color in the series of `mcis.platform.reporting.plots.Theme`; None if it has none.
        stage: The stage that writes it; None if no stage does.
        table: Name of its table in the output of that stage.
        picture: The column of `mcis.platform.reporting.panels.COLUMNS` that shows it.
        until: The first stage at which a run can end and have these scores.
        is_made_from_tags: Whether it is made for the tags of each image, so that runs with other tags of the scored
            images cannot be compared.
        variants: Its scores that are shown, compared and searched for.
    """

    title: str
    page_title: str
    color: int | None = None
    stage: str | None = None
    table: str = ""
    picture: str = ""
    until: str = "evaluate"
    is_made_from_tags: bool = False
    variants: tuple[Variant, ...] = ()


SCORED_OUTPUTS: dict[str, ScoredOutput] = {
    "localization_maps": ScoredOutput(
        title="localization maps",
        page_title="Localization maps",
        color=0,
        stage="localize",
        table="maps",
        picture="localization map",
        until="localize",
        is_made_from_tags=True,
        variants=(Variant("maps", "localization maps", "maps", "localization maps", "maps"),),
    ),
    "pseudo_masks": ScoredOutput(
        title="pseudo masks",
        page_title="Pseudo masks",
        color=2,
        stage="pseudo_masks",
        table="masks",
        picture="pseudo mask",
        until="pseudo_masks",
        is_made_from_tags=True,
        variants=(Variant("masks", "pseudo masks", "masks", "pseudo masks", "masks"),),
    ),
    "segmentation": ScoredOutput(
        title="segmentation",
        page_title="Segmentation",
        color=1,
        stage="predict",
        table="predictions",
        picture="prediction",
        variants=(
            Variant("segmentation", "segmentation", "segm.", "segmentation, no CRF", "segmentation", False),
            Variant("with CRF", "segmentation + CRF", "+CRF", "segmentation, CRF", "segmentation-crf", True),
        ),
    ),
    "baseline": ScoredOutput(title="baseline", page_title="Baselines, without a classifier"),
}
"""The scored outputs by the value of `Score.output`, in the order of the pipeline."""
VARIANTS = tuple(itertools.chain.from_iterable(scored_output.variants for scored_output in SCORED_OUTPUTS.values()))
"""The scores of a run that are shown, compared and searched for, in the order of the pipeline."""
MEASURES = {"miou": "mIoU", "boundary_miou": "boundary mIoU"}
"""Headings of the measures of label masks, by name. Further measures are the means of `LABEL_SCORES`, `mean_<name>`."""


def measure_heading(name: str) -> str:
    """Heading of a measure, for example `mean precision` of `mean_precision`."""
    return MEASURES.get(name, name.replace("_", " "))


def measure_names(scores: Iterable["Score"]) -> list[str]:
    """Names of the measures that any of the scores has; names in `MEASURES` come first."""
    used: dict[str, None] = {}
    for score in scores:
        used |= dict.fromkeys(score.measures())
    further = [name for name in used if name not in MEASURES]
    return [name for name in MEASURES if name in used] + further


def metric_name(text: str) -> str:
    """Makes a name of an MLflow metric: characters that MLflow does not allow are left out."""
    allowed = [letter for letter in text if letter.isalnum() or letter in "_-. :/"]
    return "".join(allowed).replace("  ", " ")


def format_count(number: int) -> str:
    """Formats a number with thin spaces between thousands, for example 10 582."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def percent(value: float) -> str:
    """Formats a share in [0, 1] in percent, for example 12.3 %."""
    return f"{100 * value:.1f}\N{NARROW NO-BREAK SPACE}%"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _joined(scales: Sequence[float]) -> str:
    return ", ".join(f"{scale:g}" for scale in scales)


def _heading(heading: str, text: Callable[[Any], str] = str, *, is_origin: bool = False) -> dict[str, Any]:
    """Metadata of a field of `Score`.

    Args:
        heading: Heading of the field in tables.
        text: Formats the value.
        is_origin: Whether the field tells which configuration and code the score comes from, rather than how the
            scored output was made.
    """
    return {"heading": heading, "text": text, "origin": is_origin}


def _check_scored_output(output: str) -> str:
    if output not in SCORED_OUTPUTS:
        text = f"Input should be one of {', '.join(SCORED_OUTPUTS)}"
        raise PydanticCustomError("unknown_output", "{text}", {"text": text})
    return output


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean IoU and the settings that it depends on. Settings that do not apply are None.

    Attributes:
        output: The scored output, a key of `SCORED_OUTPUTS`.
        name: Which of its scores, such as "single round" or "with CRF".
        split: The split whose images were scored.
        images: Number of scored images.
        miou: Mean IoU in percent over the labels that occur in truth or prediction; NaN if no pixel was scored.
        iou: IoU in percent by the name of the label, background first; None if the label occurs in neither.
        label_scores: Percent or None by label name, for each name in `metrics.LABEL_SCORES`.
        boundary_miou: Like `miou`, over boundary regions (`metrics.boundary_iou`); None for localization maps, which
            have no contours before a threshold is chosen.
        boundary_iou: Like `iou`, over boundary regions; None for localization maps.
        confusion: Confusion matrix in pixels, a row per true label and a column per predicted label, background first.
            Everything above except for boundary IoU follows from it.
        threshold: Background threshold of localization maps, in [0, 1].
        held_out_miou: mIoU in percent of localization maps if each half of the images is scored at the best threshold
            for the other half.
        background_cue: What separates background from foreground.
        map_scale: How activations were scaled to [0, 1] (`maps.scale`); `given` for maps of another program.
        related: Number of related images per map.
        method: Description of how maps were made from related images or refined, or that an output is imported.
        scales: Scales at which images were segmented.
        hflip: Whether images were also segmented flipped horizontally.
        crf: Whether the dense CRF refined the segmentation.
        ignored_share: Mean share, in [0, 1], of a pseudo mask's pixels that training ignores. They are scored.
        trained_on: What the segmentation network was trained on if not on pseudo masks that come from tags alone:
            `ground truth`, or pseudo masks of another program or with saliency maps, regions or corrected masks.
        seed: Seed of the configuration.
        recipe: Recipe of the configuration; empty for an output of another program.
        weights: File or source of the weights that training started from; empty for an output of another program.
        git: Commit of the code; None outside a checkout.
        code: Digest of the code (`version.code_digest`).
    """

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    output: Annotated[str, pydantic.AfterValidator(_check_scored_output)]
    name: str
    split: str
    images: int
    miou: float
    iou: dict[str, float | None]
    label_scores: dict[str, dict[str, float | None]]
    boundary_miou: float | None = None
    boundary_iou: dict[str, float | None] | None = None
    confusion: tuple[tuple[int, ...], ...]
    threshold: float | None = field(default=None, metadata=_heading("threshold", "{:.3g}".format))
    held_out_miou: float | None = field(
        default=None, metadata=_heading("mIoU at the threshold of other images", "{:.2f}".format)
    )
    background_cue: str | None = field(default=None, metadata=_heading("background cue"))
    map_scale: str | None = field(default=None, metadata=_heading("map scale"))
    related: int | None = field(default=None, metadata=_heading("related images", format_count))
    method: str | None = field(default=None, metadata=_heading("method"))
    scales: tuple[float, ...] | None = field(default=None, metadata=_heading("scales", _joined))
    hflip: bool | None = field(default=None, metadata=_heading("horizontal flip", _yes_or_no))
    crf: bool | None = field(default=None, metadata=_heading("CRF", _yes_or_no))
    ignored_share: float | None = field(default=None, metadata=_heading("ignored share", percent))
    trained_on: str | None = field(default=None, metadata=_heading("trained on"))
    seed: int = field(metadata=_heading("seed", is_origin=True))
    recipe: str = field(metadata=_heading("recipe", is_origin=True))
    weights: str = field(metadata=_heading("weights", is_origin=True))
    git: str | None = field(metadata=_heading("git", is_origin=True))
    code: str | None = field(default=None, metadata=_heading("code", is_origin=True))

    @property
    def title(self) -> str:
        """Name of what is scored, for example `localization maps`."""
        return SCORED_OUTPUTS[self.output].title

    @property
    def variant(self) -> Variant | None:
        """The entry of `VARIANTS` for this score; None for a baseline."""
        for variant in SCORED_OUTPUTS[self.output].variants:
            if variant.crf is None or variant.crf == bool(self.crf):
                return variant
        return None

    def metrics(self) -> dict[str, float]:
        """Measures by the name of their MLflow metric."""
        prefix = metric_name(f"{self.output}.{self.name}")
        return {f"{prefix}.{name}": value for name, value in self.measures().items()}

    def measures(self) -> dict[str, float]:
        """The measures that this score has, in percent by name: `MEASURES`, then the means of `LABEL_SCORES`."""
        values = {"miou": self.miou}
        if self.boundary_miou is not None:
            values["boundary_miou"] = self.boundary_miou

        for name, by_label in self.label_scores.items():
            present = [value for value in by_label.values() if value is not None]
            if present:
                values[f"mean_{name}"] = round(fmean(present), 2)
        return values

    def output_settings(self) -> dict[str, str]:
        """The settings that say how the scored output was made, as heading -> text, if they apply."""
        return self._texts(is_origin=False)

    def settings(self) -> dict[str, str]:
        """All settings that apply, as heading -> text: split, number of images, how the output was made, origin."""
        images = {"split": self.split, "images": format_count(self.images)}
        return images | self.output_settings() | self._texts(is_origin=True)

    def _texts(self, *, is_origin: bool) -> dict[str, str]:
        texts = {}
        for setting in _SETTINGS:
            value = getattr(self, setting.name)
            if setting.metadata["origin"] is is_origin and value not in (None, ""):
                texts[setting.metadata["heading"]] = setting.metadata["text"](value)
        return texts


_SETTINGS: tuple[Field[Any], ...] = tuple(setting for setting in fields(Score) if setting.metadata)
ORIGIN = tuple(setting.metadata["heading"] for setting in _SETTINGS if setting.metadata["origin"])
"""Headings of the settings that state which configuration and code a score comes from."""
HEADINGS = ("split", "images", *(setting.metadata["heading"] for setting in _SETTINGS))
"""Headings of all settings of a score, in the order in which tables show them."""


def read_scores(outputs: Mapping[str, Path]) -> list[Score]:
    """Reads the scores of a run; returns none if it has not finished the stage `evaluate`.

    Args:
        outputs: Folders of finished stages, by stage.

    Raises:
        UserError: The file is damaged or was written by another version.
    """
    if "evaluate" not in outputs:
        return []

    expected = "scores as this version of mcis writes them"
    remedy = f"compute the scores again: {recompute_command('evaluate')}"
    return read_record_of(outputs["evaluate"] / SCORES, list[Score], expected, remedy)


def headings_of(all_settings: Iterable[Mapping[str, str]], *, without: Collection[str] = ()) -> list[str]:
    """Headings that occur in the settings of any score, in the order of `HEADINGS`.

    Args:
        all_settings: Results of `Score.settings`, one per score.
        without: Headings to leave out.
    """
    used = set(itertools.chain.from_iterable(all_settings))
    return [heading for heading in HEADINGS if heading in used and heading not in without]


def shared_origin(all_settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The settings of `ORIGIN` that are the same for all scores, as heading -> text."""
    if not all_settings:
        return {}

    shared = {}
    for heading in ORIGIN:
        texts = {settings.get(heading) for settings in all_settings}
        if heading in all_settings[0] and len(texts) == 1:
            shared[heading] = all_settings[0][heading]
    return shared


class Curve(NamedTuple):
    """mIoU in percent over background thresholds in [0, 1]."""

    thresholds: list[float]
    mious: list[float]
