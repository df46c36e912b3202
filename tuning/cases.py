"""The cases of the paper's ablations: what is trained, how maps are inferred, and what each is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcis.platform import pipeline
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import sources_of

TRAININGS = ("none", "co", "co+contrastive")
PAPER_RELATED_IMAGES: Mapping[int, float] = {0: 64.7, 1: 65.9, 2: 66.0, 3: 66.2, 4: 66.1, 5: 66.0}
"""mIoU of the segmentation network on VOC 2012 val, ResNet-101, VOC only, by related images (table 7, section 4.5)."""
PAPER_EFFECT: Mapping[str, float] = {
    "none-single": 61.7,
    "co-r3": 65.5,
    "co-contrastive-single": 64.7,
    "co-contrastive-r3": 66.2,
}
"""The same, by case (tables 5 and 6)."""
_CO_ATTENTION: Values = {"localize.method.name": "co_attention", "localize.related_by": "class"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of a study.

    Attributes:
        name: in the names of its trials and metrics.
        group: of the cases that stand together, such as those of one training.
        setting: the data setting.
        inference: how maps are made, in words.
        related: number of related images R.
        values: what makes the case, by dotted key, beside what all cases of the study share.
        until: its last stage.
        paper: mIoU in percent of the segmentation network in the paper's tables.
    """

    name: str
    group: str
    setting: str
    inference: str
    related: int
    values: Values
    until: str
    paper: float | None = None


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A case and the one that it is compared with, by name, and what their difference shows."""

    case: str
    control: str
    shows: str


def trial_values(resolved: Resolved, values: Values, setting: str | None = None) -> Values:
    """What a trial changes of its recipe: what the user changed, and `values` of its case.

    Where these take another method of localization, the values of the user's own have no place; where its setting
    leaves out sources of the user's, nor have theirs.
    """
    method = resolved.config.localize.method.name
    another = values.get("localize.method.name", method) != method
    without = set(sources_of(resolved.config.setting)) - set(sources_of(setting or resolved.config.setting))
    left_out = tuple(f"data.{source}" for source in without) + (("localize.method.",) if another else ())
    return {key: value for key, value in resolved.changed().items() if not key.startswith(left_out)} | values


def configured(resolved: Resolved, values: Values, setting: str | None = None) -> Config:
    """The configuration of a trial; UserError where values contradict each other."""
    setting = setting or resolved.config.setting
    return resolve(setting, resolved.config.recipe, trial_values(resolved, values, setting)).config


def reference_cases(resolved: Resolved, until: str) -> list[Case]:
    """Related images R = 0..5 over one training (table 7), whose maps are made of features that are kept meanwhile.

    A single round has no related image to contrast with, whatever is asked for.
    """
    cases, training = [], resolved.config.classifier.attention
    for related, paper in PAPER_RELATED_IMAGES.items():
        values: Values = {"localize.keep_features": True, "localize.related": related}
        if related == 0:
            values["localize.method.contrastive"] = False
        cases.append(case_of(resolved, name=f"r{related}", group=training, values=values, until=until, paper=paper))
    return cases


def reference_differences(cases: Sequence[Case]) -> list[Contrast]:
    """Each number of related images beside a single round."""
    single, *others = cases
    shows = "related image(s), against a single round"
    return [Contrast(case=case.name, control=single.name, shows=f"{case.related} {shows}") for case in others]


def effect_cases(resolved: Resolved, trainings: Sequence[str], related: Sequence[int], until: str) -> list[Case]:
    """The paper's cases (tables 5 and 6) and their controls, training by training.

    Those of the paper's tables, and the control of all related images, go on to `until`; the others end at the pseudo
    masks at the latest.

    Args:
        trainings: values of `classifier.attention`.
        related: numbers R of related images, of which controls have the largest.

    Raises:
        UserError: the configuration contradicts a case.
    """
    whole = {*PAPER_EFFECT, f"none-identity-r{max(related)}", f"none-nearest-r{max(related)}"}
    short = min(until, "pseudo_masks", key=pipeline.STAGE_NAMES.index)
    cases = []
    for training in trainings:
        for variant, own in _variants(training, sorted(set(related)), resolved.config).items():
            name = f"{training.replace('+', '-')}-{variant}"
            values = {"classifier.attention": training, **_CO_ATTENTION, **own}
            last, paper = until if name in whole else short, PAPER_EFFECT.get(name)
            cases.append(case_of(resolved, name=name, group=training, values=values, until=last, paper=paper))
    return cases


def effect_differences(cases: Sequence[Case], related: Sequence[int]) -> list[Contrast]:
    """What cases with the most related images are compared with, as far as both are among the cases."""
    r = max(related)
    differences = [Contrast(case=f"none-identity-r{r}", control="none-single", shows="related images, W_P = I")]
    for training in ("none", "co", "co-contrastive"):
        differences += [
            Contrast(case=f"{training}-{case}", control=control, shows=shows)
            for case, control, shows in (
                (f"nearest-r{r}", f"{training}-single", "nearest images, against a single round"),
                (f"nearest-r{r}", f"{training}-r{r}", "nearest rather than random images"),
                (f"nearest-r{r}", f"none-nearest-r{r}", "training, with nearest images"),
                (f"r{r}", f"none-r{r}", "training, with related images"),
                ("single", "none-single", "training, without related images"),
                ("single", f"{training}-alone-single", "that training attends to other images"),
                (f"nearest-r{r}", f"{training}-alone-nearest-r{r}", "the same, with nearest images"),
                (f"r{r}", f"{training}-alone-r{r}", "the same, with related images"),
                (f"r{r}", f"none-identity-r{r}", "training, with related images"),
                (f"r{r}", f"{training}-single", "related images, against a single round"),
                (f"r{r}", f"{training}-itself", "other images than its own"),
                (f"r{r}", f"{training}-wrong-class-r{r}", "that they share the class"),
                (f"r{r}", f"{training}-identity-r{r}", "W_P as it was trained"),
            )
        ]
    differences.append(Contrast(case=f"co-contrastive-r{r}", control=f"co-r{r}", shows="the contrastive term"))
    names = {case.name for case in cases}
    return [of for of in differences if of.case != of.control and {of.case, of.control} <= names]


def _variants(training: str, related: Sequence[int], config: Config) -> dict[str, Values]:
    """By name the ways to infer maps with a training, controls of the largest R behind what they control.

    Args:
        related: numbers R, rising.
        config: of the study, whose recipe may have an affinity or related images of its own.
    """
    most, untrained = related[-1], config.classifier.affinity.w_p == "identity"
    nearest = config.localize.related_by == "nearest"
    variants: dict[str, Values] = {"single": {"localize.related": 0}}
    if training != "none" or untrained:
        variants |= {f"r{r}": {"localize.related": r} for r in related}
        if nearest:
            variants |= {f"nearest-r{r}": {"localize.related_by": "nearest", "localize.related": r} for r in related}
        variants["itself"] = {"localize.related_by": "itself", "localize.related": 1}
        variants[f"wrong-class-r{most}"] = {"localize.related_by": "wrong_class", "localize.related": most}
    if not untrained:
        variants[f"identity-r{most}"] = {"localize.method.affinity": "identity", "localize.related": most}
    if training != "none":  # controls of training: images that attended to themselves alone
        for name in ("single", f"nearest-r{most}" if nearest else f"r{most}"):
            variants[f"alone-{name}"] = {**variants[name], "classifier.attended": "itself"}
    return variants


def case_of(
    resolved: Resolved,
    *,
    name: str,
    group: str,
    values: Values,
    until: str,
    paper: float | None,
    setting: str | None = None,
) -> Case:
    """A case, with how its maps are made and the number of its related images; UserError as `configured`."""
    config = configured(resolved, values, setting)
    inference = config.localize.description() if config.localize.related else "single round"
    return Case(
        name=name,
        group=group,
        setting=config.setting,
        inference=inference + (", trained alone" if config.classifier.attended == "itself" else ""),
        related=config.localize.related,
        values=values,
        until=until,
        paper=paper,
    )
