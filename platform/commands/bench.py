"""What `mcis doctor --bench` measures: networks and decoders of this machine, with random weights and no data."""

import copy
import functools
import gc
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.dropout import seed_dropout
from mcis.platform.commands.doctor import Check, checked
from mcis.platform.config.recipes import lid, paper, photos, photos_fast, released, scratch
from mcis.platform.config.sections import Config
from mcis.platform.engine.errors import is_out_of_memory
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.build import build_backbone, build_classifier, build_segmenter, move_channels_last
from mcis.platform.networks.features import BATCH_ON_CPU, BATCH_ON_GPU, features_shape
from mcis.platform.runs.progress import bar

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BOUND = 1e-3
"""Largest difference of scores in float32 from those of the CPU, of the largest one."""
_CLASSES, _ISSUE = 20, "paste the file into an issue"
Found = tuple[str, str, str, Mapping[str, float]]
"""State, finding, remedy, values."""


@dataclass(kw_only=True)
class Bench:
    """What is measured, for how many seconds each and in all, of what sizes; `found` are the values of each part."""

    recipes: Sequence[Config] = field(default_factory=lambda: (photos(), photos_fast(), paper(), released(), lid()))
    seconds: float = 2.0
    limit: float = 240.0
    side: int = 8192 if GPU else 1024
    found: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def measure(self) -> Iterator[Check]:
        """The line of each part; a part that fails is one, too."""
        parts = {"agreement": agreement, "matrices": self.matrices}
        end = time.monotonic() + self.limit
        left_out = [config.recipe for config in self.recipes if config.compute.gpu and not GPU]
        for config in (config for config in self.recipes if config.recipe not in left_out):
            for network in ("embedding", "classifier", "segmenter")[not config.classifier.trains_on_features :]:
                parts[f"{config.recipe}, {network}"] = functools.partial(self.network, config, network, end)
        if left_out:
            parts[", ".join(left_out)] = lambda: ("note", "left out on a CPU, where they take too long", "", {})
        parts["decoders"] = self.decoders
        with bar("measured", len(parts), "parts") as progress:
            for number, check in enumerate(checked(parts, _ISSUE), 1):
                self.found[check.part] = check.values
                progress.update(number, check.part)
                yield check

    def matrices(self) -> Found:
        rates = {}
        for precision in precisions():
            a = torch.randn(self.side, self.side, device=DEVICE, dtype=torch.bfloat16 if precision == "bf16" else None)
            rates[precision] = 2 * self.side**3 / seconds_of(functools.partial(torch.mm, a, a), self.seconds) / 1e12
        return "ok", f"TFLOP/s: {_list(rates)}", "", rates

    def network(self, config: Config, network: str, end: float) -> Found:
        if time.monotonic() > end:
            return "note", "left out: the time is over", "", {}
        told, values, failed = [], dict[str, float](), False
        for precision in precisions():
            if (network, precision) == ("embedding", "bf16"):
                break  # features are never made in it
            try:
                told.append(self.precision(config, network, precision, values))
            except Exception as error:  # the others' figures are worth having
                told.append(f"{precision}: {type(error).__name__}: {str(error)[:120]}")
                failed = True
        return "bad" if failed else "ok", "; ".join(told), _ISSUE if failed else "", values

    def precision(self, config: Config, network: str, precision: str, values: dict[str, float]) -> str:
        """What a network does in one precision, in words; its figures join `values`."""
        unit = "features/s" if network == "classifier" and config.classifier.trains_on_features else "images/s"
        _, samples, run = work_of(config, network, bf16=precision == "bf16")
        size, operations, seconds = self.fitting(samples, run)
        values[f"{precision} {unit}"] = rate = size * (1 + (network == "classifier")) / seconds
        share = operations / seconds / 1e12 / self.found["matrices"].get(precision, float("inf"))
        values[f"{precision} of the matrix rate"] = share
        memory = "- on a CPU"
        if GPU:
            peak, card = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30
            values |= {f"{precision} peak GiB": peak, f"{precision} samples at a time": size}
            memory = f"{peak:.3g} of {card:.3g} GiB, {size} of {samples} samples at a time"
        return f"{precision} {rate:.3g} {unit}, {share:.2f} of the matrix rate, peak memory {memory}"

    def fitting(self, samples: int, run: Callable[[int], object]) -> tuple[int, int, float]:
        """Samples at a time, halved while memory runs out as a training does; their operations and seconds."""
        for size in (samples >> halved for halved in range(samples.bit_length())):
            try:
                gc.collect()  # of earlier networks nothing is to count
                if GPU:
                    torch.cuda.reset_peak_memory_stats()
                step = functools.partial(run, size)
                return size, operations_of(step), seconds_of(step, self.seconds)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()  # behind the except block, whose error holds on to the tensors
        raise MemoryError("not even one sample fits")

    def decoders(self) -> Found:
        """One process's rate times the cores, against the fastest network that sees pictures."""
        Image.fromarray(_noise(94, 125, 3)).resize((500, 375)).save(stream := io.BytesIO(), "JPEG", quality=90)
        rate = (os.cpu_count() or 1) / seconds_of(lambda: decode_picture(stream.getvalue()), self.seconds)
        rates = [(v, part) for part, of in self.found.items() for key, v in of.items() if key.endswith("images/s")]
        most, part = max(rates, default=(0.0, "none"))
        told, values = f"{rate:.4g} images/s of 500x375, all cores; {part} eats {most:.3g}: ", {"images/s": rate}
        if rate >= most:
            return "ok", told + "the network is the limit", "", values
        remedy = "set compute.decode=tasks where other nodes have cores; compute.cache_gb for the classifier's images"
        return "note", told + "the decoders are the limit", remedy, values


