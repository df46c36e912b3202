"""What a run needs of disk and memory, computed from its configuration and its images before anything is trained.

Weights, checkpoints, features, maps and decoded images have sizes that follow from their shapes. Estimated are label
pictures (from the size of the images' files), the counts of the evaluation, and memory: each process with torch and Ray
takes `_PROCESS`; a training worker has weights, those of what it trains twice more or thrice (gradients and the
optimizer's buffers), and for a micro batch the outputs that the backward pass reads and the two largest ones; a mapping
task has weights and the two largest outputs. On a GPU these lie in its memory.
"""

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import image_bytes
from mcis.datasets.index import Listing
from mcis.datasets.storage.files import MAX_BYTES, stamps
from mcis.datasets.tables.backbone_outputs import features_bytes
from mcis.datasets.tables.large_tables import take
from mcis.datasets.tables.shards import SHARD_BYTES
from mcis.models.affinity_net import AffinityNet
from mcis.models.classifier import MOST_ENTRIES
from mcis.models.segmenters import STRIP_BYTES
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig, Optimizer, SegmenterConfig
from mcis.platform.networks.build import build_affinity_net, build_classifier, build_segmenter, freeze
from mcis.platform.networks.features import FEATURES_BATCH, features_shape
from mcis.platform.networks.pretrained import download_bytes
from mcis.platform.runs.read_index import of_split
from mcis.platform.runs.workspace import Workspace, bytes_in, free_bytes, in_words

_GIB = 2**30
_PROCESS = int(0.4 * _GIB)
"""Memory of a process that has loaded torch and Ray, bytes; measured on Linux without a GPU."""
_UNSEEN = 128 * 2**10
"""Size of an image's file where it cannot be asked for, bytes: that of a photograph of 500x375 pixels."""
_SAMPLE = 64
"""Images whose files are asked for their size."""
_AFFINITIES = 6
"""Matrices of the affinity's size that a training step holds: P, both softmaxes, and their gradients; of pixel
correlation the cosines, those above 0, their shares, and the gradients of these."""
_PLANES = {"boundaries": 16, "features": 12}
"""Values that a training step holds for each affinity, by kind: along its line, and in the losses."""
_ENTRY = 64
"""Bytes of an entry of the walk's matrix while it is made: indices, order and weights."""
_INTERVAL = 1.5
"""Bytes that counts of maps take of an interval of scores, packed: of VOC's masks a third of them hold a pixel."""
MOST_SIDE = 1024
"""Most pixels of a side of overlays, and of photographs as they are predicted where the run has no `data.max_side`."""
_REFINER = 2**26
"""Memory of a process of the dense CRF before its first image, bytes; measured on Linux."""
_DECODING = 20
"""Bytes for each pixel of a picture while it is decoded, the most: one with transparency, composed over white."""
_SMALL = 2**12
"""Bytes of a table's shard without its values, and of a result."""


COUNTED = ["split", "tags", "saliency_uri", "mask_uri", "uri"]
"""Columns of an index or a listing that `counts_of` reads."""


class Counts(NamedTuple):
    """The images of a run: how many, those of train with a tag, their tags, the tagged ones of val, those predicted.

    `salient` are those of train with a tag and a saliency map, `scored` those with a tag and a ground-truth mask;
    `file_bytes` is the mean size of an image's file.
    """

    classes: int
    images: int
    tagged: int
    tags: int
    salient: int
    scored: int
    val: int
    predicted: int
    file_bytes: float


class Need(NamedTuple):
    """What a part of a run takes, bytes.

    Attributes:
        stage: that it is for.
        leaves: on the disk, for good.
        beside: on the disk, while it runs.
        memory: of all its processes.
    """

    stage: str
    leaves: int
    beside: int = 0
    memory: int = 0


class Shortfall(NamedTuple):
    """A sentence on what a stage leaves out or does again, and on what to set."""

    stage: str
    sentence: str


