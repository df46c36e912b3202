"""The study of the data settings (tables 1a to 1c), whose cases depend on the configuration."""

from mcis.platform.config.sections import sources_of
from mcis.tuning.definition import CaseDefinition, Definition

_PAPER_SETTINGS = {
    ("voc", "VGG-16"): 63.5,
    ("voc", "ResNet-101"): 66.2,
    ("voc+single", "VGG-16"): 64.6,
    ("voc+single", "ResNet-101"): 67.1,
    ("voc+web", "VGG-16"): 65.0,
    ("voc+web", "ResNet-101"): 67.7,
}
"""mIoU in percent on VOC 2012 val by sources and backbone of the segmentation network (tables 1a to 1c)."""


def sources_definition(sources: str, backbone: str) -> Definition:
    """The data settings (tables 1a to 1c): the first source alone, with each of the others, with all; the
    paper's figures of that backbone of the segmentation network."""
    first, *others = sources_of(sources)
    settings = [first, *(f"{first}+{other}" for other in others), *([sources] if len(others) > 1 else [])]
    network = "VGG-16" if backbone == "vgg16_largefov" else "ResNet-101"
    cases = [
        CaseDefinition(
            name=each.replace("+", "-"),
            sources=each,
            paper=_PAPER_SETTINGS.get((each, network)),
            against=None if each == first else first,
            shows="" if each == first else f"the images of {each.removeprefix(f'{first}+')}",
        )
        for each in settings
    ]
    return Definition(about="What further sources of images bring (tables 1a to 1c)", case=tuple(cases))
