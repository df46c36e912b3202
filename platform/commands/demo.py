"""The demo: draws the embedded data set into the workspace and configures the ordinary pipeline for it."""

from collections.abc import Sequence
from pathlib import Path

from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.keys import explicit
from mcis.platform.config.maps import PseudoMasksConfig
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig, SegmenterConfig
from mcis.platform.runs.progress import console
from mcis.platform.runs.workspace import Workspace, disk_errors

# The embedded images are few and small: more passes, smaller crops, fewer updates than recipe `small` has by itself. So
# many passes make the classifier surer, and masks without saliency want higher thresholds (chosen on these images).
SIZES = Config(
    classifier=ClassifierConfig(epochs=30),
    pseudo_masks=PseudoMasksConfig(threshold=0.78, background_threshold=0.66),
    segmenter=SegmenterConfig(crop=96, steps=750),
)
SALIENCY = (
    "The embedded saliency maps are painted from the ground truth, and pseudo masks and segmentation owe much to them; "
    "mcis demo --name without --set pseudo_masks.background=crf does without."
)


def demo_configuration(workspace: Path, assignments: Sequence[str] = ()) -> Resolved:
    """Recipe `small` on the embedded data, which is drawn where it does not exist yet."""
    root = Workspace(workspace).data / "synthetic" / "VOC2012"
    if not root.exists():
        console.print("drawing the embedded data set")
        with disk_errors(root.parent):
            synthetic.draw(root)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt"), **explicit(SIZES)}
    return resolve("voc", "small", options, assignments)
