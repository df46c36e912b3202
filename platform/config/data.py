"""Sections of the images: where they are, what lies beside them, and which pretrained weights embed them."""

from typing import Literal

from pydantic import Field

from mcis.datasets.section import LocalPath, Positive, Section, WeightsFile, with_records
from mcis.datasets.sources import SOURCES


@with_records(SOURCES)
class DataConfig(Section):
    """Where the images and tags are."""

    voc: LocalPath | None = None
    """Folder of a VOC 2012 devkit: JPEGImages, ImageSets/Segmentation/<list>.txt and <list>_cls.txt."""
    sbd: LocalPath | None = None
    """Folder of SBD (benchmark_RELEASE) for masks and the list train_aug, where the devkit is without them."""
    classes: LocalPath | None = None
    """File with one class name per line; None = PASCAL VOC's 20, or the names found in data.tags.table."""
    train_list: str = "train_aug"
    """Name of the list of training images (10,582 images; RELEASED_RECIPE, "Counts")."""
    val_list: str = "val"
    """Name of the list of images that are predicted and scored."""
    test_list: str | None = None
    """Name of a list of images without masks, or None."""
    tags_from: Literal["auto", "lists", "xml"] = "auto"
    """Where VOC's tags come from: <list>_cls.txt, or the XML annotations, but for objects marked difficult;
    auto = lists, else XML (RELEASED_RECIPE, "Tags")."""
    saliency: str = "SaliencyMaps"
    """Folder of class-agnostic saliency maps <id>.png, inside the devkit or absolute; it may be absent."""
    truth_masks: str = "SegmentationClassAug"
    """Folder of ground-truth masks <id>.png, inside the devkit or absolute; for scoring alone, and it may be absent."""
    corrected_masks: LocalPath | None = Field(default=None, exclude=True)  # the index does not depend on it
    """Folder of true masks of some training images, drawn or corrected by people: <id>.png, as `mcis export masks`
    names them, or <image file>.png. Affinities and segmentation network learn from them in place of these images'
    pseudo masks; the images are not scored."""
    max_rejected: int | None = Field(default=None, ge=0)
    """How many unreadable images a run goes on without; more end it before any training. None = none of VOC's, which
    are curated, and any number of other sources'."""
    min_side: Positive = 32
    """Images with a shorter side are rejected, pixels."""
    max_pixels: int = Field(default=50_000_000, gt=0, le=178_956_970)
    """Images of a larger width x height are rejected before they are decoded, which takes each process up to 20 bytes a
    pixel. The most is Pillow's own limit."""
    max_side: int | None = Field(default=None, gt=0, exclude=True)  # the index holds sizes of files
    """Longest side, pixels, at which images are read where they keep their shape: for pseudo masks, which then have
    that size, for the segmenter's crops and for predictions, whose labels are brought back to the file's size. What the
    classifier sees has a size of its own (`classifier.input_size`). None = each image at its own size."""


class WeightsConfig(Section):
    """Pretrained weights."""

    classifier_backbone: WeightsFile = "none"
    """The classifier's: `none` = from scratch; `download` = torchvision's or timm's weights; `bundled` = those of
    timm/tf_efficientnet_lite0, lite1 or lite2, which are installed with mcis; else a state_dict file."""
    classifier: WeightsFile | None = None
    """A trained classifier, as `mcis import-weights` or an earlier run wrote it, which is not trained again."""
    segmenter_backbone: WeightsFile | None = None
    """The segmenter's, likewise; None = as `classifier_backbone`, for a word, and for a file that fits both."""
    affinity_net_backbone: WeightsFile | None = None
    """The affinity network's, likewise."""

    def origin(self, network: str) -> str:
        """Where the pretrained weights of the `segmenter` or the `affinity_net` come from."""
        origin: str = getattr(self, f"{network}_backbone") or self.classifier_backbone
        return origin
