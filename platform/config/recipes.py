"""Recipes: functions that return a configuration; the values that a recipe states override the defaults.

A stated value counts as set by the recipe even if it equals the default; `keys.explicit` returns the stated values.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

from mcis.models.affinity import Affinity
from mcis.models.crf import CrfParameters
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
    LossesConfig,
    Optimizer,
    SegmenterConfig,
    SegmenterOptimizer,
)


def paper() -> Config:
    """The method as described in the paper (section 3.3): VGG-16 classifier, DeepLab-LargeFOV on ResNet-101.

    Every training image needs a saliency map. Both networks are trained in float32 (paper-vs-code, "Pseudo masks" and
    "Classifier").

    Command: `mcis run voc --voc DIR --name NAME --recipe paper`; it downloads ImageNet weights and needs a GPU. Hours:
    not measured by this project. Expected mIoU: the paper reports 66.2 on VOC 2012 val with VOC images only, and 63.5
    for DeepLab-LargeFOV on VGG-16, `segmenter.backbone=vgg16_largefov segmenter.dropout=0.5`.
    """
    return _published(
        "paper",
        classifier=ClassifierConfig(
            optimizer=Optimizer(step_epochs=(6, 12), weight_decay=2e-4, new_layer_rate=1.0, precision="float32")
        ),
        localize=LocalizeConfig(method=MethodConfig(target="n")),
    )


def paper_coco() -> Config:
    """`paper` for the 80 classes of COCO (Lin et al., ECCV 2014), for which the paper reports no results.

    COCO has no saliency maps, so pseudo masks use the dense CRF. The segmentation network is trained for 100,000 steps,
    as in a common implementation of DeepLab-v2 (github.com/kazuto1011/deeplab-pytorch, configs/cocostuff164k.yaml).

    Command: `mcis import coco instances_train2014.json --images train2014 --out coco`, the same for val2014 with
    `--split val`, then `mcis run tags --tags coco/photos.csv --name NAME --recipe paper_coco`; it downloads ImageNet
    weights and needs GPUs. Hours: not measured. Expected mIoU: not known.
    """
    config = paper()
    segmenter = config.segmenter.model_copy(update={"min_steps": 100_000})
    return config.model_copy(
        update={"recipe": "paper_coco", "pseudo_masks": PseudoMasksConfig(rule="crf"), "segmenter": segmenter}
    )


def released() -> Config:
    """The values of the authors' released code where it differs from the text (paper-vs-code, "Classifier").

    As in `paper`, every training image needs a saliency map, and both networks are trained in float32.

    Command: `mcis run voc --voc DIR --name NAME --recipe released`; it downloads ImageNet weights and needs a GPU.
    Hours: not measured by this project. Expected mIoU: the paper's tables were computed with this code: 66.2 on VOC
    2012 val with VOC images only.
    """
    return _published(
        "released",
        classifier=ClassifierConfig(
            head="own",
            losses=LossesConfig.model_validate(
                {
                    "basic": {"weight": 0.5},
                    "co_attention": {"weight": 0.5},
                    "contrastive": {"from_epoch": 2, "needs_unshared": True},
                }
            ),
            self_pairs=("hflip", "x0.75", "x2"),
            partner_may_be_itself=True,
            stop_epoch=10,
            color_jitter=(0.3, 0.3, 0.3, 0.1),
            optimizer=Optimizer(
                nesterov=True, step_epochs=(5, 10), new_layer_rate=10.0, bias_rate=2.0, precision="float32"
            ),
        ),
        localize=LocalizeConfig(method=MethodConfig(name="released"), related_may_repeat=True),
    )


def _published(recipe: str, classifier: ClassifierConfig, localize: LocalizeConfig) -> Config:
    """What `paper` and `released` have in common."""
    return Config(
        recipe=recipe,
        compute=ComputeConfig(gpu=True),
        weights=WeightsConfig(classifier_backbone="download"),
        classifier=classifier,
        localize=localize,
        pseudo_masks=PseudoMasksConfig(rule="saliency"),
        segmenter=SegmenterConfig(optimizer=SegmenterOptimizer(precision="float32")),
    )


_OptimizerSection = TypeVar("_OptimizerSection", bound=Optimizer)


def _adamw(
    section: type[_OptimizerSection],
    learning_rate: float,
    new_layer_rate: float = 1.0,
    precision: Literal["auto", "float32"] = "auto",
) -> _OptimizerSection:
    """AdamW with 5 % linear warm-up and cosine decay to zero."""
    return section(
        name="adamw",
        learning_rate=learning_rate,
        weight_decay=0.01,
        new_layer_rate=new_layer_rate,
        bias_rate=1.0,
        schedule="cosine",
        warm_up=0.05,
        precision=precision,
    )


def scratch() -> Config:
    """Training from scratch on a CPU, for tests and for small images of about 160 pixels.

    Localization maps are single-round: after such a short training, related images lower their quality; the paper uses
    `localize.related=3`. The cosine affinity works best without pretrained weights.

    Command: `mcis run voc --voc DIR --name NAME --recipe scratch`. Hours: 0.2 for 2,400 training images on two cores.
    Expected mIoU: 70 for pseudo masks of a synthetic data set with synthetic saliency maps.
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
    """Photographs with tags; needs no saliency maps and no GPU. Images are read at up to 400 pixels a side.

    - Classifier: a frozen ImageNet backbone that is installed with mcis. Its features are computed once; training
      updates phi and the gate W_B, with co-attention in the last quarter of the epochs.
    - Localization maps: co-attention with the nearest images of the class over two feature levels, with W_P = I, which
      needs no training.
    - Pseudo masks: maps walk over affinities learned from their own confident labels, then the dense CRF refines them.
    - Segmentation network: the last three stages of the backbone are trained at stride 32; images of rare classes are
      repeated.

    Command: `mcis run tags --tags photos.csv --name NAME`; it is the default recipe of the source tags. Hours: 0.42 for
    1,700 photographs of 400 pixels on two cores. Expected mIoU: 77 for pseudo masks and 74 to 78 for the segmentation
    network on photographs of six classes, 69 to 72 if classes are uneven (docs/results.md).
    """
    crf = PseudoMasksCrf(iterations=5, bilateral_std=30.0, color_std=8.0, max_side=200)
    return Config(
        recipe="photos",
        data=DataConfig(max_side=400),  # crops, walk and CRF were tuned on photographs of this size
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
            max_steps=2000,  # more updates lower the maps: docs/explanation/scale.md
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
            max_epochs=130.0,
            optimizer=_adamw(
                SegmenterOptimizer, 0.0003, new_layer_rate=3.3, precision="float32"
            ),  # bf16: docs/notes/gpu-and-speed.md
        ),
        predict=PredictConfig(
            scales=(1.0,), crop=None, crf=CrfParameters(iterations=3, bilateral_std=30.0, color_std=8.0, max_side=200)
        ),
    )


