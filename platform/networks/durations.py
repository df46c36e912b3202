"""How long a run takes on this machine's CPUs: a few passes are timed, and multiplied by how often stages repeat them.

A pass is what a stage does for one image, pair or map. All are timed on one core, in seconds of the processor, since
threads that share cores with other programs wait for each other. One that takes long even on a small picture is timed
on that alone, and counts by the area. Left out are scores, the report, and what comes once: Ray and its processes,
downloads.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import encode_labels
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.index import Listing
from mcis.models.affinity_net import affinity_losses
from mcis.models.backbones import Backbone
from mcis.models.classifier import SELF_TRANSFORMS, CoAttentionClassifier
from mcis.models.crf import CrfParameters, dense_crf
from mcis.models.dropout import number_samples
from mcis.models.grids import pixels
from mcis.models.localization import score_maps
from mcis.models.losses import pair_losses, pixel_ce
from mcis.models.random_walk import random_walk
from mcis.models.seam import Equivariance, equivariant_losses
from mcis.models.segmenters import predict
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_affinity_net, build_classifier, build_segmenter, freeze
from mcis.platform.networks.features import features_shape
from mcis.platform.networks.needs import Counts, classifier_steps, counts_of, embeddings, keeps_outputs, related_of_map

_MOST = 0.25
"""Seconds that a pass may take to be timed at its full size, and to be repeated."""
_LEAST_SIDE = 64
"""Least side of a smaller picture, pixels."""
_PICTURES = 3
"""Images that are read."""
_SAMPLES = 2
"""Pairs, or crops, of a training step that is timed."""


class Passes(NamedTuple):
    """Seconds of the passes, on one core.

    Attributes:
        read: an image, from its file.
        read_smaller: an image, at most `data.max_side` pixels long.
        backbone: the classifier's, of an image at the classifier's size.
        head: the layers behind it.
        pair: trained on; of a backbone's outputs where `keeps_outputs`.
        relate: attention of an image to a related one, for a map.
        paint: scores at the pixels of an image, and the PNG of its labels.
        mask_crf: the dense CRF of a pseudo mask, against one of two thresholds.
        pairs_crop: trained on by the affinity network.
        walk: an image through that network, and the walk of its maps.
        crop: trained on by the segmenter.
        segment: the segmenter's probabilities of an image, at scale 1 and not mirrored.
        predict_crf: the dense CRF of a prediction.
    """

    read: float
    read_smaller: float
    backbone: float
    head: float
    pair: float
    relate: float
    paint: float
    mask_crf: float
    pairs_crop: float
    walk: float
    crop: float
    segment: float
    predict_crf: float


def durations(config: Config, counts: Counts, passes: Passes, cores: int, *, kept: bool) -> dict[str, float]:
    """Seconds of the stages whose work grows with the images, by name, where nothing is finished.

    Args:
        cores: that images are spread over; a training's threads are taken to share its work as well.
        kept: as of `keeps_outputs`.
    """
    seconds = {"index": counts.images * passes.read}
    if config.supervision == "tags":
        seconds["train_classifier"] = _classifier(config, counts, passes, kept=kept)
        seconds["localize"] = _localization(config, counts, passes, kept=kept)
        by_crf = counts.tagged - (counts.salient if config.pseudo_masks.reads_saliency else 0)
        seconds["pseudo_masks"] = counts.tagged * (passes.read_smaller + passes.paint) + 2 * by_crf * passes.mask_crf
        if config.walks:
            labels = counts.tagged * (passes.read_smaller + passes.paint + 2 * passes.mask_crf)
            crops = config.affinity_net.steps * config.affinity_net.batch
            seconds["train_affinity"] = labels + crops * (passes.pairs_crop + passes.read_smaller)
            seconds["pseudo_masks"] += counts.tagged * passes.walk
    seconds["train_segmenter"] = config.segmenter.steps * config.segmenter.batch * (passes.crop + passes.read_smaller)
    views = sum(scale**2 for scale in config.predict.scales) * (1 + config.predict.mirror)
    each = passes.read_smaller + views * passes.segment + passes.paint + passes.predict_crf
    seconds["predict"] = counts.predicted * each
    return {stage: on_one / cores for stage, on_one in seconds.items()}


def _classifier(config: Config, counts: Counts, passes: Passes, *, kept: bool) -> float:
    """Seconds on one core."""
    c, read = config.classifier, passes.read
    if config.weights.classifier is not None:
        return 0.0
    pairs = classifier_steps(config, counts) * c.batch
    validated = counts.val * (c.epochs // c.val_every) if c.val_every else 0
    if kept:
        once = (counts.tagged + counts.val) * (read + 2 * passes.backbone)  # of mirror images, too
        return pairs * passes.pair + once + validated * passes.head
    cached = c.sizing != "random_crop" and config.compute.cache_gb > 0
    reads = counts.tagged + counts.val if cached else 2 * pairs + validated
    return pairs * passes.pair + reads * read + validated * (passes.backbone + passes.head)


def _localization(config: Config, counts: Counts, passes: Passes, *, kept: bool) -> float:
    """Seconds on one core."""
    localize, most = config.localize, config.localize.numbers[-1]
    released = localize.method.name == "released" and most > 0
    mirrored, scales = 1 + localize.mirror, [scale**2 for scale in localize.extra_scales]
    selves = sum(1.0 if name == "flip" else float(name[1:]) ** 2 for name in SELF_TRANSFORMS) if released else 0.0
    embedded = mirrored * (1 + sum(scales)) + selves
    by_backbone = embedded - (mirrored if kept else 0)
    image = (passes.read if by_backbone else 0) + by_backbone * passes.backbone + embedded * passes.head
    if most and localize.related_by == "nearest":
        image += passes.head if kept else passes.read + passes.backbone + passes.head
    if not most:
        return counts.tagged * image
    attended = related_of_map(config, counts) + (4 if released else 0)
    return embeddings(config, counts) * image + counts.tags * attended * passes.relate


class Pictures(NamedTuple):
    """Some images of a run, (H, W, 3) each, as far as they can be read, at most `data.max_side` pixels long.

    `read` and `read_smaller` are seconds as of `Passes`.
    """

    images: list[NDArray[np.uint8]]
    read: float
    read_smaller: float


def measure(config: Config, counts: Counts, pictures: Pictures, *, kept: bool) -> Passes:
    """Times the passes, in a few seconds.

    Args:
        pictures: of which the one of middle size stands for all.
        kept: as of `keeps_outputs`.
    """
    picture = sorted(pictures.images, key=lambda image: image.size)[len(pictures.images) // 2]
    unused = dict.fromkeys(("backbone", "head", "pair", "relate", "mask_crf", "pairs_crop", "walk"), 0.0)
    with _one_thread():
        of_tags = _passes_of_tags(config, counts, picture, kept=kept) if config.supervision == "tags" else {}
        of_tags |= _passes_of_affinities(config, counts, picture) if config.walks else {}
        crop, segment = _passes_of_segmenter(config, counts, picture)
        return Passes(
            read=pictures.read,
            read_smaller=pictures.read_smaller,
            crop=crop,
            segment=segment,
            predict_crf=_crf(config.predict.crf, picture, counts.classes + 1),
            paint=_by_area(lambda side: _paint(config, _shrunk(picture, side)), max(picture.shape)),
            **(unused | of_tags),
        )


def _passes_of_segmenter(config: Config, counts: Counts, picture: NDArray[np.uint8]) -> tuple[float, float]:
    """Training on a crop, and the probabilities of a picture."""
    model = build_segmenter(config.segmenter, counts.classes)
    freeze(model, config.segmenter)
    assert isinstance(model.backbone, Backbone)
    stride, longest = model.backbone.layout.stride, max(picture.shape)

    def segment(side: int) -> None:
        height, width = _shrunk(picture, side).shape[:2]
        window = config.predict.crop and max(stride, round(config.predict.crop * side / longest))  # as many as in it
        predict(model, torch.randn(3, height, width), crop=window)

    model.train()
    step = _by_area(lambda side: _segmenter_step(model, counts.classes, side), config.segmenter.crop, stride)
    model.eval()
    return step / _SAMPLES, _by_area(segment, longest, stride)


def _passes_of_tags(config: Config, counts: Counts, picture: NDArray[np.uint8], *, kept: bool) -> dict[str, float]:
    """The passes of the stages that learn from tags."""
    c, labels = config.classifier, 1 + round(counts.tags / max(1, counts.tagged))
    model = build_classifier(c, counts.classes).eval()
    freeze(model, c)
    stride = model.backbone.layout.stride
    outputs = torch.randn(1, *features_shape(c))
    seconds = {}
    with torch.inference_mode():
        seconds["backbone"] = _by_area(lambda side: model.backbone(_noise(1, side)), c.input_size, stride)
        seconds["head"] = _timed(lambda: model.activations(model.embedding(outputs)))
        embedding = model.embedding(outputs)
        if any(config.localize.numbers):
            query = model.query(
                embedding[0], kind=torch.tensor([0]), identity=config.localize.method.affinity == "identity"
            )
            seconds["relate"] = _timed(lambda: model.co_maps(embedding[0], embedding, 0, query=query))
        if not config.pseudo_masks.reads_saliency or counts.salient < counts.tagged:
            seconds["mask_crf"] = _crf(config.pseudo_masks.crf, picture, labels)
    if config.weights.classifier is None:
        model.train()
        of_pairs = outputs.repeat(_SAMPLES, 1, 1, 1)

        def step(attend: bool) -> float:
            if kept:
                return _timed(lambda: _classifier_step(config, model, of_pairs, kept=True, attend=attend))
            return _by_area(
                lambda side: _classifier_step(config, model, _noise(_SAMPLES, side), kept=False, attend=attend),
                c.input_size,
                stride,
            )

        attending = 1 - c.attention_begins / c.trained_epochs
        shares = {True: attending, False: 1 - attending}
        seconds["pair"] = sum(share * step(attend) for attend, share in shares.items() if share) / _SAMPLES
    return seconds


def _passes_of_affinities(config: Config, counts: Counts, picture: NDArray[np.uint8]) -> dict[str, float]:
    """The passes of the affinity network."""
    c, walk = config.affinity_net, config.pseudo_masks.walk
    model = build_affinity_net(c)
    freeze(model, c)
    maps, stride = max(1, round(counts.tags / max(1, counts.tagged))), model.backbone.layout.stride

    def step(side: int) -> None:
        number_samples(model, range(_SAMPLES))
        affinities = model(_noise(_SAMPLES, side))
        labels = torch.randint(2, (_SAMPLES, *affinities.shape[2:]))
        torch.stack(list(affinity_losses(affinities, labels, c.radius).values())).sum().backward()

    @torch.inference_mode()
    def walked(side: int) -> None:
        height, width = _shrunk(picture, side).shape[:2]
        affinities = model(torch.randn(1, 3, height, width))[0]
        start = torch.rand(maps, *affinities.shape[1:])
        random_walk(start, affinities, radius=c.radius, beta=walk.beta, steps=walk.steps)

    model.train()
    pairs_crop = _by_area(step, c.crop, stride) / _SAMPLES
    model.eval()
    return {"pairs_crop": pairs_crop, "walk": _by_area(walked, min(max(picture.shape), walk.max_side), stride)}


def _classifier_step(config: Config, model: CoAttentionClassifier, images: Tensor, *, kept: bool, attend: bool) -> None:
    """A forward and a backward pass of pairs of images (B, 3, S, S) or, `kept`, of a backbone's outputs of them.

    Args:
        attend: whether they attend to each other.
    """
    c, classes = config.classifier, len(model.phi.weight)
    number_samples(model, range(len(images)))
    kind = torch.zeros(len(images), dtype=torch.long) if c.kinds > 1 else None
    tags = torch.eye(len(images), classes)
    equivariance = Equivariance(torch.cat([tags, tags]), c.equivariant.scale) if c.equivariant.weight else None
    scores = model(images, images, c.self_pairs, kind, embedded=kept, attend=attend, equivariance=equivariance)
    total = torch.zeros(())
    for each in (scores.pairs, *scores.selves, *([scores.copies] if scores.copies else [])):
        terms = pair_losses(each, tags, tags, loss_reduction=c.loss_reduction)
        total = total + torch.stack(list(terms.values())).sum()
    if scores.maps:
        of_maps = equivariant_losses(scores.maps, classes=classes, hard=c.equivariant.hard)
        total = total + torch.cat(list(of_maps.values())).sum()
    total.backward()


def _segmenter_step(model: nn.Module, classes: int, side: int) -> None:
    """A forward and a backward pass of some crops."""
    number_samples(model, range(_SAMPLES))
    labels = torch.randint(classes + 1, (_SAMPLES, side, side))
    pixel_ce(model(_noise(_SAMPLES, side)), labels).total.backward()


def _crf(config: CrfParameters, picture: NDArray[np.uint8], labels: int) -> float:
    """Seconds of a dense CRF of so many labels, at the size at which it runs."""
    if not config.iterations:
        return 0.0
    side = min(max(picture.shape), config.max_side or max(picture.shape))

    def refine(side: int) -> None:
        rgb = _shrunk(picture, side)
        dense_crf(rgb, np.full((labels, *rgb.shape[:2]), 1 / labels, np.float32), config)

    return _by_area(refine, side)


def _paint(config: Config, picture: NDArray[np.uint8]) -> None:
    """Scores of one map at a picture's pixels, and the PNG of its labels."""
    height, width = picture.shape[:2]
    scores = score_maps(torch.rand(1, 16, 16), (pixels(16), pixels(16)), config.maps.scale, height, width)
    encode_labels((scores[0] > 0.5).numpy().astype(np.uint8))


