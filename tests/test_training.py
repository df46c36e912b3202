"""Training: schedules by hand, rates a layer, and one loop, on two workers or through a kill, to the same weights."""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images import Squares
from mcis.datasets.stream import Batch, PairDecoder, Share
from mcis.datasets.synthetic import draw
from mcis.datasets.tags import Tags
from mcis.datasets.voc import list_voc
from mcis.models.backbones import Backbone
from mcis.platform.config import ClassifierConfig, ComputeConfig, Optimiser
from mcis.platform.runtime import user_error_in
from mcis.platform.stages.train_classifier import ClassifierLearner
from mcis.platform.tracking import Tracker
from mcis.platform.training import STEPS, WEIGHTS, _StepLog, build_optimiser, fit, learning_rate, load_weights
from mcis.platform.workspace import Workspace

# --- rates


def factors(optimiser: Optimiser, steps: int, epoch_steps: int = 1) -> list[float]:
    return [learning_rate(optimiser, step, steps=steps, epoch=step // epoch_steps) for step in range(steps)]


def test_the_step_schedule_falls_at_the_start_of_its_epochs() -> None:
    schedule = Optimiser(schedule="step", step_epochs=(2, 3), step_factor=0.1)
    assert factors(schedule, 10, epoch_steps=2) == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01])
    assert factors(Optimiser(schedule="step"), 3) == [1, 1, 1]


def test_the_polynomial_schedule() -> None:
    schedule = Optimiser(schedule="poly", poly_power=0.9)
    assert factors(schedule, 4) == pytest.approx([1, 0.75**0.9, 0.5**0.9, 0.25**0.9])
    assert factors(Optimiser(schedule="poly", poly_power=2), 4) == pytest.approx([1, 0.5625, 0.25, 0.0625])


def test_the_cosine_schedule() -> None:
    assert factors(Optimiser(schedule="cosine"), 4) == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])


@pytest.mark.parametrize("schedule", ["step", "poly", "cosine"])
def test_a_warm_up_rises_in_a_line_to_the_whole_rate(schedule: Any) -> None:
    found = factors(Optimiser(schedule=schedule, warm_up=0.2), 20)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    # The rest is the schedule over what is left.
    assert found[4:] == pytest.approx(factors(Optimiser(schedule=schedule), 16))


def test_no_warm_up_goes_beyond_the_rate() -> None:
    for steps in range(1, 60):
        assert max(factors(Optimiser(schedule="cosine", warm_up=0.05), steps)) <= 1


def test_a_warm_up_over_all_steps() -> None:
    assert factors(Optimiser(schedule="cosine", warm_up=1.0), 4) == pytest.approx([0.25, 0.5, 0.75, 1])


