"""What the trainings of the segmentation and the affinity network, on crops of images and label masks, share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from mcis.datasets.errors import UserError
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import CropBatch, CropDecoder, MaskedImages
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
    ids, uris, hashes = (Texts(rows[column]) for column in ("image_id", "uri", "content_hash"))
    section = getattr(config, network)
    updates = section.num_steps(pc.count_distinct(rows["image_id"]).as_py())  # which repeated images do not prolong
    return {
        "config": section.model_copy(update={"min_steps": updates, "min_epochs": 0.0}),
        "seed": config.seed,
        "masked": MaskedImages(ids, uris, masks, config.data.max_side, hashes),
        "pretrained": later_weights(config, network, context.workspace),
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
        masked: the training images and their masks.
        pretrained: file of the backbone's pretrained weights; None = it is trained from scratch.
    """

    config: AffinityNetConfig | SegmenterConfig
    seed: int
    masked: MaskedImages
    pretrained: Path | None

    @property
    def schedule(self) -> Schedule:
        c, images = self.config, len(self.masked.uris)
        steps = c.num_steps(images)
        return Schedule(
            batch=c.batch,
            images_per_sample=1,
            steps=steps,
            schedule_steps=steps,
            steps_per_epoch=images / c.batch,
            seed=self.seed,
            optimizer=c.optimizer,
        )

    @property
    def has_unused_parameters(self) -> bool:
        return False

    def decoder(self, shard: WorkerShard) -> CropDecoder:
        c = self.config
        return CropDecoder(
            self.masked, seed=self.seed, batch=c.batch, shard=shard, size=c.crop, scales=c.scales, mirror=c.hflip
        )

    def image_uris(self, batch: CropBatch) -> list[str]:
        return [self.masked.uris[index] for index in batch.index.tolist()]

    def images(self, batch: CropBatch, jitter: Draw, device: torch.device) -> Tensor:
        """The batch's crops with changed colors, normalized for the backbone, (B, 3, crop, crop), on the device."""
        draws = uniforms(jitter, self.seed, batch.epoch, batch.index, count=Augmentation.DRAWS)
        augmentation = Augmentation(color_jitter=self.config.color_jitter)
        return device_images(batch.images, draws, augmentation, normalization_of(self.config.backbone), device)