def _by_area(work: Callable[[int], object], side: int, stride: int = 1) -> float:
    """Seconds of what is done for a picture of so many pixels on its longer side.

    Where a quarter of the side says that it takes long, they are that picture's, times the area.

    Args:
        stride: that smaller sides are multiples of, pixels.
    """
    small = min(side, stride * max(1, round(max(side / 4, _LEAST_SIDE) / stride)))
    factor = (side / small) ** 2
    seconds = factor * _timed(lambda: work(small))
    return seconds if factor == 1 or seconds > _MOST else _timed(lambda: work(side))


def _timed(work: Callable[[], object]) -> float:
    """Seconds that something takes, the least of a few times where it is short: the first one prepares much."""
    least = spent = 0.0
    for repetition in range(5):
        began = time.process_time()
        work()
        seconds = time.process_time() - began
        least, spent = seconds if repetition == 0 else min(least, seconds), spent + seconds
        if spent > _MOST:
            break
    return least


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute with one thread within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _noise(images: int, side: int) -> Tensor:
    """Images as a network reads them, (B, 3, side, side)."""
    return torch.randn(images, 3, side, side).contiguous(memory_format=torch.channels_last)


def _shrunk(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """A picture (H, W, 3) with a longer side of so many pixels."""
    image = Image.fromarray(picture)
    factor = side / max(image.size)
    return np.asarray(image.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor)))))