class _Network(nn.Module):
    """A backbone with one pretrained and one new layer, a head, and a free matrix."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
        self.backbone = Backbone(body, channels=4, stride=1, new_layers=("body.1",))
        self.head = nn.Conv2d(4, 2, 1)
        self.w_p = nn.Parameter(torch.eye(4))


FACTORS = {
    "backbone.body.0.weight": 1.0,
    "backbone.body.0.bias": 2.0,
    "backbone.body.1.weight": 10.0,
    "backbone.body.1.bias": 20.0,
    "head.weight": 10.0,
    "head.bias": 20.0,
    "w_p": 10.0,
}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_each_parameter_has_the_recipes_rate(name: Any) -> None:
    """Backbone weights 1, their biases 2, new weights 10, new biases 20 (RECIPE)."""
    network = _Network()
    optimiser = build_optimiser(network, Optimiser(name=name, new_layer_rate=10, bias_rate=2, weight_decay=0.125))
    names = {id(parameter): key for key, parameter in network.named_parameters()}
    found = {names[id(p)]: group["factor"] for group in optimiser.param_groups for p in group["params"]}
    assert found == FACTORS
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(FACTORS)
    assert {group["weight_decay"] for group in optimiser.param_groups} == {0.125}
    assert type(optimiser) is {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]


def test_a_backbone_without_new_layers_is_pretrained_whole() -> None:
    network = _Network()
    network.backbone.new_layers = ()
    optimiser = build_optimiser(network, Optimiser(new_layer_rate=10))
    assert {len(group["params"]): group["factor"] for group in optimiser.param_groups} == {4: 1.0, 3: 10.0}


def test_sgd_has_its_momentum() -> None:
    groups = build_optimiser(_Network(), Optimiser(momentum=0.5, nesterov=True, learning_rate=0.25)).param_groups
    assert [(g["momentum"], g["nesterov"], g["lr"]) for g in groups] == [(0.5, True, 0.25)]


# --- files


class _Program:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_weights_are_loaded_as_they_were(tmp_path: Path) -> None:
    old, new = _Network(), _Network()
    torch.save(old.state_dict(), tmp_path / WEIGHTS)
    load_weights(new, tmp_path / WEIGHTS)
    for key, value in new.state_dict().items():
        assert torch.equal(value, old.state_dict()[key])


@pytest.mark.parametrize("content", ["none", "garbage", "cut", "other network", "other shape", "program"])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / WEIGHTS
    if content == "program":
        torch.save({"w_p": _Program(tmp_path / "ran")}, path)
    elif content == "other network":
        torch.save(nn.Linear(2, 2).state_dict(), path)
    elif content == "other shape":
        torch.save({**_Network().state_dict(), "w_p": torch.zeros(5, 5)}, path)
    elif content != "none":
        torch.save(_Network().state_dict(), path)
        path.write_bytes(b"PK garbage" if content == "garbage" else path.read_bytes()[:500])
    with pytest.raises(UserError, match=rf"{WEIGHTS} does not fit this configuration") as caught:
        load_weights(_Network(), path)
    assert "--from" in caught.value.remedy
    assert not (tmp_path / "ran").exists()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_step_log_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / STEPS
    log = _StepLog(path, 0)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": step / 7})
        assert steps_of(path)[-1] == step, "a line is there as soon as it is written"
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # a kill
    again = _StepLog(path, 20)
    assert path.read_text().splitlines() == before[:2]
    again.write({"step": 30, "loss": 0.0})
    assert steps_of(path) == [10, 20, 30]
    _StepLog(path, 0)
    assert path.read_text() == ""


# --- the loop


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A drawn data set of 24 images and a workspace with its MLflow store."""

    learner: ClassifierLearner
    workspace: Workspace

    def tracker(self, name: str) -> Tracker:
        return Tracker(self.workspace, self.workspace.run(name), name, identity=name)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    root = tmp_path_factory.mktemp("training")
    draw(root / "VOC2012", train=24, val=4, size=48, classes=4)
    rows = list_voc(root / "VOC2012", classes=root / "VOC2012/classes.txt").table.slice(0, 24)
    config = ClassifierConfig(
        backbone="small",
        channels=12,
        input_size=32,
        head="own",
        affinity="cosine",
        affinity_scale=10,
        affinity_init=1.0,
        self_pairs=("flip",),
        contrastive_from_epoch=1,
        contrastive_needs_unshared=True,
        colour_jitter=(0.3, 0.3, 0.3, 0.1),
        flip=True,
        shift=2,
        batch=5,
        epochs=4,
        optimiser=Optimiser(learning_rate=0.1, schedule="step", step_epochs=(3,), bias_rate=2, new_layer_rate=1.5),
    )
    learner = ClassifierLearner(
        config=config,
        seed=3,
        tags=Tags.of_index(rows["tags"], 4),
        source=None,
        pictures=Squares(rows["uri"].to_pylist(), config.input_size),
        pretrained=None,
    )
    assert learner.steps == 20
    return Surroundings(learner=learner, workspace=Workspace(root / "workspace"))


