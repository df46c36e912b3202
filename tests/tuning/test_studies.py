"""The study of related images as Ray Tune trials that share one classifier, children of one MLflow run."""

import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform.config.keys import leaves
from mcis.platform.config.maps import CoAttention
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import save_weights
from mcis.platform.runs.scores import Score, Scored
from mcis.tuning.studies import effect, references
from mcis.tuning.tables import (
    PAPER_EFFECT,
    PAPER_RELATED_IMAGES,
    Cell,
    caption,
    effect_picture,
    effect_table,
    meaning_of_columns,
    related_images_table,
    scores_by_column,
)

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
    resolved = resolve("voc", "small", {"data.voc": "/data"}, ["seed=3", "classifier.optimizer.step_epochs=[2]"])
    assert resolved.changed() == {"data.voc": "/data", "seed": 3, "classifier.optimizer.step_epochs": (2,)}
    again = resolve("voc", "small", resolved.changed())
    assert again.config == resolved.config


def drawn(root: Path) -> dict[str, str]:
    """Options that name a data set of 16 + 4 images, drawn below `root`."""
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    return {"data.voc": str(root), "data.classes": str(root / "classes.txt")}


PAPER = ("localize.method.name=co_attention",)


@pytest.mark.parametrize(
    ("study", "values", "until", "found"),
    [
        ("references", ("classifier.attention=none", "localize.related=0", *PAPER), "pseudo_masks", "by --set"),
        ("references", ("localize.related=3",), "pseudo_masks", "localize.related by --set"),
        ("references", (), "train_classifier", "--until train_classifier"),
        ("effect", ("classifier.attention=co", "localize.related=3"), "evaluate", "attention and localize.related by"),
        ("effect", ("localize.method.contrastive=true", *PAPER), "pseudo_masks", "trains no contrastive co-attention"),
        ("effect", ("weights.classifier=FILE",), "pseudo_masks", "does not fit this configuration"),
        ("effect", ("pseudo_masks.background=saliency", "data.saliency=absent"), "pseudo_masks", "16 of 16 training"),
        ("effect", ("data.masks=absent",), "pseudo_masks", "no image has a ground-truth mask"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_its_first_trial(
    tmp_path: Path, study: str, values: tuple[str, ...], until: str, found: str
) -> None:
    options = drawn(tmp_path / "VOC2012")
    model = build_classifier(resolve("voc", "small").config.classifier, 2)
    save_weights(model, tmp_path / "mine.pt", {})  # of co+contrastive, which fits one of the trainings
    told = [value.replace("FILE", str(tmp_path / "mine.pt")) for value in values]
    resolved = resolve("voc", "small", options, told)
    how: Any = functools.partial(effect, seeds=1) if study == "effect" else references
    with pytest.raises(UserError, match=found):
        how(resolved, tmp_path / "w", "study", until=until, parallel=1)
    assert not list((tmp_path / "w" / "runs").iterdir())


def test_related_images_without_co_attention_are_refused_before_the_first_trial(tmp_path: Path) -> None:
    values = ["classifier.attention=none", "localize.method.name=evidence"]
    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), values)
    paper = resolved.config.localize.model_copy(update={"method": CoAttention()})
    config = resolved.config.model_copy(update={"localize": paper})
    origins = {key: resolved.origins.get(key, "default") for key, _ in leaves(config)}
    other = Resolved(config, {**origins, "localize.method.name": "--set"})
    with pytest.raises(UserError, match=r"attention is none, which has no"):
        references(other, tmp_path / "w", "study", until="pseudo_masks", parallel=1)


def test_the_table_has_a_row_a_number_and_the_papers_column() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(related_images_table([Cell("co", 0, {"pseudo masks": [12.345]}), Cell("co", 3, {})], "title"))
    rows = [line for line in capture.get().splitlines() if "│" in line][-2:]
    assert "12.3" in rows[0]
    assert str(PAPER_RELATED_IMAGES[0]) in rows[0]
    assert str(PAPER_RELATED_IMAGES[3]) in rows[1]


def test_the_table_of_effects_has_mean_and_deviation_and_only_columns_that_were_reached() -> None:
    from rich.console import Console

    cells = [
        Cell("none", 0, {"pseudo masks": [10.0, 12.0]}),
        Cell("co+contrastive", 3, {"pseudo masks": [20.0, 20.0], "segmentation, CRF": [30.0, 33.0]}),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(effect_table(cells, "title"))
    head, *rows = [line for line in capture.get().splitlines() if "┃" in line or "│" in line]
    assert "pseudo masks" in head
    assert "maps" not in head.replace("pseudo masks", "")
    assert "11.00 ±1.41" in rows[0]
    assert str(PAPER_EFFECT["none", 0]) in rows[0]
    assert "20.00 ±0.00" in rows[1]
    assert "31.50 ±2.12" in rows[1]
    assert "66.2" in rows[1]


def score(what: Scored, miou: float, **meaning: Any) -> Score:
    of_all: dict[str, Any] = {"name": "any", "split": "train", "images": 9, "iou": {}}
    origin: dict[str, Any] = {"seed": 0, "recipe": "small", "weights": "none", "git": "abc"}
    return Score(what=what, miou=miou, **of_all | origin | meaning)


def test_a_column_of_a_study_says_what_it_means() -> None:
    masks: dict[str, Any] = {"background_cue": "saliency", "map_scale": "range"}
    alone = [score("localization_maps", 40.0, related=0), score("pseudo_masks", 50.0, related=0, **masks)]
    of_val: dict[str, Any] = {"split": "val", "images": 4, "scales": (1.0,), "mirror": True}
    several = [
        score("localization_maps", 40.0, related=0),
        score("localization_maps", 45.0, related=3, method="paper"),
        score("pseudo_masks", 60.0, related=3, method="paper", **masks),
        score("segmentation", 70.0, crf=True, **of_val),
    ]
    trials = [scores_by_column(alone, 0), scores_by_column(several, 3)]
    assert [{column: of.miou for column, of in trial.items()} for trial in trials] == [
        {"localization maps": 40.0, "pseudo masks": 50.0},
        {"localization maps": 45.0, "pseudo masks": 60.0, "segmentation, CRF": 70.0},
    ]
    means = meaning_of_columns([{k: v for k, v in trial.items() if k != "localization maps"} for trial in trials])
    assert means["pseudo masks"]["method"] == ["paper"]
    assert means["pseudo masks"]["git"] == ["abc"]
    assert (means["pseudo masks"]["images"], means["segmentation, CRF"]["images"]) == (["9"], ["4"])
    assert caption(means) == (
        "pseudo masks: split train, images 9, background cue saliency, map scale range, method paper; "
        "segmentation, CRF: split val, images 4, scales 1, mirror yes, CRF yes"
    )


def test_a_study_without_a_finished_trial_still_has_a_picture(tmp_path: Path) -> None:
    effect_picture([], tmp_path / "none.png", "name", caption({}))
    assert (tmp_path / "none.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_effects_over_trainings_and_related_images(ray_local: None, tmp_path: Path) -> None:
    """Every cell for every seed, the training without co-attention as the control of evidence."""
    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), TINY)
    workspace = tmp_path / "workspace"
    cells = effect(resolved, workspace, "study", seeds=1, until="pseudo_masks", parallel=2)
    assert [(c.attention, c.related) for c in cells] == [
        (attention, related) for attention in ("none", "co", "co+contrastive") for related in (0, 1, 3, 5)
    ]
    assert all(set(c.miou) == {"localization maps", "pseudo masks"} and len(c.miou["pseudo masks"]) == 1 for c in cells)
    assert len(list((workspace / "store").glob("train_classifier-*"))) == 3
    assert (workspace / "runs" / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    assert written["cells"] == [asdict(cell) for cell in cells]
    assert (written["study"], written["recipe"], written["changed"]["compute.threads"]) == ("effect", "small", 1)
    assert written["means"]["localization maps"]["method"] == ["evidence 6"]
    few = {"trainings": ("none", "co"), "related": (3,), "seeds": 1, "until": "pseudo_masks", "parallel": 2}
    some = effect(resolved, workspace, "some", **few)  # type: ignore[arg-type]
    assert [cell for cell in cells if cell.attention != "co+contrastive" and cell.related == 3] == some


@pytest.mark.slow
def test_a_study_keeps_the_table_of_the_trials_that_ended_well(ray_local: None, tmp_path: Path) -> None:
    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), TINY)
    workspace = tmp_path / "workspace"
    references(resolved, workspace, "study", until="pseudo_masks", parallel=2)
    shutil.rmtree(workspace / "runs" / "study")
    for folder in (workspace / "store").glob("pseudo_masks-*"):
        shutil.rmtree(folder)
    for path in (tmp_path / "VOC2012" / "SaliencyMaps").iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(UserError, match="6 of 6 trials failed") as caught:
        references(resolved, workspace, "study", until="pseudo_masks", parallel=2)
    assert "then repeat the command" in caught.value.remedy
    assert json.loads((workspace / "runs" / "study" / "study.json").read_text())["cells"] == []


@pytest.mark.slow
def test_trials_share_the_classifier_and_are_children_of_one_run(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    resolved = resolve("voc", "small", drawn(tmp_path / "VOC2012"), TINY)
    workspace = tmp_path / "workspace"
    references(resolved, workspace, "study", until="pseudo_masks", parallel=2)
    shown = capsys.readouterr().out
    assert all(f"study study: {done}/6" in shown for done in range(1, 7)), shown

    assert len(list((workspace / "store").glob("train_classifier-*"))) == 1
    assert len(list((workspace / "store").glob("localize-*"))) == 6
    written = json.loads((workspace / "runs" / "study" / "study.json").read_text())
    assert [cell["related"] for cell in written["cells"]] == list(range(6))
    assert all(set(cell["miou"]) == {"localization maps", "pseudo masks"} for cell in written["cells"])
    assert (workspace / "runs" / "study" / "study.png").read_bytes()[:4] == b"\x89PNG"
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mcis")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parent = next(r for r in runs if r.info.run_name == "study")
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(r.data.params["localize.related"] for r in children) == [str(r) for r in range(6)]
    assert all(r.info.status == "FINISHED" for r in runs)
