"""The demo: draws the embedded data set into the workspace and configures the ordinary pipeline for it."""

from collections.abc import Sequence
from pathlib import Path

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.keys import explicit
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.platform.config.training import AffinityNetConfig, ClassifierConfig, SegmenterConfig
from mcis.platform.runs.files import disk_errors
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace

# The embedded images are small and few: smaller inputs, more passes and fewer updates than for photographs.
SIZES = Config(
    classifier=ClassifierConfig(input_size=256, epochs=16, attention_epochs=4),
    affinity_net=AffinityNetConfig(crop=160),
    segmenter=SegmenterConfig(crop=160, steps=200),
)
SALIENCY = "Saliency maps are painted from the ground truth here: pseudo masks and segmentation owe much to them."


def demo_configuration(workspace: Path, assignments: Sequence[str] = ()) -> Resolved:
    """Recipe `photos` on the embedded data, which is drawn where it does not exist yet: tags, no saliency maps."""
    root = Workspace(workspace).data / "synthetic" / "VOC2012"
    if not root.exists():
        console.print("drawing the embedded data set")
        with disk_errors(root.parent):
            synthetic.draw(root)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), **explicit(SIZES)}
    return resolve("voc", "photos", options, assignments)