class Needs(NamedTuple):
    """The parts of a run by name, in the order in which they take space.

    Attributes:
        memory: of what is there beside a stage's own processes: the driver, and the object store of a local Ray.
        shortfalls: what a stage leaves out or does again for want of steps or space, in sentences.
    """

    parts: dict[str, Need]
    memory: int
    shortfalls: tuple[Shortfall, ...] = ()

    def disk(self, stages: Collection[str] | None = None) -> int:
        """The most bytes that the given stages take at a time, one after the other; None = all stages."""
        most = left = 0
        for need in self.parts.values():
            if stages is None or need.stage in stages:
                most = max(most, left + need.leaves + need.beside)
                left += need.leaves
        return most

    def largest(self, stages: Collection[str] | None = None) -> str:
        """The three parts of these stages that take most of the disk, in words."""
        parts = [(name, n.leaves + n.beside) for name, n in self.parts.items() if stages is None or n.stage in stages]
        return ", ".join(f"{name} {in_words(size)}" for name, size in sorted(parts, key=lambda part: -part[1])[:3])

    def check_disk(self, workspace: Workspace, stages: Collection[str], *, begun: int) -> None:
        """Asks for the space of the given stages on the disk of a workspace.

        Args:
            begun: bytes of it that are taken already.

        Raises:
            UserError: there is less.
        """
        wanted, free = self.disk(stages) - begun, free_bytes(workspace.root)
        if wanted > free:
            raise UserError(
                f"the run takes {in_words(wanted)} more on the disk of {workspace.root}, which has {in_words(free)} "
                f"free; most of it: {self.largest(stages)}",
                "space for all stages that are not finished",
                "free some space, or move the workspace (--workspace DIR); or set a lower localize.features_gb, which "
                "takes more rounds, or compute.cache_gb; what is finished is kept",
            )

    def most_memory(self, stages: Collection[str] | None = None) -> int:
        """Memory while the one of these stages runs that takes most, bytes."""
        return self.memory + max(n.memory for n in self.parts.values() if stages is None or n.stage in stages)

    def lines(self, root: Path, stages: Collection[str] | None = None) -> list[str]:
        """What these stages take where nothing is finished, beside what this machine has for a workspace in `root`."""
        return [
            f"disk:    at most {in_words(self.disk(stages))} where nothing is finished, {in_words(free_bytes(root))} "
            f"free; most of it: {self.largest(stages)}",
            f"memory:  about {in_words(self.most_memory(stages))} of this machine's {in_words(memory_bytes())}",
        ]

    def expectations(self, stages: Collection[str] | None = None) -> list[str]:
        """The shortfalls of these stages, a line each; None = all stages."""
        return [f"expect:  {sentence}" for stage, sentence in self.shortfalls if stages is None or stage in stages]


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def needs_of_listing(config: Config, listing: Listing, workspace: Workspace | None) -> Needs:
    """As `needs`, of what the sources hold."""
    return needs(config, counts_of(config, listing.table, len(listing.classes)), workspace)


def counts_of(config: Config, images: pa.Table, classes: int) -> Counts:
    """Counts the rows of an index or a listing of so many classes."""
    counted = images.select(["split", "tags", "saliency_uri", "mask_uri"])
    train, val = (of_split(counted, split, tagged=True) for split in ("train", "val"))
    by_split = {row["values"]: row["counts"] for row in images["split"].value_counts().to_pylist()}
    split = config.predict.split
    if split == "auto":
        split = "val" if by_split.get("val") else "train"
    sample = np.linspace(0, len(images) - 1, min(_SAMPLE, len(images))).astype(np.int64)
    sizes = [stamp.size for stamp in stamps(take(images.select(["uri"]), sample)["uri"].to_pylist()) if stamp]
    return Counts(
        classes=classes,
        images=len(images),
        tagged=len(train),
        tags=int(pc.sum(pc.list_value_length(train["tags"])).as_py() or 0),
        salient=len(train) - train["saliency_uri"].null_count,
        scored=len(train) - train["mask_uri"].null_count,
        val=len(val),
        predicted=by_split.get(split, 0),
        file_bytes=float(np.mean(sizes)) if sizes else _UNSEEN,
    )


