"""Measures this machine with random weights and no data: products of matrices, networks and image decoders."""

import copy
import functools
import gc
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from mcis.datasets.images.decode import decode_picture
from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batches import CropBatch, MaskedImages, PairBatch
from mcis.datasets.sampling.keyed_random import DrawPurpose, generator_seeds
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tags import Tags
from mcis.models.classifier import CoAttentionClassifier, PairInputs
from mcis.models.dropout import seed_dropout
from mcis.platform.config.recipes import scratch
from mcis.platform.config.sections import Config
from mcis.platform.engine.errors import is_out_of_memory
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.build import build_backbone, build_classifier, build_segmenter, move_channels_last
from mcis.platform.networks.features import BATCH_ON_CPU, BATCH_ON_GPU, features_shape

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
_VOC_CLASSES = 20
_LID_CLASSES = 200


class Work(NamedTuple):
    """Work to measure.

    Attributes:
        model: The network.
        samples: Number of samples in a step of the recipe.
        step: Processes this many samples.
    """

    model: nn.Module
    samples: int
    step: Callable[[int], object]


class Cost(NamedTuple):
    """The cost of a step: its number of samples, floating point operations and seconds."""

    samples: int
    operations: int
    seconds: float


def device_differences() -> dict[str, float]:
    """Compares networks in float32 on the device with the CPU; without a GPU, with float64 on the CPU.

    Returns:
        `score_difference` by the name of the scores.
    """
    next(precisions())
    torch.manual_seed(0)
    config = scratch()
    reference_dtype = torch.float32 if GPU else torch.float64
    networks = {
        "maps and pairs": build_classifier(config.classifier, _VOC_CLASSES),
        "segmentation": build_segmenter(config.segmenter, _VOC_CLASSES),
    }
    differences = {}
    for name, network in networks.items():
        on_device = copy.deepcopy(network).to(DEVICE)
        differences[name] = score_difference(on_device, network.to(reference_dtype), torch.randn(4, 3, 96, 96))
    return differences


def score_difference(network: nn.Module, reference: nn.Module, images: Tensor) -> float:
    """Returns the largest difference between the scores of two networks, relative to the largest score.

    Args:
        network, reference: Classifiers or segmentation networks, each on its own device and in its own precision.
        images: (B, 3, H, W).
    """
    scores = _all_scores(network, images)
    reference_scores = _all_scores(reference, images)
    return float((scores - reference_scores).abs().max() / reference_scores.abs().max())


def _all_scores(network: nn.Module, images: Tensor) -> Tensor:
    """Returns all scores of a network in evaluation mode as one vector, float64 on the CPU."""
    network.eval()
    parameter = next(network.parameters())
    with torch.inference_mode():
        converted = images.to(parameter.device, parameter.dtype)
        if isinstance(network, CoAttentionClassifier):
            maps = network.activations(network.features(converted))
            outputs = [maps, *network(PairInputs(converted, converted.flip(0))).pairs]
        else:
            outputs = [network(converted)]
    return torch.cat([output.double().cpu().flatten() for output in outputs])