def plain_loop(learner: ClassifierLearner) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights after a training without Ray, and the loss terms of each step."""
    torch.manual_seed(learner.seed)
    network: Any = learner.model()
    network.to(memory_format=torch.channels_last)  # another order of sums is another last bit
    optimiser = build_optimiser(network, learner.optimiser)
    decode = learner.decoder(Share(0, 1, 0, learner.steps))
    terms = []
    for step in range(learner.steps):
        epoch = step * learner.batch // len(learner.pictures.uris)
        for group in optimiser.param_groups:
            group["lr"] = 0.1 * group["factor"] * (0.1 if epoch >= 3 else 1)
        losses = learner.losses(network, decode({"id": np.array([step])}), step, torch.device("cpu"))
        optimiser.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimiser.step()
        terms.append({name: float(value.detach()) for name, value in losses.items()})
    return network.state_dict(), terms


def trained(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)
    return weights


def test_the_plain_loop_does_train(here: Surroundings) -> None:
    """What the others are compared with: its losses fall, and the contrastive term is weighed as configured."""
    _, terms = plain_loop(here.learner)
    common, contrastive = (np.array([t[name] for t in terms]) for name in ("common", "contrastive"))
    assert common[15:].mean() < 0.95 * common[:5].mean()
    assert contrastive[15:].mean() < 0.8 * contrastive[5:10].max()
    assert (contrastive[:5] == 0).all(), "it begins with epoch 1"
    assert (contrastive[5:] > 0).all()


def test_a_side_without_an_unshared_label_in_the_whole_batch_has_no_contrastive_term(here: Surroundings) -> None:
    tags_m, tags_n = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 0]]), torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]])
    weights = here.learner._contrastive_weights
    assert weights(tags_m, tags_n, step=7).tolist() == [1, 0]
    assert weights(tags_n, tags_m, step=7).tolist() == [0, 1]
    assert weights(tags_n, tags_n, step=7).tolist() == [0, 0]
    assert weights(tags_m, tags_n, step=4).tolist() == [0, 0], "it begins with epoch 1"


@pytest.mark.parametrize("batch", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_two_workers_train_the_same_weights(here: Surroundings, tmp_path: Path, ray_local: None, batch: int) -> None:
    """Five pairs are three and two: gradients weigh pairs, not workers."""
    config = here.learner.config.model_copy(update={"batch": batch, "epochs": 2})
    learner = replace(here.learner, config=config)
    weights, terms = plain_loop(learner)
    tracker = here.tracker(f"batch-{batch}")
    result = fit(learner, tmp_path, ComputeConfig(workers=2, threads=1), tracker, label="classifier")
    assert result.steps == learner.steps
    found = trained(tmp_path)
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
    # What is logged is the whole batch's loss, not a worker's.
    records = [json.loads(line) for line in (tmp_path / STEPS).read_text().splitlines()]
    assert [r["step"] for r in records] == sorted({10, learner.steps})
    for record in records:
        expected = terms[record["step"] - 1]
        assert record["loss"] == pytest.approx(sum(expected.values()), rel=1e-4)
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert record["epoch"] == pytest.approx(record["step"] * batch / 24, abs=1e-3)
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [(m.step, m.value) for m in logged] == [(r["step"], r["loss"]) for r in records]


def test_a_training_that_was_killed_ends_in_the_same_bits(here: Surroundings, tmp_path: Path, ray_local: None) -> None:
    """Checkpoints after steps 8 and 16, a failure in step 13: the log's line of step 10 is cut off and comes again."""
    snapshot = "checkpoints/checkpoint_manager_snapshot.json"

    @dataclass(frozen=True, kw_only=True)
    class Failing(ClassifierLearner):
        """Writes down where its streams start, and fails once."""

        folder: Path

        def decoder(self, share: Share) -> PairDecoder:
            with (self.folder / "starts").open("a") as file:
                file.write(f"{share.start} ")
            return super().decoder(share)

        def losses(self, model: nn.Module, batch: Batch, step: int, device: torch.device) -> dict[str, Tensor]:
            if step == 13 and not (self.folder / "failed").exists():
                deadline = time.monotonic() + 60
                while not (self.folder / snapshot).exists() and time.monotonic() < deadline:
                    time.sleep(0.1)  # until the checkpoint is on record
                (self.folder / "failed").touch()
                raise RuntimeError("a node was lost")
            return super().losses(model, batch, step, device)

    learner = Failing(**vars(here.learner), folder=tmp_path)
    compute = ComputeConfig(threads=1, checkpoint_steps=8, max_failures=1)
    tracker = here.tracker("killed")
    result = fit(learner, tmp_path, compute, tracker, label="classifier")
    assert (tmp_path / "starts").read_text() == "0 8 "
    assert result.steps == 12
    weights, terms = plain_loop(here.learner)
    for key, value in trained(tmp_path).items():
        assert torch.equal(value, weights[key]), f"{key} differs by {(value - weights[key]).abs().max():.1e}"
    assert steps_of(tmp_path / STEPS) == [10, 20]
    logged = tracker.client.get_metric_history(tracker.run_id, "classifier.loss")
    assert [m.step for m in logged] == [10, 20]
    assert logged[1].value == pytest.approx(sum(terms[19].values()), rel=1e-6)


def test_a_file_that_vanishes_ends_a_training_with_the_users_error(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    pictures = here.learner.pictures
    uris = [*pictures.uris[:-1], str(tmp_path / "gone.jpg")]
    learner = replace(here.learner, pictures=Squares(uris, pictures.size))
    with pytest.raises(Exception, match=r"gone\.jpg cannot be read any more") as caught:
        fit(learner, tmp_path, ComputeConfig(max_failures=0), here.tracker("vanished"), label="classifier")
    known = user_error_in(caught.value)
    assert type(known) is UserError
    assert "Traceback" not in str(known)
    assert not (tmp_path / WEIGHTS).exists()


def test_a_loss_that_is_not_finite_stops_with_step_and_images(
    here: Surroundings, tmp_path: Path, ray_local: None
) -> None:
    wild = here.learner.config.optimiser.model_copy(update={"learning_rate": 1e30})
    learner = replace(here.learner, config=here.learner.config.model_copy(update={"optimiser": wild}))
    with pytest.raises(Exception, match="not finite") as caught:
        fit(learner, tmp_path, ComputeConfig(threads=1, max_failures=5), here.tracker("wild"), label="classifier")
    error = user_error_in(caught.value)
    assert error is not None
    assert "not finite at step" in error.found
    assert any(uri in error.found for uri in learner.pictures.uris)
    assert not (tmp_path / WEIGHTS).exists()
