"""A training of 20 updates of a small network, which the tests of trainings share."""

from collections.abc import Callable

import pytest

from mcis.datasets.images.squares import Squares
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic.devkit import draw
from mcis.datasets.tags import Tags
from mcis.models.affinity import Affinity
from mcis.platform.config.training import ClassifierConfig, LossesConfig, Optimizer
from mcis.platform.learners.classifier_learner import ClassifierLearner
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ClassifierLearner:
    """Trains a small network for 20 updates on 24 synthetic images, with 8 validation images."""
    root = tmp_path_factory.mktemp("training") / "VOC2012"
    draw(root, train=24, val=8, size=48, classes=4)
    rows = list_voc(root, classes=root / "classes.txt").table.slice(0, 24)
    config = ClassifierConfig(
        backbone="small",
        channels=12,
        input_size=32,
        head="own",
        affinity=Affinity(form="cosine", scale=10, init=1.0),
        self_pairs=("hflip",),
        attention_epochs=3,
        losses=LossesConfig.model_validate({"contrastive": {"weight": 1.5, "from_epoch": 2, "needs_unshared": True}}),
        color_jitter=(0.3, 0.3, 0.3, 0.1),
        hflip=True,
        shift=2,
        batch=5,
        epochs=4,
        optimizer=Optimizer(learning_rate=0.1, schedule="step", step_epochs=(3,), bias_rate=2, new_layer_rate=1.5),
    )
    tags, images = Tags.from_index(rows["tags"], 4), Squares(rows["uri"].to_pylist(), config.input_size)
    return ClassifierLearner(config=config, seed=3, tags=tags, is_source=None, images=images, pretrained=None)


@pytest.fixture(scope="session")
def tracker_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tracker]:
    """Makes the tracker of a run of a workspace, by its name."""
    workspace = Workspace(tmp_path_factory.mktemp("tracked"))
    return lambda name: Tracker(workspace, name, identity=name)