def agreement() -> Found:
    """Networks in float32 against the same ones on the CPU, which without a GPU are in float64."""
    next(precisions())
    torch.manual_seed(0)
    config, kind = scratch(), torch.float32 if GPU else torch.float64
    classifier, segmenter = build_classifier(config.classifier, _CLASSES), build_segmenter(config.segmenter, _CLASSES)
    apart = {
        name: difference(copy.deepcopy(network).to(DEVICE), network.to(kind), torch.randn(4, 3, 96, 96))
        for name, network in {"maps and pairs": classifier, "segmentation": segmenter}.items()
    }
    told = f"{'GPU and CPU' if GPU else 'no GPU: float32 and float64 on the CPU'} differ by {_list(apart, '.1e')}"
    state, remedy = ("ok", "") if max(apart.values()) <= BOUND else ("bad", f"set compute.gpu=false, and {_ISSUE}")
    return state, f"{told} of the largest score, bound {BOUND:g}", remedy, apart


def difference(network: nn.Module, reference: nn.Module, images: Tensor) -> float:
    """Largest difference of two networks' scores, each on its device and of its precision, of the largest score."""
    scores = []
    for made in (network.eval(), reference.eval()):
        like = next(made.parameters())
        with torch.inference_mode():
            given = images.to(like.device, like.dtype)
            if isinstance(made, CoAttentionClassifier):
                out = [made.activations(made.features(given)), *made(given, given.flip(0)).pairs]  # both attend
            else:
                out = [made(given)]
        scores.append(torch.cat([each.double().cpu().flatten() for each in out]))
    return float((scores[0] - scores[1]).abs().max() / scores[1].abs().max())


