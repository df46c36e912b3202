"""Stage 5: training images + pseudo masks -> weights.pt of the segmentation network, steps.jsonl."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mcis.datasets.decode import decode_labels
from mcis.datasets.draws import Draw, uniforms
from mcis.datasets.errors import UserError
from mcis.datasets.images import read_rgb
from mcis.datasets.index import Listing
from mcis.datasets.maps import Shards
from mcis.datasets.pairs import epoch_rows
from mcis.datasets.stream import Batch, Share, random_crop
from mcis.models.augment import Augmentation
from mcis.models.backbones import load_pretrained
from mcis.models.losses import pixel_ce
from mcis.models.metrics import IGNORE
from mcis.platform.config.sections import Config, Optimizer, SegmenterConfig
from mcis.platform.engine.training import Network, fit, precision_key
from mcis.platform.networks.build import build_backbone, build_segmenter, load_classifier
from mcis.platform.networks.pretrained import segmenter_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import split_rows
from mcis.platform.runs.results import TrainingResult
from mcis.platform.runs.workspace import Workspace, file_stamps, read_table
from mcis.platform.stages.train_classifier import device_images


class CropDecoder:
    """Step numbers -> training crops: `images` (N, S, S, 3) uint8, `labels` (N, S, S) uint8, `index`, `epoch` (N,)."""

    def __init__(self, learner: "SegmenterLearner", share: Share):
        self.learner, self.share = learner, share

    @property
    def row_bytes(self) -> int:
        """An image and its labels."""
        return 4 * self.learner.config.crop**2

    def __call__(self, steps: Batch) -> Batch:
        learner, c = self.learner, self.learner.config
        mine = slice(self.share.rank, None, self.share.world)
        parts = [
            epoch_rows(learner.seed, len(learner.uris), t * c.batch, (t + 1) * c.batch)
            for t in steps["id"] + self.share.start
        ]
        index, epoch = (np.concatenate([p[k][mine] for p in parts]) for k in range(2))
        draws = uniforms(Draw.SEGMENTER_CROP, learner.seed, epoch, index, count=4)
        crops = [
            random_crop(
                read_rgb(learner.uris[i]), learner.labels(i), size=c.crop, scales=c.scales, mirror=c.mirror, draws=d
            )
            for i, d in zip(index, draws, strict=True)
        ]
        return {
            "images": np.stack([image for image, _ in crops]),
            "labels": np.stack([labels for _, labels in crops]),
            "index": index,
            "epoch": epoch,
        }


@dataclass(frozen=True, kw_only=True)
class SegmenterLearner:
    """The segmentation network as `training.fit` sees it."""

    config: SegmenterConfig
    seed: int
    classes: int
    image_ids: list[str]
    uris: list[str]
    masks: Shards
    start: dict[str, Tensor] | None
    pretrained: Path | None
    about: Mapping[str, Any] = field(default_factory=dict)
    validation: None = None
    images: int = 1

    @property
    def batch(self) -> int:
        return self.config.batch

    @property
    def optimizer(self) -> Optimizer:
        return self.config.optimizer

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def schedule_steps(self) -> int:
        return self.config.steps

    @property
    def epoch_steps(self) -> float:
        return len(self.uris) / self.batch

    def labels(self, index: int) -> NDArray[np.uint8]:
        """The pseudo mask that the network learns from, (H, W), 255 = ignore."""
        rows = self.masks.rows(self.image_ids[index])
        assert rows is not None
        return decode_labels(rows["mask"][0].as_py())

    def model(self) -> nn.Module:
        model = build_segmenter(self.config, self.classes)
        assert isinstance(model.backbone, nn.Module)
        if self.start is not None:
            model.backbone.load_state_dict(self.start)
        elif self.pretrained:
            load_pretrained(model.backbone, self.pretrained)  # type: ignore[arg-type]
        return model

    def decoder(self, share: Share) -> CropDecoder:
        return CropDecoder(self, share)

    def image_uris(self, batch: Batch) -> list[str]:
        return [self.uris[i] for i in batch["index"].tolist()]

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORE).sum())

    def losses(self, model: Network, batch: Batch, step: int, device: torch.device) -> dict[str, Tensor]:
        epoch, index = batch["epoch"], batch["index"]
        draws = uniforms(Draw.SEGMENTER_JITTER, self.seed, epoch, index, count=Augmentation.DRAWS)
        images = device_images(batch, "images", draws, Augmentation(jitter=self.config.color_jitter), device)
        labels = torch.from_numpy(np.array(batch["labels"])).to(device)
        return {"pixel": pixel_ce(model(images).float(), labels)[0]}


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Loads the pretrained weights that the network starts from.

    Raises:
        UserError: they cannot be had or do not fit.
    """
    if path := segmenter_weights(config, workspace):
        load_pretrained(build_backbone(config.segmenter.backbone, channels=config.segmenter.channels), path)


def inputs(config: Config, context: RunContext) -> Any:
    """The pretrained weights' file, and the precision."""
    path = segmenter_weights(config, context.workspace)
    return file_stamps([str(path)] if path else []), precision_key(config.segmenter.optimizer, config.compute)


def run(config: Config, context: RunContext) -> TrainingResult:
    """Trains the segmentation network on the pseudo masks with Ray Train; those ignored whole teach nothing.

    Raises:
        UserError: pretrained weights cannot be had, or the loss is not finite.
    """
    classes = len(context.classes)
    rows = split_rows(context, "train", tagged=True)
    folder = context.inputs["pseudo_masks"] / "masks"
    masks = read_table(folder, ["image_id", "ignored"])
    useful = set(masks.filter(pc.less(masks["ignored"], 1.0))["image_id"].to_pylist())
    rows = rows.filter(pa.array([image_id in useful for image_id in rows["image_id"].to_pylist()]))
    if not len(rows):
        raise UserError(
            f"all {len(masks)} pseudo masks are ignored whole",
            "foreground in some of them",
            "look at the localization maps in the report; train the classifier longer, or lower pseudo_masks.smallest",
        )
    start = None
    if config.segmenter.init == "classifier":
        start = load_classifier(config, context.inputs["train_classifier"], classes).backbone.state_dict()
    learner = SegmenterLearner(
        config=config.segmenter,
        seed=config.seed,
        classes=classes,
        image_ids=rows["image_id"].to_pylist(),
        uris=rows["uri"].to_pylist(),
        masks=Shards(folder),
        start=start,
        pretrained=segmenter_weights(config, context.workspace),
        about={"classes": list(context.classes), "network": config.segmenter.network},
    )
    result = fit(learner, context.part, config.compute, context.tracker, label="segmenter")
    return TrainingResult(
        busy=result.seconds,
        waiting=result.waiting,
        precision=result.precision,
        notes=(f"the segmenter was trained in {result.precision}",) if result.precision != "float32" else (),
        counts={
            "steps": learner.steps,
            "training images": len(rows),
            "without a useful mask": len(masks) - len(rows),
        },
    )
