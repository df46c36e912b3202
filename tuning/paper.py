"""The study of the image sources (tables 1a to 1c), whose cases depend on the configuration."""

from mcis.platform.config.sections import sources_of
from mcis.tuning.definition import CaseDefinition, StudyDefinition

_PAPER_RESULTS = {
    ("voc", "VGG-16"): 63.5,
    ("voc", "ResNet-101"): 66.2,
    ("voc+single", "VGG-16"): 64.6,
    ("voc+single", "ResNet-101"): 67.1,
    ("voc+web", "VGG-16"): 65.0,
    ("voc+web", "ResNet-101"): 67.7,
}
"""mIoU in percent on VOC 2012 val, by sources and backbone of the segmentation network (tables 1a to 1c)."""


def sources_definition(sources: str, backbone: str) -> StudyDefinition:
    """Defines the study of the image sources: the first source alone, with each other source, and with all of them.

    Args:
        sources: image sources of the study.
        backbone: backbone of the segmentation network, which selects the paper's results.
    """
    first, *others = sources_of(sources)
    combinations = [first]
    combinations += [f"{first}+{other}" for other in others]
    if len(others) > 1:
        combinations.append(sources)

    network = "VGG-16" if backbone == "vgg16_largefov" else "ResNet-101"
    cases = []
    for combination in combinations:
        is_first = combination == first
        case = CaseDefinition(
            name=combination.replace("+", "-"),
            sources=combination,
            paper=_PAPER_RESULTS.get((combination, network)),
            against=None if is_first else first,
            shows="" if is_first else f"the images of {combination.removeprefix(f'{first}+')}",
        )
        cases.append(case)
    return StudyDefinition(about="What additional image sources add (tables 1a to 1c)", case=tuple(cases))
