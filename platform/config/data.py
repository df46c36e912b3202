"""Configuration of the images: where they and their tags, masks and saliency maps are, and the pretrained weights."""

from typing import Literal

from pydantic import Field

from mcis.datasets.section import LocalPath, Positive, Section, WeightsFile, with_records
from mcis.datasets.sources import SOURCES


@with_records(SOURCES)
class DataConfig(Section):
    """Locations and limits of images, tags, masks and saliency maps."""

    voc: LocalPath | None = None
    """Folder of a VOC 2012 devkit: JPEGImages, ImageSets/Segmentation/<list>.txt and <list>_cls.txt."""
    sbd: LocalPath | None = None
    """Folder of SBD (benchmark_RELEASE), for masks and the list train_aug that the devkit lacks."""
    classes: LocalPath | None = None
    """File with one class name per line; None = the 20 classes of PASCAL VOC, or those found in data.tags.table."""
    train_list: str = "train_aug"
    """Name of the list of training images (10,582 images; paper-vs-code, "Counts")."""
    val_list: str = "val"
    """Name of the list of validation images, which are predicted and scored."""
    test_list: str | None = None
    """Name of a list of images without masks, or None."""
    tags_from: Literal["auto", "lists", "xml"] = "auto"
    """Source of VOC's tags: `lists` = <list>_cls.txt; `xml` = the XML annotations without objects marked difficult;
    `auto` = lists if they exist, else xml (paper-vs-code, "Tags")."""
    saliency: str = "SaliencyMaps"
    """Folder of class-agnostic saliency maps <id>.png, relative to the devkit or absolute; it may be missing."""
    truth_masks: str = "SegmentationClassAug"
    """Folder of ground-truth masks <id>.png, relative to the devkit or absolute, used only for scoring; it may be
    missing."""
    corrected_masks: LocalPath | None = Field(default=None, exclude=True)  # the index does not depend on it
    """Folder of masks of some training images, drawn or corrected by people: <id>.png as written by `mcis export
    masks`, or <image file>.png. The affinity network and the segmentation network train on them instead of the pseudo
    masks of these images, which are then not scored."""
    max_rejected: int | None = Field(default=None, ge=0)
    """Maximum number of unreadable images; with more, the run stops before training. None = 0 for VOC, unlimited for
    other sources."""
    min_side: Positive = 32
    """Images with a shorter side, in pixels, are rejected."""
    max_pixels: int = Field(default=50_000_000, gt=0, le=178_956_970)
    """Images with a larger width x height are rejected before decoding, which takes up to 20 bytes per pixel in each
    process. The upper bound is Pillow's."""
    max_side: int | None = Field(default=None, gt=0, exclude=True)  # the index holds the sizes of the files
    """Longest side, in pixels, to which images are downscaled when their aspect ratio is kept: for pseudo masks, crops
    of the segmentation network, and predictions (whose labels are scaled back to the size of the file). The classifier
    uses `classifier.input_size` instead. None = full size."""


class WeightsConfig(Section):
    """Pretrained weights.

    Backbone weights are `none` (train from scratch), `download` (weights of torchvision or timm), `bundled` (weights of
    timm/tf_efficientnet_lite0, lite1 or lite2, which are installed with mcis), or a state_dict file.
    """

    classifier_backbone: WeightsFile = "none"
    """Weights of the classifier's backbone: none, download, bundled, or a state_dict file."""
    classifier: WeightsFile | None = None
    """A trained classifier, written by `mcis import-weights` or an earlier run; it replaces the classifier's
    training."""
    segmenter_backbone: WeightsFile | None = None
    """Weights of the segmentation network's backbone. None = the value of classifier_backbone; a file then has to fit
    both."""
    affinity_net_backbone: WeightsFile | None = None
    """Weights of the affinity network's backbone. None = the value of classifier_backbone."""

    def origin(self, network: str) -> str:
        """Value that applies to the backbone of the `segmenter` or the `affinity_net`."""
        origin: str = getattr(self, f"{network}_backbone") or self.classifier_backbone
        return origin
