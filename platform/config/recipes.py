"""Recipes: functions that return the values in which a configuration differs from the defaults of its sections.

A value that a recipe states counts as set, even where it is the default: `keys.explicit` reads which ones are stated.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

from mcis.models.crf import CrfParameters
from mcis.models.networks import Affinity
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.config.data import DataConfig, WeightsConfig
from mcis.platform.config.maps import (
    LocalizeConfig,
    MapsConfig,
    MethodConfig,
    PseudoMasksConfig,
    PseudoMasksCrf,
    WalkConfig,
)
from mcis.platform.config.sections import Config, PredictConfig
from mcis.platform.config.training import (
    AffinityNetConfig,
    ClassifierConfig,
    EquivariantConfig,
    Optimizer,
    SegmenterConfig,
    SegmenterOptimizer,
)


def paper() -> Config:
    """The paper's text (section 3.3): VGG-16 classifier, DeepLab-LargeFOV on ResNet-101.

    Every training image has to have a saliency map, and both networks are trained in float32
    (RELEASED_RECIPE, "Pseudo masks" and "Classifier").

    Command: `mcis run voc --voc DIR --name NAME --recipe paper`, with ImageNet weights, which are fetched, and a GPU.
    Hours: not measured by this project. Expected mIoU: the paper reports 66.2 on VOC 2012 val with VOC images only, and
    63.5 by DeepLab-LargeFOV on VGG-16, `--set segmenter.backbone=vgg16_largefov --set segmenter.dropout=0.5`.
    """
    return _published(
        "paper",
        classifier=ClassifierConfig(
            optimizer=Optimizer(step_epochs=(6, 12), weight_decay=2e-4, new_layer_rate=1.0, precision="float32")
        ),
        localize=LocalizeConfig(method=MethodConfig(target="n")),
    )


def paper_coco() -> Config:
    """`paper` for COCO's 80 classes (Lin et al., ECCV 2014), of which the paper has no figures: masks by the dense CRF,
    as there are no saliency maps, and 100,000 steps of the segmenter, as the usual code of DeepLab-v2 has for COCO
    (github.com/kazuto1011/deeplab-pytorch, configs/cocostuff164k.yaml).

    Command: `mcis import coco instances_train2014.json --images train2014 --out coco`, the same of val2014 with
    `--split val`, then `mcis run tags --tags coco/photos.csv --name NAME --recipe paper_coco`, with ImageNet weights,
    which are fetched, and GPUs. Hours: not measured. Expected mIoU: not known.
    """
    config = paper()
    masks = PseudoMasksConfig(rule="crf")
    segmenter = config.segmenter.model_copy(update={"min_steps": 100_000})
    return config.model_copy(update={"recipe": "paper_coco", "pseudo_masks": masks, "segmenter": segmenter})


def released() -> Config:
    """The figures of the authors' released code, where they differ from the text (RELEASED_RECIPE, "Classifier").

    As in `paper`, every training image has to have a saliency map, and both networks are trained in float32.

    Command: `mcis run voc --voc DIR --name NAME --recipe released`, with ImageNet weights, which are fetched, and a
    GPU. Hours: not measured by this project. Expected mIoU: the paper's tables came from this code: 66.2 on VOC 2012
    val with VOC images only.
    """
    return _published(
        "released",
        classifier=ClassifierConfig(
            head="own",
            loss_reduction="released",
            self_pairs=("hflip", "x0.75", "x2"),
            partner_may_be_itself=True,
            contrastive_from_epoch=2,
            contrastive_needs_unshared=True,
            stop_epoch=10,
            color_jitter=(0.3, 0.3, 0.3, 0.1),
            optimizer=Optimizer(
                nesterov=True, step_epochs=(5, 10), new_layer_rate=10.0, bias_rate=2.0, precision="float32"
            ),
        ),
        localize=LocalizeConfig(method=MethodConfig(name="released"), related_may_repeat=True),
    )


def _published(recipe: str, classifier: ClassifierConfig, localize: LocalizeConfig) -> Config:
    return Config(
        recipe=recipe,
        compute=ComputeConfig(gpu=True),
        weights=WeightsConfig(classifier_backbone="download"),
        classifier=classifier,
        localize=localize,
        pseudo_masks=PseudoMasksConfig(rule="saliency"),
        segmenter=SegmenterConfig(optimizer=SegmenterOptimizer(precision="float32")),
    )


_O = TypeVar("_O", bound=Optimizer)


def _adamw(kind: type[_O], rate: float, faster: float = 1.0, precision: Literal["auto", "float32"] = "auto") -> _O:
    """AdamW, whose rate rises over 5 % of the steps and falls to zero; that of new layers is so many times as high."""
    return kind(
        name="adamw",
        learning_rate=rate,
        weight_decay=0.01,
        new_layer_rate=faster,
        bias_rate=1.0,
        schedule="cosine",
        warm_up=0.05,
        precision=precision,
    )


def scratch() -> Config:
    """Trains from scratch on a CPU; the cosine affinity is the better one without pretrained weights.

    Its maps are of a single round: features of so short a training tell no objects apart, and related images take from
    its maps (docs/results.md). The paper's are `localize.related=3`.

    Command: `mcis run voc --voc DIR --name NAME --recipe scratch`, for images of about 160 pixels such as the embedded
    data's. Hours: 0.2 for 2,400 training images on two cores. Expected mIoU: 70 of the pseudo masks of such a drawn set
    with painted saliency maps (docs/results.md).
    """
    return Config(
        recipe="scratch",
        data=DataConfig(min_side=16),
        classifier=ClassifierConfig(
            backbone="small",
            input_size=96,
            affinity=Affinity(form="cosine", scale=15.0, init=1.0),
            batch=16,
            epochs=10,
            hflip=True,
            shift=8,
            optimizer=_adamw(Optimizer, 0.001),
        ),
        localize=LocalizeConfig(related=0, extra_scales=(0.5, 0.75, 1.25, 1.5), hflip=True),
        maps=MapsConfig(scale="logarithm"),
        pseudo_masks=PseudoMasksConfig(
            threshold=0.66,
            background_threshold=0.55,
            crf=PseudoMasksCrf(iterations=1, bilateral_std=30.0, color_std=8.0),
        ),
        segmenter=SegmenterConfig(
            backbone="small",
            stride=4,
            init="classifier",
            width=96,
            dilation=6,
            crop=128,
            color_jitter=(0.3, 0.3, 0.3, 0.0),
            batch=16,
            min_steps=2000,
            optimizer=_adamw(SegmenterOptimizer, 0.002),
        ),
        predict=PredictConfig(scales=(1.0,), crop=None, crf=CrfParameters(bilateral_std=30.0, color_std=8.0)),
    )


def photos(backbone: str = "timm/tf_efficientnet_lite2") -> Config:
    """Photographs of any size, read at up to 400 pixels a side, and their tags, no saliency maps, no GPU needed.

    ImageNet features that come with the installation are computed once and left as they are; the classifier trains phi
    on them alone, with co-attention in the last quarter of its epochs. Maps are related to the nearest images of the
    class by attention over both levels of these features, with W_P = I, which needs no training. They walk over
    affinities that are learnt from their own confident labels before the dense CRF makes masks of them. The
    segmentation network trains the last three stages of a backbone whose last one stays at stride 32, on images of rare
    classes more often.

    Command: `mcis run tags --tags photos.csv --name NAME`; it is the default recipe of the source tags. Hours: 0.42
    for 1,700 photographs of 400 pixels on two cores. Expected mIoU: 77 of the pseudo masks and 74 to 78 of the
    segmentation network on photographs of six animals, 69 to 72 where classes are uneven (docs/results.md).
    """
    crf = PseudoMasksCrf(iterations=5, bilateral_std=30.0, color_std=8.0, max_side=200)
    return Config(
        recipe="photos",
        data=DataConfig(max_side=400),  # that of the photographs by which crops, walk and CRF were chosen
        weights=WeightsConfig(classifier_backbone="bundled"),
        classifier=ClassifierConfig(
            backbone=backbone,
            trainable_stages=0,
            standardize=True,
            input_size=384,
            attention_epochs=2,
            phi_std=0.03,
            affinity=Affinity(form="cosine_by_level", scale=60.0, w_p="identity"),
            batch=16,
            epochs=8,
            min_steps=800,
            class_balanced_fraction=1.0,
            hflip=True,
            optimizer=_adamw(Optimizer, 0.003),
        ),
        localize=LocalizeConfig(related=24, related_by="nearest", hflip=True),
        affinity_net=AffinityNetConfig(
            kind="boundaries",
            backbone=backbone,
            threshold=0.45,
            background_threshold=0.3,
            crf=crf,
            crop=256,
            batch=16,
            min_steps=100,
            min_epochs=0.9,
            optimizer=_adamw(SegmenterOptimizer, 0.003),
        ),
        pseudo_masks=PseudoMasksConfig(
            rule="affinity",
            threshold=0.47,
            background_threshold=0.35,
            crf=crf,
            walk=WalkConfig(beta=6.0, steps=96, max_side=384),
        ),
        segmenter=SegmenterConfig(
            network="pyramid",
            backbone=backbone,
            trainable_stages=3,
            stride=32,
            width=128,
            dilation=1,
            dropout=0.1,
            image_loss_weight=0.3,
            class_balance_exponent=1.0,
            crop=256,
            scales=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
            color_jitter=(0.3, 0.3, 0.3, 0.0),
            batch=16,
            min_steps=700,
            min_epochs=4.0,
            optimizer=_adamw(SegmenterOptimizer, 0.0003, faster=3.3, precision="float32"),  # bf16: docs/howto/gpu.md
        ),
        predict=PredictConfig(
            scales=(1.0,), crop=None, crf=CrfParameters(iterations=3, bilateral_std=30.0, color_std=8.0, max_side=200)
        ),
    )


def photos_fast() -> Config:
    """`photos` in less time: EfficientNet-Lite0, smaller images for the classifier, masks by the dense CRF alone, of
    maps of fewer related images in four hops, a shorter training.

    Command: `mcis run tags --tags photos.csv --name NAME --recipe photos_fast`. Hours: 0.14 for 1,700
    photographs of 400 pixels on two cores. Expected mIoU: 66 to 68 of the pseudo masks and 59 to 65 of the segmentation
    network, 3 more with its dense CRF, on photographs of six animals (docs/results.md).
    """
    config = photos("timm/tf_efficientnet_lite0")
    return config.model_copy(
        update={
            "recipe": "photos_fast",
            "classifier": config.classifier.model_copy(update={"input_size": 320}),
            "localize": config.localize.model_copy(update={"related": 4, "hops": 4}),
            "pseudo_masks": config.pseudo_masks.model_copy(
                update={"rule": "crf", "threshold": 0.6, "background_threshold": 0.45}
            ),
            "segmenter": config.segmenter.model_copy(update={"min_steps": 200, "min_epochs": 1.1, "crop": 192}),
            "predict": config.predict.model_copy(update={"hflip": False}),
        }
    )


def photos_large() -> Config:
    """`photos` for a GPU: ConvNeXt in the place of EfficientNet-Lite2, larger images, a segmenter that trains longer.

    Command: `mcis run tags --tags photos.csv --name NAME --recipe photos_large`, and a connection to timm's hub. Hours
    and mIoU: not measured; that it runs was shown with random weights alone.
    """
    config, backbone = photos(), "timm/convnext_tiny.fb_in22k"
    larger = {
        "backbone": backbone,
        "width": 256,
        "crop": 384,
        "min_epochs": 30.0,
        "min_steps": 5000,
        "trainable_stages": "all",
    }
    larger["optimizer"] = _adamw(SegmenterOptimizer, 0.0001, faster=10.0)
    return config.model_copy(
        update={
            "recipe": "photos_large",
            "compute": ComputeConfig(gpu=True),
            "weights": WeightsConfig(classifier_backbone="download"),
            "classifier": config.classifier.model_copy(update={"backbone": backbone, "input_size": 448}),
            "affinity_net": config.affinity_net.model_copy(
                update={"backbone": backbone, "min_steps": 500, "min_epochs": 3.0}
            ),
            "segmenter": config.segmenter.model_copy(update=larger),
        }
    )


def lid() -> Config:
    """The challenge LID (section 4.4): ResNet-38 with equivariant attention, DeepLab-V3 on ResNet-101, tags alone.

    What the section leaves out follows the code of SEAM and AffinityNet, which it builds on: input size, crops, jitter,
    trained stages, faster new layers, min-max normalized maps, walk; of the segmentation network it is DeepLab-V3's and
    the defaults.

    Command: `mcis run lid --lid DIR --name NAME --set weights.classifier_backbone=resnet38.pth`, with PSA's
    ImageNet weights as a file of torch, and GPUs; it is the default recipe of the source lid. Hours: not
    measured by this project. Expected
    mIoU: the paper reports 46.2 on val and 45.1 on test.
    """
    return Config(
        recipe="lid",
        compute=ComputeConfig(gpu=True),
        data=DataConfig(max_side=512),
        weights=WeightsConfig(classifier_backbone="download", segmenter_backbone="download"),
        classifier=ClassifierConfig(
            backbone="resnet38",
            trainable_stages=5,
            input_size=448,
            sizing="random_crop",
            crop_scales=(0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
            equivariant=EquivariantConfig(weight=1.0),
            color_jitter=(0.3, 0.3, 0.3, 0.1),
            hflip=True,
            batch=8,
            epochs=15,
            optimizer=Optimizer(
                learning_rate=0.005, weight_decay=5e-4, schedule="poly", new_layer_rate=10.0, precision="float32"
            ),
        ),
        localize=LocalizeConfig(related=0, batch=8),
        maps=MapsConfig(scale="range"),
        affinity_net=AffinityNetConfig(
            kind="features",
            backbone="resnet38",
            trainable_stages=5,
            width=128,
            embedding=448,
            finest=8,
            # AffinityNet's background scores (1 - s)^4 and (1 - s)^32 of a score s are crossed by it at these.
            threshold=0.28,
            background_threshold=0.08,
            crop=448,
            scales=(0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
            color_jitter=(0.3, 0.3, 0.3, 0.1),
            batch=8,
            min_steps=349_319,  # 8 epochs
            optimizer=SegmenterOptimizer(learning_rate=0.1, weight_decay=5e-4, bias_rate=1.0),
        ),
        pseudo_masks=PseudoMasksConfig(
            rule="affinity", threshold=0.2, background_threshold=0.2, crf=PseudoMasksCrf(iterations=0)
        ),
        segmenter=SegmenterConfig(
            network="deeplabv3",
            width=256,
            dilation=6,
            stride=16,
            dropout=0.5,
            batch=48,
            min_steps=727_748,  # 100 epochs of 349,319 images
            optimizer=SegmenterOptimizer(
                learning_rate=0.007, weight_decay=1e-4, new_layer_rate=1.0, bias_rate=1.0, precision="float32"
            ),
        ),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    make.__name__: make for make in (paper, paper_coco, released, scratch, photos, photos_fast, photos_large, lid)
}
