"""Overhead of orchestration: the demo's wall time, relative to the same computations in a plain loop.

The loop runs the demo's stages with the same numerics, random numbers and files in one process, without Ray, MLflow,
progress bars and report. Torch uses all cores in training. Both sides start with an empty workspace and draw the
embedded data.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from mcis.datasets.index import check_images
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.sampling.batches import MaskedImages
from mcis.datasets.sampling.keyed_random import DrawPurpose, OrderPurpose, generator_seeds, permuted
from mcis.datasets.tables.memory_mapped import Features
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.dropout import seed_dropout
from mcis.models.pretrained import bundled_weights
from mcis.platform.commands.run import demo_configuration
from mcis.platform.config.sections import Config
from mcis.platform.engine.learner import Learner
from mcis.platform.engine.optimizers import build_optimizer
from mcis.platform.learners.affinity_learner import AffinityLearner
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.learners.segmenter_learner import SegmenterLearner
from mcis.platform.networks.features import MakeFeatures, features_shape
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.outputs.counts import RELATED, SINGLE_ROUND
from mcis.platform.outputs.relations import VECTORS, draw_relations, read_vectors
from mcis.platform.runs.files import write_table
from mcis.platform.runs.listing import list_images
from mcis.platform.stages import predict
from mcis.platform.stages.evaluation.scoring import CountTrainingImages, count_predictions
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, relate_rows
from mcis.platform.stages.pseudo_masks.making import MakeMasks
from mcis.platform.stages.train_affinity import make_labels

TARGET = 1.2
TARGET_TRAININGS = 1.05
TRAININGS = ("train_classifier", "train_affinity", "train_segmenter")
SHARD_ROWS = 64
STATISTICS_IMAGES = 256
"""Images from which the statistics of features are computed."""


def shard(folder: Path, rows: pa.Table) -> Path:
    """Returns the file of a table of all rows."""
    return folder / f"part-{0:08d}-{len(rows):08d}.parquet"


def train(learner: Learner[Any], folder: Path) -> None:
    """Trains in this process and decodes images between steps. Writes the weights to a new folder."""
    folder.mkdir()
    schedule = learner.schedule
    torch.manual_seed(schedule.seed)
    model = learner.model()
    optimizer = build_optimizer(model, schedule.optimizer)
    decode = learner.decoder(WorkerShard(0, 1, 0, schedule.steps))
    for step in range(schedule.steps):
        batch = decode(np.array([step]))
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step) * group["factor"]
        samples = step * schedule.batch + np.arange(schedule.batch)
        seed_dropout(model, generator_seeds(DrawPurpose.DROPOUT, schedule.seed, samples))
        losses = learner.loss_sums(model, batch, step, torch.device("cpu"))
        loss = torch.stack(list(losses.values())).sum() / learner.count(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class PlainLoop:
    """The demo without orchestration. Each method computes a stage and writes its output to the folder.

    Attributes:
        classes: Number of classes.
        rows: Index rows of the tagged training images.
        val_rows: Index rows of the val images.
        tags: Tags of the training images.
    """

    config: Config
    folder: Path
    classes: int
    rows: pa.Table
    val_rows: pa.Table
    tags: Tags

    @property
    def features(self) -> Features:
        """The frozen backbone's features of the training images."""
        shape = features_shape(self.config.classifier)
        return Features(self.rows["uri"].to_pylist(), self.folder / "cached", shape)

    @classmethod
    def index(cls, config: Config, folder: Path) -> "PlainLoop":
        listed = list_images(config)
        checked = check_images(listed.table, min_side=config.data.min_side)
        rows = checked.filter(pc.equal(checked["split"], "train"))
        val_rows = checked.filter(pc.equal(checked["split"], "val"))
        tags = Tags.from_index(rows["tags"], len(listed.classes))
        return cls(config=config, folder=folder, classes=len(listed.classes), rows=rows, val_rows=val_rows, tags=tags)

    def train_classifier(self) -> None:
        config = self.config.classifier
        count = len(self.rows)
        make_features = MakeFeatures(config, bundled_weights(config.backbone), False, 2)
        for first in range(0, count, SHARD_ROWS):
            shard = self.folder / "cached" / f"part-{first:08d}-{min(first + SHARD_ROWS, count):08d}.arrow"
            write_table(shard, make_features(self.rows.slice(first, SHARD_ROWS)))

        order = permuted(OrderPurpose.STATISTICS, self.config.seed, 0, count, np.arange(min(STATISTICS_IMAGES, count)))
        learner = ClassifierLearner(
            config=config,
            seed=self.config.seed,
            tags=self.tags,
            is_source=None,
            images=self.features,
            pretrained=bundled_weights(config.backbone),
            statistics=self.features.statistics(np.sort(order)),
        )
        train(learner, self.folder / "classifier")

    def localize(self) -> None:
        config = self.config
        folder = self.folder
        no_source = np.zeros(len(self.rows), bool)
        classifier = folder / "classifier"
        embed = Embed(config, classifier, self.classes, self.features, folder)
        write_table(shard(folder / "single", self.rows), embed(embed_rows(self.rows)))

        vectors = read_vectors(folder / VECTORS)
        relations = draw_relations(config.localize, config.seed, self.tags, no_source, vectors)
        hops = config.localize.hops
        for hop in range(1, hops + 1):
            relate = Relate(config, classifier, self.classes, folder, no_source, hop)
            maps = relate(relate_rows(self.rows, relations, hops))
        write_table(shard(folder / "maps", self.rows), maps)

    def train_affinity(self) -> None:
        config = self.config
        labels = make_labels(config, self.classes, Shards(self.folder / "maps"), self.rows)
        write_table(shard(self.folder / "labels", self.rows), labels)
        learner = AffinityLearner(
            config=config.affinity_net,
            seed=config.seed,
            masked=self._masked_images(Shards(self.folder / "labels", ["mask"])),
            pretrained=bundled_weights(config.affinity_net.backbone),
        )
        train(learner, self.folder / "affinity_net")

    def _masked_images(self, masks: Shards) -> MaskedImages:
        ids = self.rows["image_id"].to_pylist()
        uris = self.rows["uri"].to_pylist()
        return MaskedImages(ids, uris, masks, self.config.data.max_side)

    def pseudo_masks(self) -> None:
        affinities = self.folder / "affinity_net" if self.config.uses_random_walk else None
        make_masks = MakeMasks(self.config, self.classes, Shards(self.folder / "maps"), affinities, False)
        write_table(shard(self.folder / "masks", self.rows), make_masks(self.rows))

    def train_segmenter(self) -> None:
        learner = SegmenterLearner(
            config=self.config.segmenter,
            seed=self.config.seed,
            classes=self.classes,
            masked=self._masked_images(Shards(self.folder / "masks")),
            pretrained=bundled_weights(self.config.segmenter.backbone),
        )
        train(learner, self.folder / "segmenter")

    def predict(self) -> None:
        names = tuple(f"class {k}" for k in range(self.classes))
        predict_rows = predict.PredictRows(self.config, self.folder / "segmenter", names)
        write_table(shard(self.folder / "predictions", self.val_rows), predict_rows(self.val_rows))

    def evaluate(self) -> None:
        count_training_images = CountTrainingImages(
            classes=self.classes,
            bins=self.config.evaluate.thresholds,
            scale=self.config.map_scale,
            seed=self.config.seed,
            maps={SINGLE_ROUND: Shards(self.folder / "single"), RELATED: Shards(self.folder / "maps")},
            masks=Shards(self.folder / "masks"),
        )
        positions = pa.array(np.arange(len(self.rows)))
        rows = self.rows.append_column("position", positions).append_column("mask_position", positions)
        count_training_images(rows)
        val_positions = pa.array(np.arange(len(self.val_rows)))
        val_rows = self.val_rows.append_column("position", val_positions)
        count_predictions(self.classes, Shards(self.folder / "predictions"), val_rows)


