"""What orchestration costs: the demo's wall time over the same computing in a plain loop.

The loop runs the demo's stages with the same numerics, drawn numbers and files, in one process without Ray, MLflow,
progress bars and report, torch on all cores in training. Both sides begin with an empty workspace and the embedded
data drawn.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
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
from mcis.platform.outputs.relations import VECTORS, draw_relations, read_vectors
from mcis.platform.runs.files import write_table
from mcis.platform.runs.listing import listing
from mcis.platform.stages import predict, pseudo_masks
from mcis.platform.stages.evaluation.scoring import ScoreTrain, count_predictions
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, relate_rows
from mcis.platform.stages.train_affinity import make_labels

TARGET, TARGET_OF_TRAININGS = 1.2, 1.05
TRAININGS = ("train_classifier", "train_affinity", "train_segmenter")
SHARD = 64


def train(learner: Learner[Any], folder: Path) -> None:
    """The training loop of one process, decoding as it goes."""
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
        terms = learner.loss_sums(model, batch, step, torch.device("cpu"))
        loss = torch.stack(list(terms.values())).sum() / learner.count(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The demo without orchestration; each method computes a stage.

    Attributes:
        rows, val_rows: of the index, the tagged training images and the val images.
        tags: of the training images.
    """

    config: Config
    folder: Path
    classes: int
    rows: pa.Table
    val_rows: pa.Table
    tags: Tags

    @property
    def features(self) -> Features:
        """What the frozen backbone makes of the training images."""
        shape = features_shape(self.config.classifier)
        return Features(self.rows["uri"].to_pylist(), self.folder / "features", shape)

    @classmethod
    def index(cls, config: Config, folder: Path) -> "Plain":
        listed = listing(config)
        verified = check_images(listed.table, min_side=config.data.min_side)
        rows, val_rows = (verified.filter(pc.equal(verified["split"], split)) for split in ("train", "val"))
        tags = Tags.from_index(rows["tags"], len(listed.classes))
        return cls(config=config, folder=folder, classes=len(listed.classes), rows=rows, val_rows=val_rows, tags=tags)

    def train_classifier(self) -> None:
        config, n = self.config.classifier, len(self.rows)
        make = MakeFeatures(config, bundled_weights(config.backbone), False, 2)
        for first in range(0, n, SHARD):
            shard = self.folder / "features" / f"part-{first:08d}-{min(first + SHARD, n):08d}.arrow"
            write_table(shard, make(self.rows.slice(first, SHARD)))
        sample = np.sort(permuted(OrderPurpose.STATISTICS, self.config.seed, 0, n, np.arange(min(256, n))))
        learner = ClassifierLearner(
            config=config,
            seed=self.config.seed,
            tags=self.tags,
            source=None,
            images=self.features,
            pretrained=bundled_weights(config.backbone),
            statistics=self.features.statistics(sample),
        )
        train(learner, self.folder / "classifier")

    def localize(self) -> None:
        config, folder, rows = self.config, self.folder, self.rows
        no_source = np.zeros(len(rows), bool)
        network = config, folder / "classifier", self.classes
        embed = Embed(*network, self.features, folder)
        write_table(folder / "single" / "part-000000.parquet", embed(embed_rows(rows)))
        vectors = read_vectors(folder / VECTORS)
        relations = draw_relations(config.localize, config.seed, self.tags, no_source, vectors)
        hops = config.localize.hops
        for hop in range(1, hops + 1):
            related = Relate(*network, folder, no_source, hop)(relate_rows(rows, relations, hops))
        write_table(folder / "maps" / "part-000000.parquet", related)

    def train_affinity(self) -> None:
        config, maps = self.config, Shards(self.folder / "maps")
        write_table(self.folder / "labels" / "part-000000.parquet", make_labels(config, self.classes, maps, self.rows))
        learner = AffinityLearner(
            config=config.affinity_net,
            seed=config.seed,
            masked=self._masked(Shards(self.folder / "labels", ["mask"])),
            pretrained=bundled_weights(self.config.affinity_net.backbone),
        )
        train(learner, self.folder / "affinity_net")

    def _masked(self, masks: Shards) -> MaskedImages:
        ids, uris = (self.rows[column].to_pylist() for column in ("image_id", "uri"))
        return MaskedImages(ids, uris, masks, self.config.data.max_side)

    def pseudo_masks(self) -> None:
        affinities = self.folder / "affinity_net" if self.config.uses_random_walk else None
        make = pseudo_masks.MakeMasks(self.config, self.classes, Shards(self.folder / "maps"), affinities, False)
        write_table(self.folder / "masks" / "part-000000.parquet", make(self.rows))

    def train_segmenter(self) -> None:
        learner = SegmenterLearner(
            config=self.config.segmenter,
            seed=self.config.seed,
            classes=self.classes,
            masked=self._masked(Shards(self.folder / "masks")),
            pretrained=bundled_weights(self.config.segmenter.backbone),
        )
        train(learner, self.folder / "segmenter")

    def predict(self) -> None:
        names = tuple(f"class {k}" for k in range(self.classes))
        predicted = predict.PredictRows(self.config, self.folder / "segmenter", names)(self.val_rows)
        write_table(self.folder / "predictions" / "part-000000.parquet", predicted)

    def evaluate(self) -> None:
        single, maps, masks = (Shards(self.folder / name) for name in ("single", "maps", "masks"))
        positions = pa.array(np.arange(len(self.rows)), pa.int64())
        c = self.config.evaluate
        score = ScoreTrain(
            classes=self.classes,
            bins=c.thresholds,
            scale=self.config.maps.scale,
            seed=self.config.seed,
            single=single,
            related=maps,
            masks=masks,
        )
        score(self.rows.append_column("position", positions))
        count_predictions(self.classes, Shards(self.folder / "predictions"), self.val_rows)


