"""The studies of the paper that depend on the configuration: `effect` (tables 5 and 6) and `settings` (1 to 3)."""

from collections.abc import Mapping, Sequence

from mcis.datasets.errors import UserError
from mcis.platform import pipeline
from mcis.platform.config.keys import Values
from mcis.platform.config.sections import Config, sources_of
from mcis.tuning.definition import CaseDefinition, Contrast, Definition

TRAININGS = ("none", "co", "co+contrastive")
PAPER_EFFECT: Mapping[str, float] = {
    "none-single": 61.7,
    "co-r3": 65.5,
    "co-contrastive-single": 64.7,
    "co-contrastive-r3": 66.2,
}
"""mIoU of the segmentation network on VOC 2012 val, ResNet-101, VOC only, by case (tables 5 and 6)."""
_PAPER_SETTINGS = {
    ("voc", "VGG-16"): 63.5,
    ("voc", "ResNet-101"): 66.2,
    ("voc+single", "VGG-16"): 64.6,
    ("voc+single", "ResNet-101"): 67.1,
    ("voc+web", "VGG-16"): 65.0,
    ("voc+web", "ResNet-101"): 67.7,
}
"""mIoU in percent on VOC 2012 val by setting and backbone of the segmentation network (tables 1 to 3)."""
_CO_ATTENTION: Values = {"localize.method.name": "co_attention", "localize.related_by": "class"}


def effect_definition(
    config: Config, trainings: Sequence[str], related: Sequence[int], until: str
) -> tuple[Definition, list[Contrast]]:
    """What co-attention and related images bring: the paper's cases and their controls, training by training.

    Those of the paper's tables, and the control of all related images, go on to `until`; the others end at the pseudo
    masks at the latest.

    Args:
        config: of the study, whose recipe may have an affinity or related images of its own.
        trainings: values of `classifier.attention`.
        related: numbers R of related images, of which controls have the largest.

    Returns:
        The cases, and which of them are compared.

    Raises:
        UserError: an unknown training.
    """
    if unknown := sorted(set(trainings) - set(TRAININGS)):
        raise UserError(f"--training {', '.join(unknown)}", f"some of {', '.join(TRAININGS)}", "choose of them")
    whole = {*PAPER_EFFECT, f"none-identity-r{max(related)}", f"none-nearest-r{max(related)}"}
    goes_on = pipeline.STAGE_NAMES.index(until) > pipeline.STAGE_NAMES.index("pseudo_masks")
    cases = []
    for training in trainings:
        for variant, own in _variants(training, sorted(set(related)), config).items():
            name = f"{training.replace('+', '-')}-{variant}"
            values = {"classifier.attention": training, **_CO_ATTENTION, **own}
            last, paper = "pseudo_masks" if goes_on and name not in whole else None, PAPER_EFFECT.get(name)
            cases.append(CaseDefinition(name=name, group=training, set=values, until=last, paper=paper))
    definition = Definition(about="What co-attention and related images bring (tables 5 and 6)", case=tuple(cases))
    return definition, _contrasts({case.name for case in cases}, max(related))


def _contrasts(names: set[str], r: int) -> list[Contrast]:
    """What cases with the most related images, R, are compared with, as far as both are among the named cases."""
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
    return [of for of in differences if of.case != of.control and {of.case, of.control} <= names]


def _variants(training: str, related: Sequence[int], config: Config) -> dict[str, Values]:
    """By name the ways to infer maps with a training, controls of the largest R behind what they control; R rise."""
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


def settings_definition(setting: str, recipe: str) -> Definition:
    """The data settings (tables 1 to 3): the first source alone, with each of the others, and with all of them."""
    first, *others = sources_of(setting)
    settings = [first, *(f"{first}+{other}" for other in others), *([setting] if len(others) > 1 else [])]
    network = "VGG-16" if recipe.endswith("_vgg16") else "ResNet-101"
    cases = [
        CaseDefinition(
            name=each.replace("+", "-"),
            setting=each,
            paper=_PAPER_SETTINGS.get((each, network)),
            against=None if each == first else first,
            shows="" if each == first else f"the images of {each.removeprefix(f'{first}+')}",
        )
        for each in settings
    ]
    return Definition(about="What further sources of images bring (tables 1 to 3)", case=tuple(cases))
