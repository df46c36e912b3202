"""Configuration of the images: where they and their tags, masks and saliency maps are, and the pretrained weights."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.section import LocalPath, Positive, Section, WeightsFile, with_records
from mcis.datasets.sources import SOURCES


def _split_range(value: Any) -> Any:
    """Splits a text such as `0,4095` of the command line."""
    return value.split(",") if isinstance(value, str) else value


@with_records(SOURCES)
class DataConfig(Section):
    """Locations and limits of images, tags, masks and saliency maps."""

    voc: LocalPath | None = None
    """Folder of a VOC 2012 devkit: JPEGImages, ImageSets/Segmentation/<list>.txt and <list>_cls.txt."""
    sbd: LocalPath | None = None
    """Folder of SBD (benchmark_RELEASE), for masks and the list train_aug that the devkit lacks."""
    classes: LocalPath | None = None
    """File with one class name per line. None: the 20 classes of PASCAL VOC; for the source tags, all tags of its
    table."""
    train_list: str = "train_aug"
    """Name of VOC's list of training images. train_aug has 10,582 images (paper-vs-code, "Counts")."""
    val_list: str = "val"
    """Name of VOC's list of validation images, which are predicted and scored."""
    test_list: str | None = None
    """Name of VOC's list of test images, which have neither tags nor masks. None: no test split."""
    tags_from: Literal["auto", "lists", "xml"] = "auto"
    """Source of VOC's tags: `lists` = <list>_cls.txt; `xml` = the XML annotations without objects marked difficult;
    `auto` = lists if they exist, else xml (paper-vs-code, "Tags")."""
    saliency: str | None = "SaliencyMaps"
    """Folder of class-agnostic saliency maps <id>.png, relative to the devkit or absolute; it may be missing. None: no
    maps. `mcis saliency` makes them."""
    truth_masks: str = "SegmentationClassAug"
    """Folder of ground-truth masks <id>.png, relative to the devkit or absolute; it may be missing. They are used only
    for scoring, unless `supervision` is full."""
    corrected_masks: LocalPath | None = Field(default=None, exclude=True)  # the index does not depend on it
    """Folder of masks of some training images, drawn or corrected by people: <id>.png as written by `mcis export
    masks`, or <image file>.png. The affinity network and the segmentation network train on them instead of the pseudo
    masks of these images, which are then not scored."""
    untagged: Literal["unlabelled", "negative"] = "unlabelled"
    """Meaning of an empty cell of tags in a table (source tags). `unlabelled`: the tags are unknown, and the image is
    not trained on. `negative`: the image shows none of the classes, and is trained on as background. A tag `none` or
    `background`, an empty list, and zeros in all columns of classes mean negative in any case."""
    max_rejected: int | None = Field(default=None, ge=0)
    """Maximum number of rejected images, which are unreadable, too small or too large. With more, the run stops before
    training. None: 0 for VOC, unlimited for other sources."""
    leave_out: LocalPath | None = Field(default=None, exclude=True)  # the listing depends on its content
    """File with one image id per line, as `mcis suggest --tags` writes it. Training images with these ids are left out.
    None: all images."""
    keep_copies: bool = False
    """Keep training images that are exact copies, byte for byte, of other training images or of val images. By default
    one image of each content is trained on, and none that is a val image, because scores on it would be too high."""
    min_side: Positive = 32
    """Images with a shorter side, in pixels, are rejected."""
    max_pixels: int = Field(default=50_000_000, gt=0, le=178_956_970)
    """Images with a larger width x height are rejected before decoding, which takes up to 20 bytes per pixel in each
    process. The upper bound is Pillow's."""
    max_side: int | None = Field(default=None, gt=0, exclude=True)  # the index holds the sizes of the files
    """Longest side, in pixels, at which images are read for pseudo masks, for the crops that train the affinity network
    and the segmentation network, and for predictions. Larger images are downscaled; predicted labels are scaled back to
    the size of the file. The classifier uses `classifier.input_size` instead. None: full size."""

    value_range: Annotated[ValueRange, BeforeValidator(_split_range)] | None = None
    """Values that become black and white in gray images of more than 8 bits, such as 0,4095 for 12 bits, or 0,1 for
    floating point. Values outside are cut off. Images of 8 bits and in color are not affected. None: 0,65535 for
    integers; floating-point images are rejected."""

    def problems(self) -> Iterator[str]:
        """Yields the contradictions of the section."""
        yield from super().problems()
        if self.value_range is not None and self.value_range[0] >= self.value_range[1]:
            black, white = self.value_range
            yield f"data.value_range is {black:g},{white:g}, but white must be larger than black"


class WeightsConfig(Section):
    """Pretrained weights.

    Backbone weights are `none` (train from scratch), `download` (weights of torchvision or timm, which the workspace
    keeps), `bundled` (weights of timm/tf_efficientnet_lite0, lite1 or lite2, which are installed with mcis), or the
    path or URI of a state_dict file; for resnet38 also of MXNet's file `.params` that PSA names.
    """

    classifier_backbone: WeightsFile = "none"
    """Initial weights of the classifier's backbone: `none` = random; `download` = those of torchvision or timm;
    `bundled` = those installed with mcis; or a state_dict file. Also the default of the other two backbones."""
    classifier: WeightsFile | None = None
    """File of a trained classifier, from `mcis import-weights` or from the stage train_classifier of an earlier run. It
    is used instead of training one, and classifier_backbone then does not apply to the classifier. None: train one."""
    segmenter_backbone: WeightsFile | None = None
    """Initial weights of the segmentation network's backbone, with the same choices as classifier_backbone; not used
    with `segmenter.init=classifier`. None: the value of classifier_backbone; a file then has to fit both backbones."""
    affinity_net_backbone: WeightsFile | None = None
    """Initial weights of the affinity network's backbone, with the same choices as classifier_backbone. None: the
    value of classifier_backbone; a file then has to fit both backbones."""

    def origin(self, network: str) -> str:
        """Returns the value that applies to the backbone of `segmenter` or `affinity_net`."""
        origin: str = getattr(self, f"{network}_backbone") or self.classifier_backbone
        return origin