class _Network(NamedTuple):
    """Bytes of a network, float32.

    Attributes:
        weights: all of it, and `trained` what of it is trained.
        kept: of one image, what a backward pass reads: inputs of trained layers, and what is computed of their outputs.
        largest: of one image, the largest output of a layer, or what is passed in.
        shape: of the output, (C, H, W).
    """

    weights: int
    trained: int
    kept: int
    largest: int
    shape: tuple[int, int, int]


def _measure(network: nn.Module, forward: Callable[[Tensor], Tensor], *shape: int) -> _Network:
    """Passes an input (C, H, W) without values through a network on the device `meta`, as in evaluation."""
    network.eval()  # dropout draws numbers, which there are none of
    outputs: list[Tensor] = []
    kept: dict[int, Tensor] = {}  # by identity, as a layer may hand on what it was given

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append(output)
        trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        read = (*inputs, output) if trained else (output,) if output.requires_grad else ()
        kept.update((id(tensor), tensor) for tensor in read)

    hooks = [layer.register_forward_hook(watch) for layer in network.modules() if not list(layer.children())]
    image = torch.zeros(1, *shape, device="meta")
    output = forward(image)
    for hook in hooks:
        hook.remove()
    _, c, h, w = output.shape
    return _Network(
        weights=_bytes(network.state_dict().values()),
        trained=_bytes(parameter for parameter in network.parameters() if parameter.requires_grad),
        kept=_bytes(kept.values()),
        largest=max(_bytes([each]) for each in (image, *outputs, output)),
        shape=(c, h, w),
    )


@functools.cache
def _networks(
    c: ClassifierConfig, segmenter_config: SegmenterConfig, classes: int, *, kept: bool
) -> tuple[_Network, _Network, _Network]:
    """The classifier from images to embeddings, the same as it is trained, and the segmentation network.

    Args:
        kept: as of `keeps_outputs`.
    """
    with torch.device("meta"):
        classifier, segmenter = build_classifier(c, classes), build_segmenter(segmenter_config, classes)
        freeze(classifier, c)
        freeze(segmenter, segmenter_config)
    side, crop = c.input_size, segmenter_config.crop
    embedding = _measure(classifier, classifier.embed, 3, side, side)
    if kept:
        shape = features_shape(c)
        learning = _measure(classifier, lambda outputs: classifier.activations(classifier.embedding(outputs)), *shape)
    else:
        learning = _measure(classifier, lambda images: classifier.activations(classifier.embed(images)), 3, side, side)
    return embedding, learning, _measure(segmenter, segmenter, 3, crop, crop)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def needs(config: Config, counts: Counts, workspace: Workspace | None) -> Needs:
    """What a run takes that finds nothing finished.

    Args:
        workspace: whose pretrained weights and decoded images are there already; None where there is no workspace.
    """
    kept = keeps_outputs(config, counts)
    embedding, learning, labeling = _networks(config.classifier, config.segmenter, counts.classes, kept=kept)
    with torch.device("meta"):
        affinity_net = build_affinity_net(config.affinity_net) if config.walks else None
        if affinity_net:
            freeze(affinity_net, config.affinity_net)
    trained = config.weights.classifier is None
    steps = classifier_steps(config, counts) if trained else 0
    parts = {
        "index": Need("index", _table(config, counts.images, 512) + 512 * counts.images),
        "classifier's pretrained weights": Need("train_classifier", _pretrained(config, "classifier", workspace)),
        "decoded images": Need("train_classifier", _decoded(config, counts, workspace) if trained else 0),
        "train_classifier": _classifier(config, learning, embedding, steps, kept=kept),
        "localize": _localization(config, counts, embedding),
        **(_affinity_net(config, counts, affinity_net, workspace) if affinity_net else {}),
        "pseudo_masks": Need(
            "pseudo_masks",
            _table(config, counts.tagged, 2 * _picture(counts)),
            0,
            _processes(config) * (_PROCESS + (walk_memory(config, affinity_net) if affinity_net else 0)),
        ),
        "segmenter's pretrained weights": Need("train_segmenter", _pretrained(config, "segmenter", workspace)),
        "train_segmenter": _training(
            config, "segmenter", labeling, config.segmenter.steps, counts.tagged * _picture(counts)
        ),
        "predict": _prediction(config, counts, labeling),
        "evaluate": _evaluation(config, counts),
        "report": Need("report", 2 * (4 * 2**20 + config.report.panels * 2**19)),  # in the run's folder and in MLflow's
        **(
            {}
            if config.tracking.model is False
            else {"logged model": Need("report", labeling.weights, labeling.weights)}
        ),
    }
    shortfalls = (*_uncached(config, counts), *_unseen(config, counts))
    return Needs(parts, _PROCESS + int(config.compute.object_store_gb * _GIB), shortfalls)