def plain_loop(config: Config, folder: Path) -> dict[str, float]:
    """Seconds of each stage without orchestration."""
    torch.set_num_threads(machine.cores())
    began = time.perf_counter()
    plain = Plain.index(config, folder)
    seconds = {"index": time.perf_counter() - began}
    for stage in (
        plain.train_classifier,
        plain.localize,
        plain.train_affinity,
        plain.pseudo_masks,
        plain.train_segmenter,
        plain.predict,
        plain.evaluate,
    ):
        began = time.perf_counter()
        stage()
        seconds[stage.__name__] = time.perf_counter() - began
    return seconds


def main() -> None:
    """Runs both sides in turn and prints the ratio of their medians' pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in `mcis demo --set`")
    arguments = parser.parse_args()
    overrides = ["classifier.val_every=0", *arguments.set]  # the plain loop does not validate
    print(machine.describe())
    ratios, trainings = [], []
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            workspace = Path(folder) / "workspace"
            config = demo_configuration(workspace, overrides).config
            plain = Path(folder) / "plain"
            plain.mkdir()
            stages = plain_loop(config, plain)
            began = time.perf_counter()
            command = [sys.executable, "-m", "mcis.platform.cli", "demo", "--workspace", str(workspace)]
            for assignment in overrides:
                command += ["--set", assignment]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            wall = time.perf_counter() - began
            spent = machine.stage_seconds(workspace / "runs" / "demo")
        total = sum(stages.values())
        ratios.append(wall / total)
        trainings.append(sum(spent[stage] for stage in TRAININGS) / sum(stages[stage] for stage in TRAININGS))
        print(f"\npair {repeat + 1}: demo {wall:.1f} s, plain loop {total:.1f} s, ratio {ratios[-1]:.2f}", flush=True)
        print(f"{'stage':18}{'demo s':>10}{'loop s':>10}{'difference':>12}")
        for stage, seconds in stages.items():
            print(f"{stage:18}{spent[stage]:10.1f}{seconds:10.1f}{spent[stage] - seconds:12.1f}")
        rest = wall - sum(spent.values())
        print(f"{'start, report, end':18}{rest:10.1f}{0:10.1f}{rest:12.1f}")
    print()
    of_trainings, of_all = statistics.median(trainings), statistics.median(ratios)
    print(f"ratio {of_trainings:.2f} target at most {TARGET_OF_TRAININGS}: the demo's trainings over a plain loop's")
    print(f"ratio {of_all:.2f} target at most {TARGET}: the demo's wall time over the same computing in a plain loop")


if __name__ == "__main__":
    main()
