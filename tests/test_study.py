"""The study of related images as Ray Tune trials that share one classifier, children of one MLflow run."""

import json
from pathlib import Path

import pytest

from mcis.datasets import synthetic
from mcis.datasets.errors import UserError
from mcis.platform.settings import resolve
from mcis.tuning.studies import changed_values, effect, references
from mcis.tuning.tables import PAPER_EFFECT, PAPER_RELATED_IMAGES, Effect, effect_table, related_images_table

TINY = (
    "classifier.epochs=1",
    "classifier.channels=24",
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "pseudo_masks.smallest=0",
    "report.panels=2",
    "compute.threads=1",
)


def test_trials_are_told_only_what_differs_from_the_recipe() -> None:
    resolved = resolve("voc", "small", {"data.voc": "/data"}, ["seed=3", "classifier.optimiser.step_epochs=[2]"])
    assert changed_values(resolved) == {"data.voc": "/data", "seed": 3, "classifier.optimiser.step_epochs": (2,)}
    again = resolve("voc", "small", changed_values(resolved))
    assert again.config == resolved.config


def test_a_classifier_without_co_attention_is_refused(tmp_path: Path) -> None:
    resolved = resolve("voc", "small", {}, ["classifier.attention=none", "localize.related=0"])
    with pytest.raises(UserError, match=r"attention=none"):
        references(resolved, tmp_path, "study", until="pseudo_masks", parallel=1)


def test_the_table_has_a_row_a_number_and_the_papers_column() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(related_images_table({0: {"pseudo masks": 12.345}, 3: {}}, "title"))
    rows = [line for line in capture.get().splitlines() if "│" in line][-2:]
    assert "12.3" in rows[0]
    assert str(PAPER_RELATED_IMAGES[0]) in rows[0]
    assert str(PAPER_RELATED_IMAGES[3]) in rows[1]


def test_the_table_of_effects_has_mean_and_deviation_and_only_columns_that_were_reached() -> None:
    from rich.console import Console

    cells = [
        Effect("none", 0, {"pseudo masks": [10.0, 12.0]}),
        Effect("co+contrastive", 3, {"pseudo masks": [20.0, 20.0], "segmentation, CRF": [30.0, 33.0]}),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(effect_table(cells, "title"))
    head, *rows = [line for line in capture.get().splitlines() if "┃" in line or "│" in line]
    assert "pseudo masks" in head
    assert "localization maps" not in head
    assert "11.00 ±1.41" in rows[0]
    assert str(PAPER_EFFECT["none", 0]) in rows[0]
    assert "20.00 ±0.00" in rows[1]
    assert "31.50 ±2.12" in rows[1]
    assert "66.2" in rows[1]


def test_an_impossible_study_is_refused_before_its_first_trial(tmp_path: Path) -> None:
    """Contrastive features cannot be had of a training without the contrastive co-attention, one of the cells."""
    resolved = resolve("voc", "small", {}, ["localize.aggregation=paper", "localize.contrastive=true"])
    with pytest.raises(UserError, match="trains no contrastive co-attention"):
        effect(resolved, tmp_path, "study", seeds=1, until="pseudo_masks", parallel=1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_effects_over_trainings_and_related_images(ray_local: None, tmp_path: Path) -> None:
    """Every cell for every seed, the training without co-attention as the control of evidence."""
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    resolved = resolve("voc", "small", options, TINY)
    workspace = tmp_path / "workspace"
    cells = effect(resolved, workspace, "study", seeds=1, until="pseudo_masks", parallel=2)
    assert [(c.attention, c.related) for c in cells] == [
        (attention, related) for attention in ("none", "co", "co+contrastive") for related in (0, 1, 3, 5)
    ]
    assert all(set(c.miou) == {"localization maps", "pseudo masks"} and len(c.miou["pseudo masks"]) == 1 for c in cells)
    assert len(list((workspace / "store").glob("train_classifier-*"))) == 3
    assert (workspace / "runs" / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_trials_share_the_classifier_and_are_children_of_one_run(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    resolved = resolve("voc", "small", options, TINY)
    workspace = tmp_path / "workspace"
    references(resolved, workspace, "study", until="pseudo_masks", parallel=2)
    shown = capsys.readouterr().out
    assert all(f"study study: {done}/6" in shown for done in range(1, 7)), shown

    assert len(list((workspace / "store").glob("train_classifier-*"))) == 1
    assert len(list((workspace / "store").glob("localize-*"))) == 6
    written = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    assert sorted(written["related_images"]) == [str(r) for r in range(6)]
    assert all(set(row) == {"localization maps", "pseudo masks"} for row in written["related_images"].values())
    assert (workspace / "runs" / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parent = next(r for r in runs if r.info.run_name == "study")
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(r.data.params["localize.related"] for r in children) == [str(r) for r in range(6)]
    assert all(r.info.status == "FINISHED" for r in runs)