def _uncached(config: Config, counts: Counts) -> Iterator[Shortfall]:
    """What the cache does not hold of what the classifier's training reads."""
    c, bound = config.classifier, config.compute.cache_gb * _GIB
    if config.supervision != "tags" or config.weights.classifier is not None:
        return
    if c.from_features:
        images, each = counts.tagged + counts.val, features_bytes(features_shape(c))
        held, what, again = images, "the frozen backbone's outputs", "it computes every image again in each epoch"
    else:
        held = 0 if c.sizing == "random_crop" else counts.tagged  # val images are all kept, or none
        images, each = held + (counts.val if c.val_every else 0), image_bytes(c.input_size)
        what, again = "the pixels", "others are decoded again in each epoch"
    if images * each > bound:
        yield Shortfall(
            "train_classifier",
            f"compute.cache_gb={config.compute.cache_gb:g} holds {what} of {min(held, int(bound / each)):,} of "
            f"{images:,} images: {again}; compute.cache_gb={math.ceil(images * each / _GIB)} holds all",
        )


def _unseen(config: Config, counts: Counts) -> Iterator[Shortfall]:
    """The images that trainings do not see in all of their steps."""
    c, images = config.classifier, counts.tagged
    if config.supervision == "tags" and config.weights.classifier is None and c.epoch_pairs:
        seen, enough = 2 * c.trained_epochs * c.epoch_pairs, math.ceil(images / c.trained_epochs)
        if seen < images:
            yield _sees("train_classifier", "the classifier", seen, images, f"classifier.epoch_pairs={enough}")
    for network, title, section in (
        ("affinity_net", "the affinity network", config.affinity_net if config.walks else None),
        ("segmenter", "the segmenter", config.segmenter),
    ):
        if section and section.steps * section.batch < images:
            enough = math.ceil(images / section.batch)
            stage = "train_affinity" if network == "affinity_net" else "train_segmenter"
            yield _sees(stage, title, section.steps * section.batch, images, f"{network}.steps={enough}")


def _sees(stage: str, network: str, seen: int, images: int, remedy: str) -> Shortfall:
    return Shortfall(
        stage, f"{network} sees at most {seen:,} of {images:,} training images; {remedy} shows it each of them once"
    )


def _table(config: Config, rows: int, row_bytes: float) -> int:
    return int(rows * row_bytes) + _SMALL * (2 + math.ceil(rows / config.compute.shard_rows))


def _picture(counts: Counts) -> float:
    """Bytes of the PNG of an image's labels: large areas of few values, a small part of the image's file."""
    return 1024 + counts.file_bytes / 16


def _processes(config: Config) -> int:
    """Tasks of a mapping that run at a time on this machine."""
    cores = os.cpu_count() or 1
    return min(config.compute.cpus or max(4, cores), cores)


