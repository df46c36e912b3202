"""How much of the gradient that reaches a backbone comes through the attention between the images of a pair.

At the classifier of a run, whose backbone is taken to learn: of batches of its training pairs, the gradient of each
term on the backbone's trained weights; the part that comes through the attention's weights, which is what is lost where
the features that they are made of are held; and its share of the basic term's and the term's gradient, along that sum.
Control: images that attend to themselves.
"""

from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from torch import Tensor

from mcis.datasets.images.squares import Squares
from mcis.datasets.sampling.batch_stream import WorkerShard
from mcis.datasets.tags import Tags
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.losses import pair_losses
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.classifier_learner import ClassifierLearner
from mcis.platform.networks.build import build_classifier, freeze, load_trained
from mcis.platform.outputs.read_index import of_split, open_index
from mcis.platform.runs.workspace import Workspace


class Held(CoAttentionClassifier):
    """A classifier whose attention can be held: no gradient passes through its weights then."""

    held = False

    def _coattend(self, m: Tensor, n: Tensor, *others: Any) -> Any:
        return super()._coattend(*((m.detach(), n.detach()) if self.held else (m, n)), *others)


def gradients(model: Any, m: Tensor, n: Tensor, tags: list[Tensor], weight: float, **options: Any) -> dict[str, Tensor]:
    """The gradient of each term on the backbone's trained weights, as one vector."""
    trained = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
    terms = pair_losses(model.pair_scores(m, n, **options), *tags, loss_reduction="paper")
    of = {"basic": terms["basic"], "common": terms["common"]}
    if "contrastive_m" in terms:
        of["contrastive"] = weight * (terms["contrastive_m"] + terms["contrastive_n"])
    found = {}
    for name, values in of.items():
        parts = torch.autograd.grad(values.sum(), trained, retain_graph=True)
        found[name] = torch.cat([part.flatten() for part in parts])
    return found


def main() -> None:
    """Prints mean and standard error over the batches."""
    parser = machine.arguments(__doc__, seeds=1)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--name", required=True, help="a run that has trained a classifier with attention")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--set", action="append", default=["classifier.trained=3"], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    workspace = Workspace(arguments.workspace)
    config = resolve(file=workspace.run(arguments.name).path / "config.toml", assignments=arguments.set).config
    c, opened = config.classifier, open_index(workspace, arguments.name)
    rows = of_split(opened.index, "train", tagged=True)
    tags = Tags.of_index(rows["tags"], len(opened.classes))
    images = Squares(rows["uri"].to_pylist(), c.input_size, hashes=rows["content_hash"].to_pylist())
    learner = ClassifierLearner(
        config=c, seed=config.seed, tags=tags, source=None, images=images, pretrained=None, statistics=None
    )
    model: Any = build_classifier(c, tags.classes)
    load_trained(model, workspace.outputs(arguments.name)["train_classifier"])
    model.__class__ = Held
    freeze(model, c)
    decode = learner.decoder(WorkerShard(0, 1, 0, arguments.batches))
    rows_of: dict[str, list[list[float]]] = {}
    for step in range(arguments.batches):
        batch = decode(np.array([step]))
        of_images = [torch.from_numpy(tags.matrix(index)).float() for index in (batch.m, batch.n)]
        images_m, images_n, _ = learner._images(batch, torch.device("cpu"))
        m, n = model.features(torch.cat([images_m, images_n])).chunk(2)
        for attended in ("partner", "itself"):
            model.held = False
            whole = gradients(model, m, n, of_images, c.contrastive_weight, attended=attended)
            model.held = True
            held = gradients(model, m, n, of_images, c.contrastive_weight, attended=attended)
            for term in whole.keys() - {"basic"}:
                full, through = whole[term], whole[term] - held[term]
                both = whole["basic"] + full
                figures = (
                    full.norm() / whole["basic"].norm(),
                    through.norm() / full.norm(),
                    through @ both / (both @ both),
                )
                rows_of.setdefault(f"{term}, {attended}", []).append(list(map(float, figures)))
    print(machine.describe())
    print("term, attending to: its length (basic = 1); of it through the attention; share of both terms' gradient")
    for name, values in sorted(rows_of.items()):
        mean, error = np.mean(values, axis=0), np.std(values, axis=0, ddof=1) / len(values) ** 0.5
        print(f"{name:24}" + "".join(f"  {a:6.3f} +-{b:.3f}" for a, b in zip(mean, error, strict=True)))


if __name__ == "__main__":
    main()