def work_of(
    config: Config, network: str, *, bf16: bool = False, over: Callable[[nn.Module], nn.Module] = lambda alone: alone
) -> tuple[nn.Module, int, Callable[[int], object]]:
    """A network, the samples of its step, and what does a step of n samples: of a recipe's `embedding` of images for
    their features, or of the training of its `classifier` or `segmenter`, which may be `over` several workers."""
    if network == "embedding":
        c, samples = config.classifier, (BATCH_ON_GPU if GPU else BATCH_ON_CPU) // 2
        backbone = move_channels_last(build_backbone(c), DEVICE).eval().requires_grad_(False)
        both = torch.randn(2 * samples, 3, c.input_size, c.input_size, device=DEVICE)  # each, and its mirror image
        both = both.contiguous(memory_format=torch.channels_last)
        return backbone, samples, lambda size: backbone(both[: 2 * size])
    learner, batch = (_classifier if network == "classifier" else _segmenter)(config)
    model = over(move_channels_last(learner.model(), DEVICE).train())
    optimizer = build_optimizer(model, learner.schedule.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the weights stay sound, however often they are updated
    seeds, count = generator_seeds(DrawPurpose.DROPOUT, 0, np.arange(len(batch))), learner.count(batch)

    def forward(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
            return model(*arguments, **options)

    def step(size: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        seed_dropout(model, seeds[:size])
        terms = learner.loss_sums(forward, batch.rows(0, size), learner.schedule.steps - 1, DEVICE)
        (torch.stack(list(terms.values())).sum() / count).backward()
        optimizer.step()

    return model, len(batch), step


def _classifier(config: Config) -> tuple[Learner[Any], Any]:
    c, size = config.classifier, config.classifier.input_size
    images = Features([], Path("none"), features_shape(c)) if c.trains_on_features else Squares([], size)
    noise: Any = _noise(c.batch, *(images.shape if isinstance(images, Features) else (size, size, 3)))
    noise = noise.astype(np.float16) if c.trains_on_features else noise
    index, classes = np.arange(c.batch), _classes(config)
    tags = Tags.from_matrix((_noise(2 * c.batch, classes) < 256 / classes) | (np.arange(classes) == 0))
    batch = PairBatch(
        images_m=noise, images_n=noise, m=index, n=index + c.batch, epoch=0 * index, row=index,
        kind=index.astype(np.uint8), unshared_m=index >= 0, unshared_n=index >= 0,
    )  # fmt: skip
    return ClassifierLearner(config=c, seed=0, tags=tags, source=None, images=images, pretrained=None), batch


def _segmenter(config: Config) -> tuple[Learner[Any], Any]:
    s, index = config.segmenter, np.arange(config.segmenter.batch)
    nothing: Any = None
    masked = MaskedImages([], [""] * s.batch, masks=nothing)
    labels = _noise(s.batch, s.crop, s.crop) % (_classes(config) + 1)
    batch = CropBatch(images=_noise(s.batch, s.crop, s.crop, 3), labels=labels, index=index, epoch=0 * index)
    return SegmenterLearner(config=s, seed=0, classes=_classes(config), masked=masked, pretrained=None), batch


def _classes(config: Config) -> int:
    """Of the data that a recipe is for, LID or VOC; logits of all of them take much of a segmenter's memory."""
    return 200 if config.recipe == "lid" else _CLASSES


def precisions() -> Iterator[str]:
    """Those of the device. Float32 is computed as each says while it is looked at: as it is, or in TF32."""
    bf16 = not GPU or torch.cuda.is_bf16_supported(including_emulation=False)
    for precision in ("float32", *["tf32"] * GPU, *["bf16"] * bf16):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        yield precision


def operations_of(call: Callable[[], object]) -> int:
    """Floating point operations of a call. Torch counts a convolution's gradients as if it had no groups."""

    def gradients(grad: Any, x: Any, weight: Any, *others: Any, **_: Any) -> int:
        return sum(others[-1][:2]) * conv_flop_count(x, weight, grad, transposed=others[4])

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: gradients}) as counter:
        call()
    return counter.get_total_flops()


def seconds_of(call: Callable[[], object], wanted: float) -> float:
    """Seconds of a call behind a first one, the median of as many as take some seconds; the device is waited for."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=wanted).median


def _noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def _list(values: Mapping[str, float], form: str = ".3g") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())