def _pretrained(config: Config, network: str, workspace: Workspace | None) -> int:
    """Bytes of weights that are to be downloaded for one of the networks."""
    section = getattr(config, network)
    if network == "classifier":
        origin, starts = config.weights.backbone, config.reads_pretrained
    else:
        origin, starts = config.weights.origin(network), section.init == "pretrained"
    return download_bytes(section.backbone, workspace) if starts and origin == "download" else 0


def _decoded(config: Config, counts: Counts, workspace: Workspace | None) -> int:
    """Bytes by which the cache of decoded images grows up to its bound, which counts pixels alone."""
    c = config.classifier
    if c.from_features:
        features = (counts.tagged + counts.val) * features_bytes(features_shape(c))
        return features + _table(config, counts.tagged + counts.val, 0) if keeps_outputs(config, counts) else 0
    wanted = 0 if c.sizing == "random_crop" else counts.tagged
    wanted += counts.val if c.val_every else 0
    taken = sum(bytes_in(folder) for folder in workspace.cache.iterdir() if folder.is_dir()) if workspace else 0
    pixels = max(0, min(wanted * image_bytes(c.input_size), int(config.compute.cache_gb * _GIB) - taken))
    return pixels + (_table(config, wanted, 0) if pixels else 0)


def classifier_steps(config: Config, counts: Counts) -> int:
    """Updates of the classifier's training."""
    c = config.classifier
    return math.ceil(c.trained_epochs * (c.epoch_pairs or counts.tagged) / c.batch)


def keeps_outputs(config: Config, counts: Counts) -> bool:
    """Whether a frozen backbone's outputs are computed once, and both the training and the maps read them."""
    if config.weights.classifier is not None or not config.classifier.from_features:
        return False
    features = (counts.tagged + counts.val) * features_bytes(features_shape(config.classifier))
    return features <= config.compute.cache_gb * _GIB


def embeddings(config: Config, counts: Counts) -> float:
    """How many embeddings localization computes at most, rounds for which features are kept in turn included."""
    localize = config.localize
    if not any(localize.numbers):
        return counts.tagged
    embedding, _, _ = _networks(config.classifier, config.segmenter, counts.classes, kept=keeps_outputs(config, counts))
    rounds = math.ceil(2 * math.prod(embedding.shape) * counts.tagged / (localize.features_gb * _GIB))
    return min(counts.tagged * max(1, rounds), counts.tags * (1 + related_of_map(config, counts)))


def related_of_map(config: Config, counts: Counts) -> float:
    """How many other images a localization map is made of, on average; those of the contrastive part included."""
    localize = config.localize
    related = 1 if localize.related_by == "itself" else localize.numbers[-1]
    others = related * (counts.tags / max(1, counts.tagged) - 1) if localize.method.contrastive else 0
    return related + others


def _classifier(config: Config, network: _Network, embedding: _Network, steps: int, *, kept: bool) -> Need:
    """The classifier's training, with its affinities where they are laid out, and the tasks that keep features for it.

    Equivariant attention sees a smaller copy of each image, too, and correlates the positions of both.

    Args:
        network, embedding: as it is trained, and from images to embeddings.
        kept: as of `keeps_outputs`.
    """
    c, need = config.classifier, _training(config, "classifier", network, steps, 0)
    pairs = math.ceil(c.batch / config.compute.workers)
    pairs = min(pairs, config.compute.micro_batch or pairs)
    entries = pairs * math.prod(embedding.shape[1:]) ** 2
    laid_out = entries if c.attention != "none" and entries <= MOST_ENTRIES else 0
    correlated = 2 * entries * (1 + c.equivariant.scale**4) if c.equivariant.weight else 0
    affinities = _AFFINITIES * 4 * int(laid_out + correlated) if steps else 0
    memory = need.memory + config.compute.workers * affinities
    tasks = _processes(config) * (_PROCESS + embedding.weights + 2 * FEATURES_BATCH * embedding.largest) if kept else 0
    return need._replace(memory=max(memory, tasks))