def photos_fast() -> Config:
    """A faster `photos`: EfficientNet-Lite0, smaller inputs of the classifier, pseudo masks by the dense CRF without a
    random walk, from fewer related images in four hops, and a shorter training of the segmentation network.

    Command: `mcis run tags --tags photos.csv --name NAME --recipe photos_fast`. Hours: 0.14 for 1,700 photographs of
    400 pixels on two cores. Expected mIoU: 66 to 68 for pseudo masks and 59 to 65 for the segmentation network, 3 more
    with its dense CRF, on photographs of six classes (docs/results.md).
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
            "segmenter": config.segmenter.model_copy(
                update={"min_steps": 200, "min_epochs": 1.1, "max_epochs": 40.0, "crop": 192}
            ),
            "predict": config.predict.model_copy(update={"hflip": False}),
        }
    )


def photos_large() -> Config:
    """Experimental: `photos` for a GPU, with ConvNeXt-Tiny, larger images and a longer training of the segmentation
    network.

    Command: `mcis run tags --tags photos.csv --name NAME --recipe photos_large`; it downloads weights from timm's hub.
    Hours and Expected mIoU: not measured; tested only with random weights.
    """
    config = photos()
    backbone = "timm/convnext_tiny.fb_in22k"
    larger = {
        "backbone": backbone,
        "width": 256,
        "crop": 384,
        "min_epochs": 30.0,
        "min_steps": 5000,
        "trainable_stages": "all",
    }
    larger["optimizer"] = _adamw(SegmenterOptimizer, 0.0001, new_layer_rate=10.0)
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
    """The LID challenge (section 4.4): ResNet-38 with equivariant attention, DeepLab-V3 on ResNet-101, tags only.

    Values that the section leaves out (input size, crops, color jitter, trained stages, learning rates of new layers,
    map normalization, random walk) follow the code of SEAM and AffinityNet, on which the entry was built. The
    segmentation network follows DeepLab-V3 and the defaults.

    Command: `mcis run lid --lid DIR --name NAME weights.classifier_backbone=FILE` with PSA's ImageNet weights,
    ilsvrc-cls_rna-a1_cls1000_ep-0001.params, and GPUs; it is the default recipe of the source lid. Hours: not measured
    by this project.
    Expected mIoU: the paper reports 46.2 on val and 45.1 on test.
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
            # AffinityNet's background scores (1 - s)^4 and (1 - s)^32 equal the foreground score s at these values.
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
    recipe.__name__: recipe for recipe in (paper, paper_coco, released, scratch, photos, photos_fast, photos_large, lid)
}