def make_work(
    config: Config, network: str, *, bf16: bool = False, wrap: Callable[[nn.Module], nn.Module] | None = None
) -> Work:
    """Builds a network and its work.

    Args:
        config: A recipe.
        network: `embedding` (the features of images by the classifier's backbone), or the training of `classifier` or
            `segmenter`.
        bf16: Train in mixed precision.
        wrap: Wraps the network, for example for several workers.
    """
    if network == "embedding":
        return _embedding_work(config)

    learner, batch = _classifier_learner(config) if network == "classifier" else _segmenter_learner(config)
    model = move_channels_last(learner.model(), DEVICE).train()
    if wrap is not None:
        model = wrap(model)
    optimizer = build_optimizer(model, learner.schedule.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the weights stay finite in any number of steps
    seeds = generator_seeds(DrawPurpose.DROPOUT, 0, np.arange(len(batch)))
    count = learner.count(batch)

    def forward(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
            return model(*arguments, **options)

    def step(size: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        seed_dropout(model, seeds[:size])
        losses = learner.loss_sums(forward, batch.rows(0, size), learner.schedule.steps - 1, DEVICE)
        (torch.stack(list(losses.values())).sum() / count).backward()
        optimizer.step()

    return Work(model, len(batch), step)


def _embedding_work(config: Config) -> Work:
    """Features of images and of their horizontal flips, which are the second half of each batch."""
    size = config.classifier.input_size
    samples = (BATCH_ON_GPU if GPU else BATCH_ON_CPU) // 2
    backbone = move_channels_last(build_backbone(config.classifier), DEVICE).eval().requires_grad_(False)
    images = torch.randn(2 * samples, 3, size, size, device=DEVICE).contiguous(memory_format=torch.channels_last)
    return Work(backbone, samples, lambda count: backbone(images[: 2 * count]))


def _classifier_learner(config: Config) -> tuple[Learner[Any], Any]:
    """The learner of a classifier, and a batch of random pairs."""
    classifier = config.classifier
    size = classifier.input_size
    images: Any
    noise: Any
    if classifier.trains_on_features:
        images = Features([], Path("none"), features_shape(classifier))
        noise = _noise(classifier.batch, *images.shape).astype(np.float16)
    else:
        images = Squares([], size)
        noise = _noise(classifier.batch, size, size, 3)

    classes = _number_of_classes(config)
    has_tag = _noise(2 * classifier.batch, classes) < 256 / classes
    tags = Tags.from_matrix(has_tag | (np.arange(classes) == 0))
    index = np.arange(classifier.batch)
    all_true = np.ones(classifier.batch, bool)
    batch = PairBatch(
        images_m=noise,
        images_n=noise,
        m=index,
        n=index + classifier.batch,
        epoch=np.zeros_like(index),
        row=index,
        pair_domains=index.astype(np.uint8),
        unshared_m=all_true,
        unshared_n=all_true,
    )
    learner = ClassifierLearner(config=classifier, seed=0, tags=tags, is_source=None, images=images, pretrained=None)
    return learner, batch


def _segmenter_learner(config: Config) -> tuple[Learner[Any], Any]:
    """The learner of a segmentation network, and a batch of random crops."""
    segmenter = config.segmenter
    classes = _number_of_classes(config)
    index = np.arange(segmenter.batch)
    images = _noise(segmenter.batch, segmenter.crop, segmenter.crop, 3)
    labels = _noise(segmenter.batch, segmenter.crop, segmenter.crop) % (classes + 1)
    batch = CropBatch(images=images, labels=labels, index=index, epoch=np.zeros_like(index))

    no_masks: Any = None
    masked = MaskedImages([], [""] * segmenter.batch, masks=no_masks)
    learner = SegmenterLearner(config=segmenter, seed=0, classes=classes, masked=masked, pretrained=None)
    return learner, batch


def _number_of_classes(config: Config) -> int:
    """Number of classes of the data that a recipe is for. Their logits need much of the memory of a segmenter."""
    return _LID_CLASSES if config.recipe == "lid" else _VOC_CLASSES


def precisions() -> Iterator[str]:
    """Yields the precisions of the device, and sets whether float32 is computed as TF32 while each is used."""
    names = ["float32"]
    if GPU:
        names.append("tf32")
    if not GPU or torch.cuda.is_bf16_supported(including_emulation=False):
        names.append("bf16")
    for precision in names:
        allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cudnn.allow_tf32 = allow_tf32
        yield precision


def count_operations(call: Callable[[], object]) -> int:
    """Counts the floating point operations of a call; torch's own formula ignores the groups of a convolution."""

    def count_gradients(grad: Any, x: Any, weight: Any, *others: Any, **_: Any) -> int:
        is_transposed = others[4]
        wanted_gradients = sum(others[-1][:2])  # of inputs and weights
        return wanted_gradients * conv_flop_count(x, weight, grad, transposed=is_transposed)

    formulas = {torch.ops.aten.convolution_backward: count_gradients}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        call()
    return counter.get_total_flops()


def measure_seconds(call: Callable[[], object], min_seconds: float) -> float:
    """Returns the median duration of calls that are repeated for some seconds, after a first one."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_seconds).median


def measure_cost(samples: int, step: Callable[[int], object], min_seconds: float) -> Cost:
    """Measures a step with as many samples as fit: the number is halved when memory runs out, as in a training.

    Raises:
        MemoryError: Not even one sample fits.
    """
    count = samples
    while count > 0:
        try:
            gc.collect()  # frees the networks of earlier measurements
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            call = functools.partial(step, count)
            operations = count_operations(call)
            return Cost(count, operations, measure_seconds(call, min_seconds))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # after the except block, because the error refers to tensors
        count //= 2
    raise MemoryError("not even one sample fits")


def measure_matrix_rate(precision: str, side: int, min_seconds: float) -> float:
    """Measures products of square matrices in one of `precisions`, TFLOP/s.

    Args:
        side: Side length of the matrices.
    """
    dtype = torch.bfloat16 if precision == "bf16" else None
    matrix = torch.randn(side, side, device=DEVICE, dtype=dtype)
    seconds = measure_seconds(functools.partial(torch.mm, matrix, matrix), min_seconds)
    return 2 * side**3 / seconds / 1e12


def measure_decoder_rate(min_seconds: float) -> float:
    """Measures how many JPEG files of 500 x 375 pixels all cores decode per second."""
    stream = io.BytesIO()
    Image.fromarray(_noise(94, 125, 3)).resize((500, 375)).save(stream, "JPEG", quality=90)
    seconds = measure_seconds(lambda: decode_picture(stream.getvalue()), min_seconds)
    return (os.cpu_count() or 1) / seconds


def _noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