def plain_loop_seconds(config: Config, folder: Path) -> dict[str, float]:
    """Measures each stage of the plain loop."""
    torch.set_num_threads(harness.available_cores())
    start = time.perf_counter()
    loop = PlainLoop.index(config, folder)
    seconds = {"index": time.perf_counter() - start}
    for stage in (
        loop.train_classifier,
        loop.localize,
        loop.train_affinity,
        loop.pseudo_masks,
        loop.train_segmenter,
        loop.predict,
        loop.evaluate,
    ):
        start = time.perf_counter()
        stage()
        seconds[stage.__name__] = time.perf_counter() - start
    return seconds


class Pair(NamedTuple):
    """Seconds of a demo and of a plain loop.

    Attributes:
        demo: Wall seconds of the demo.
        demo_stages: Wall seconds of the demo's stages.
        loop_stages: Seconds of the plain loop's stages.
    """

    demo: float
    demo_stages: dict[str, float]
    loop_stages: dict[str, float]

    @property
    def loop(self) -> float:
        """Seconds of the plain loop."""
        return sum(self.loop_stages.values())

    @property
    def trainings_ratio(self) -> float:
        """Seconds of the demo's trainings, relative to the plain loop's."""
        demo = sum(self.demo_stages[stage] for stage in TRAININGS)
        return demo / sum(self.loop_stages[stage] for stage in TRAININGS)


