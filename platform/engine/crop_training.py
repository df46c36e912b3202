"""What the trainings of the segmentation and the affinity network, on crops of images and label masks, share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, CropDecoder
from mcis.datasets.sampling.keyed_random import Draw, uniforms
from mcis.datasets.tables.large_tables import Texts
from mcis.datasets.tables.shards import Shards
from mcis.models.augment import Augmentation
from mcis.models.networks import normalization_of
from mcis.platform.config.sections import Config
from mcis.platform.config.training import AffinityNetConfig, SegmenterConfig
from mcis.platform.engine.learner import Learner, Schedule, device_images
from mcis.platform.engine.step_log import loss_trend
from mcis.platform.engine.training import fit
from mcis.platform.networks.pretrained import later_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.results import StageResult

_NAMES = {"segmenter": "segmenter", "affinity_net": "affinity network"}


def taught_rows(rows: pa.Table, useful: pa.Table, lacking: UserError) -> pa.Table:
    """The rows of an index whose masks are `useful`, by their image_id; raises `lacking` where there is none."""
    taught = rows.filter(pc.is_in(rows["image_id"], useful["image_id"].combine_chunks()))
    if not len(taught):
        raise lacking
    return taught


def crops(
    network: Literal["segmenter", "affinity_net"], config: Config, context: RunContext, rows: pa.Table, masks: Shards
) -> dict[str, Any]:
    """What a `CropLearner` is made of: the images of some rows of the index, their masks, and pretrained weights."""
    return {
        "config": getattr(config, network),
        "seed": config.seed,
        "image_ids": Texts(rows["image_id"]),
        "uris": Texts(rows["uri"]),
        "hashes": Texts(rows["content_hash"]),
        "masks": masks,
        "pretrained": later_weights(config, network, context.workspace),
        "max_side": config.data.max_side,
    }


def train_on_crops(
    network: Literal["segmenter", "affinity_net"],
    learner: Learner[CropBatch],
    config: Config,
    context: RunContext,
    *,
    about: Mapping[str, Any],
    counts: Mapping[str, Any],
    remedy: str,
) -> StageResult:
    """Trains a network with Ray Train; errors as of `fit`.

    Args:
        about: what the reader of its weights has to know.
        counts: of the images, for the report.
        remedy: what to do where the loss has not fallen.
    """
    result = fit(learner, context.part, config.compute, context.tracker, label=network, about=about)
    trend, problem = loss_trend(context.part, "loss"), None
    if trend and not trend[0]:
        problem = (f"the {_NAMES[network]} learnt nothing: {trend[1]}", "a loss that falls", remedy)
    return StageResult(
        notes=result.notes(_NAMES[network]), counts={"steps": learner.schedule.steps, **counts}, problem=problem
    )


@dataclass(frozen=True, kw_only=True)
class CropLearner:
    """A training on crops of images with a label mask each; a subclass adds the network and its losses.

    Attributes:
        image_ids, uris: of the training images.
        masks: table of their label masks.
        pretrained: file of the backbone's pretrained weights; None = it is trained from scratch.
        max_side: longest side at which images are read, pixels, and their masks were made; None = as they are.
    """

    config: AffinityNetConfig | SegmenterConfig
    seed: int
    image_ids: Sequence[str]
    uris: Sequence[str]
    masks: Shards
    pretrained: Path | None
    max_side: int | None = None
    hashes: Sequence[str] | None = None

    @property
    def schedule(self) -> Schedule:
        c = self.config
        steps = c.updates(len(self.uris))
        return Schedule(
            batch=c.batch,
            images_per_sample=1,
            steps=steps,
            schedule_steps=steps,
            steps_per_epoch=len(self.uris) / c.batch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def rests_parameters(self) -> bool:
        return False

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        c = self.config
        return CropDecoder(
            self.image_ids,
            self.uris,
            self.masks,
            seed=self.seed,
            batch=c.batch,
            shard=shard,
            size=c.crop,
            scales=c.scales,
            mirror=c.mirror,
            max_side=self.max_side,
            hashes=self.hashes,
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.uris[index] for index in batch.index.tolist()]

    def images(self, batch: CropBatch, jitter: Draw, device: torch.device) -> Tensor:
        """The batch's crops with changed colors, normalized for the backbone, (B, 3, crop, crop), on the device."""
        draws = uniforms(jitter, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        return device_images(batch.images, draws, augmentation, normalization_of(self.config.backbone), device)