def _training(config: Config, label: str, network: _Network, steps: int, masks: float) -> Need:
    """A training: its weights and its log of steps; beside them a checkpoint, and the next while it is written.

    Args:
        steps: updates; 0 where trained weights are taken over.
        masks: bytes of the pseudo masks that each worker may keep in memory.
    """
    section = getattr(config, label)
    optimizer: Optimizer = section.optimizer
    buffers = 2 if optimizer.name == "adamw" else 1
    checkpoints = 2 * (network.weights + buffers * network.trained) if steps > config.compute.checkpoint_steps else 0
    images = math.ceil(section.batch / config.compute.workers)
    images = min(images, config.compute.micro_batch or images)
    if label == "classifier":
        images *= 2 + 2 * len(config.classifier.self_pairs)
    passed = images * (network.kept + 2 * network.largest)
    if label == "classifier" and config.classifier.equivariant.weight:
        passed = int(passed * (1 + config.classifier.equivariant.scale**2))
    worker = _PROCESS + network.weights + (1 + buffers) * network.trained + passed + int(min(masks, SHARD_BYTES))
    leaves = network.weights + 512 * (1 + steps // 10) + 4 * _SMALL
    return Need(f"train_{label}", leaves, checkpoints, config.compute.workers * worker if steps else worker)


def _affinity_net(config: Config, counts: Counts, model: AffinityNet, workspace: Workspace | None) -> dict[str, Need]:
    """Its weights, its training with the affinities that the losses read, and the table of confident labels."""
    c, crop = config.affinity_net, config.affinity_net.crop
    network = _measure(model, model, 3, crop, crop)
    images = math.ceil(c.batch / config.compute.workers)
    planes = min(images, config.compute.micro_batch or images) * 4 * math.prod(network.shape)
    need = _training(config, "affinity_net", network, c.steps, counts.tagged * _picture(counts))
    return {
        "affinity network's pretrained weights": Need("train_affinity", _pretrained(config, "affinity_net", workspace)),
        "confident labels": Need("train_affinity", _table(config, counts.tagged, _picture(counts))),
        "train_affinity": need._replace(
            stage="train_affinity", memory=need.memory + config.compute.workers * _PLANES[c.kind] * planes
        ),
    }


def walk_memory(config: Config, model: AffinityNet) -> int:
    """Bytes of a task whose maps walk: weights, also as they are laid out for the processor, outputs of the network,
    of which all levels are kept until they are read, and the matrix of a step while it is sorted.
    """
    side = min(config.data.max_side or 500, config.pseudo_masks.walk.max_side)
    network = _measure(model, model, 3, side, side)
    planes, height, width = network.shape
    entries = (2 * planes + 1) * height * width
    return 2 * network.weights + 5 * network.largest + _ENTRY * entries


def _localization(config: Config, counts: Counts, network: _Network) -> Need:
    """Tables of maps, single-round ones and others for each number of related images; beside them the features, and
    the tables of each round where there are several rounds or numbers.
    """
    channels, height, width = network.shape
    numbers = config.localize.numbers
    table = _table(config, counts.tagged, counts.tags / max(1, counts.tagged) * (2 * height * width + 64))
    features = 2 * channels * height * width * counts.tagged if any(numbers) else 0
    bound, related = int(config.localize.features_gb * _GIB), len([number for number in numbers if number])
    beside = min(features, bound) + ((1 + related) * table if features > bound or related > 1 else 0)
    if config.localize.method.name == "released" and any(numbers):
        beside += 4 * height * width * counts.tags
    task = _PROCESS + network.weights + 2 * config.localize.batch * network.largest
    if config.classifier.equivariant.weight:  # of one image at a time: the cosines, those above 0, their shares
        task += 3 * 4 * (height * width) ** 2
    return Need("localize", 2 * len(numbers) * table, beside, _processes(config) * task)


def _prediction(config: Config, counts: Counts, network: _Network) -> Need:
    """Labels without and with the CRF; windows, or whole images, that pass through the network one by one.

    Beside a window's outputs lie the probabilities of the image, which has sides of 4:3, and at the largest scale their
    sum over the windows, of it and of its mirror image. The CRF comes behind.
    """
    crf, longest, scale = config.predict.crf, config.data.max_side or 500, max(config.predict.scales)
    side = config.predict.crop or round(longest * scale)
    largest = network.largest * (side / config.segmenter.crop) ** 2
    plane = 4 * (counts.classes + 1) * 0.75  # bytes of all labels, for each pixel of the longer side squared
    predicted = 4 * largest + plane * longest**2 * (1 + 2 * scale**2)
    refined = 0.0
    if crf.iterations:
        pixels = round(0.75 * min(longest, crf.max_side or longest) ** 2)
        refined = plane * longest**2 + crf_memory(counts.classes + 1, pixels)
    pictures = 2 if crf.iterations else 1
    leaves = _table(config, counts.predicted, pictures * _picture(counts)) + _SMALL * counts.predicted // 32
    task = _PROCESS + network.weights + max(predicted, refined)
    return Need("predict", leaves, 0, int(_processes(config) * task))


def crf_memory(labels: int, pixels: int) -> int:
    """Most bytes that a dense CRF takes, beside what it is given and returns: on noise, whose colors share no cell."""
    return pixels * (500 + 80 * labels)


def photographs_memory(config: Config, classes: int, max_side: int, processes: int) -> int:
    """Bound of the memory in which photographs of any size are predicted one after the other, bytes.

    Args:
        max_side: longest side at which they are read, pixels.
        processes: that run the CRF beside the network; 0 = the network's own.
    """
    labels, crf = classes + 1, config.predict.crf
    with torch.device("meta"):
        network = build_segmenter(config.segmenter, classes)
    scaled = math.ceil(max_side * max(config.predict.scales))
    window = min(scaled, config.predict.crop or scaled)
    probabilities, of_scaled = (4 * labels * side**2 for side in (max_side, scaled))
    passed = _measure(network, network, 3, window, window)
    predicting = 3 * passed.largest + 4 * 4 * labels * window**2 + 3 * of_scaled + 3 * probabilities
    side = min(max_side, crf.max_side or max_side)
    refining = crf_memory(labels, side**2) + 4 * 4 * labels * side**2 if crf.iterations else 0
    finishing = 5 * STRIP_BYTES + 3 * config.data.max_pixels + 32 * MOST_SIDE**2
    waiting = (processes + 2) * (probabilities + 4 * 4 * labels * side**2)
    decoding = MAX_BYTES + _DECODING * config.data.max_pixels
    if not processes:
        return _PROCESS + 2 * passed.weights + max(decoding, predicting, probabilities + max(refining, finishing))
    of_crf = _REFINER + refining if crf.iterations else 0
    return (
        _PROCESS
        + 2 * passed.weights
        + max(decoding, predicting)
        + waiting
        + (processes + 1) * finishing
        + processes * of_crf
    )


def _evaluation(config: Config, counts: Counts) -> Need:
    """Counts of pixels by true label, tag and interval of the score for both tables of maps, and of label masks."""
    share = counts.scored / max(1, counts.tagged)
    labels = share * (counts.tags + counts.tagged)  # true ones of all images, which are their tags and the background
    of_maps = 2 * _INTERVAL * labels * config.evaluate.thresholds * counts.tags / max(1, counts.tagged)
    shards = math.ceil((counts.scored + counts.predicted) / config.compute.shard_rows)
    of_masks = 64 * (3 * counts.scored + 2 * counts.predicted)
    leaves = int(of_maps) + of_masks + _SMALL * (4 + shards) + 64 * (counts.classes + 1) ** 2
    return Need("evaluate", leaves, 0, _processes(config) * _PROCESS)