def measure_pair(overrides: list[str]) -> Pair:
    """Runs the plain loop, then the demo."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        config = demo_configuration(workspace, overrides).config
        plain = Path(folder) / "plain"
        plain.mkdir()
        loop_stages = plain_loop_seconds(config, plain)

        words = ["demo", "--workspace", str(workspace)]
        for override in overrides:
            words += ["--set", override]
        start = time.perf_counter()
        harness.run_mcis(*words)
        demo = time.perf_counter() - start
        return Pair(demo, harness.stage_seconds(workspace / "runs" / "demo"), loop_stages)


def print_pair(pair: Pair) -> None:
    """Prints the seconds of both sides' stages."""
    print(f"demo {pair.demo:.1f} s, plain loop {pair.loop:.1f} s, ratio {pair.demo / pair.loop:.2f}")
    print(f"{'stage':18}{'demo s':>10}{'loop s':>10}{'difference':>12}")
    for stage, seconds in pair.loop_stages.items():
        demo_seconds = pair.demo_stages[stage]
        print(f"{stage:18}{demo_seconds:10.1f}{seconds:10.1f}{demo_seconds - seconds:12.1f}")
    rest = pair.demo - sum(pair.demo_stages.values())
    print(f"{'start, report, end':18}{rest:10.1f}{0:10.1f}{rest:12.1f}\n", flush=True)


def main() -> None:
    """Runs both sides in turn and prints the medians of the pairs' ratios."""
    parser = harness.option_parser(__doc__, repeats=1)
    harness.add_overrides(parser)
    options = parser.parse_args()
    overrides = ["classifier.val_every=0", *options.overrides]  # the plain loop does not validate
    print(harness.describe_machine())
    pairs = []
    for _ in range(options.repeats):
        pair = measure_pair(overrides)
        print_pair(pair)
        pairs.append(pair)

    trainings = statistics.median(pair.trainings_ratio for pair in pairs)
    total = statistics.median(pair.demo / pair.loop for pair in pairs)
    print(
        f"ratio {trainings:.2f} target at most {TARGET_TRAININGS}: "
        "time of the demo's trainings, relative to a plain loop"
    )
    print(
        f"ratio {total:.2f} target at most {TARGET}: "
        "wall time of the demo, relative to the same computations in a plain loop"
    )


if __name__ == "__main__":
    main()