def expected_duration(config: Config, listing: Listing, stages: Collection[str] | None = None) -> str:
    """What these stages of a run take on this machine, in a line; passes are timed for a few seconds.

    Args:
        stages: None = all.
    """
    head = "time:    "
    if config.compute.gpu:
        return f"{head}not estimated, as GPUs compute"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"{head}not estimated, as the cluster {address} computes"
    pictures = _pictures(listing.table, config.data.max_side)
    if not pictures.images:
        return f"{head}not estimated, as the first images that were tried cannot be read"
    counts = counts_of(config, listing.table, len(listing.classes))
    cores, kept = os.cpu_count() or 1, keeps_outputs(config, counts)
    passes = measure(config, counts, pictures, kept=kept)
    seconds = durations(config, counts, passes, cores, kept=kept)
    return head + in_words({stage: s for stage, s in seconds.items() if stages is None or stage in stages}, cores)


def _pictures(images: pa.Table, max_side: int | None) -> Pictures:
    found, spent = [], np.zeros(2)
    for position in np.unique(np.linspace(0, len(images) - 1, min(_PICTURES, len(images))).astype(np.int64)).tolist():
        uri, times = images["uri"][position].as_py(), [time.perf_counter()]
        with contextlib.suppress(UserError):
            for side in (None, max_side):
                picture = read_rgb(uri, max_side=side)
                times.append(time.perf_counter())
            found.append(picture)
            spent += np.diff(times)
    read, read_smaller = (spent / max(1, len(found))).tolist()
    return Pictures(found, read, read_smaller)


def in_words(seconds: dict[str, float], cores: int) -> str:
    """The sum of the stages' seconds and the longest ones."""
    longest = sorted((item for item in seconds.items() if item[1] >= 1), key=lambda item: -item[1])[:4]
    most = "; most of it: " + ", ".join(f"{stage} {clock_words(s)}" for stage, s in longest) if longest else ""
    return f"about {clock_words(sum(seconds.values()))} on {cores} cores where nothing is finished{most}"


def clock_words(seconds: float) -> str:
    """Seconds as a person reads them, to two digits or so."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min"
        if minutes < 90
        else f"{seconds / 3600:.1f} h"
        if seconds < 48 * 3600
        else f"{seconds / 86400:.1f} days"
    )
