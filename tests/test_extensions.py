"""Another package adds a source, rules for masks and related images, a loss, a score and a stage, without a fork."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pyarrow.compute as pc
import pytest
from mlflow.tracking import MlflowClient

from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic.devkit import draw
from mcis.platform.runs.files import read_json

PACKAGE = '''
import json
from pathlib import Path

import numpy as np

from mcis.datasets.index import Listing
from mcis.datasets.sampling.related_images import RelatedImageRule
from mcis.datasets.section import LocalPath, Section
from mcis.datasets.sources.lists import listing_table
from mcis.datasets.sources.source import Source
from mcis.models.classifier_losses import LossConfig, LossInputs, classifier_loss
from mcis.models.pseudo_masks import MaskRule, PseudoMask


class CocoConfig(Section):
    """Images of a COCO file (source `coco`)."""

    annotations: LocalPath | None = None
    """The JSON file."""
    images: LocalPath | None = None
    """Folder of the images."""


def list_coco(annotations: Path, *, images: Path) -> Listing:
    content = json.loads(annotations.read_text())
    classes = tuple(sorted(category["name"] for category in content["categories"]))
    name_of = {category["id"]: category["name"] for category in content["categories"]}
    tags = {image["id"]: set() for image in content["images"]}
    for annotation in content["annotations"]:
        tags[annotation["image_id"]].add(classes.index(name_of[annotation["category_id"]]))
    rows = listing_table(
        image_id=[image["file_name"] for image in content["images"]],
        uri=[str(images / image["file_name"]) for image in content["images"]],
        domain="target",
        split="train",
        tags=[sorted(tags[image["id"]]) for image in content["images"]],
        mask_uri=[image["mask"] for image in content["images"]],
    )
    return Listing(rows, classes, ())


COCO = Source(
    lister=list_coco, location="annotations", help="A COCO file.", example="coco instances.json",
    location_kind="FILE", record=CocoConfig, defines_classes=True, recipe="scratch",
)


class StrictConfig(Section):
    """Values of the rule `strict`."""

    sure: float = 0.5
    """Minimum score of the class with the highest score."""


def strict(maps, *, sure):
    best = maps.scores.max(axis=0)
    labels = np.where(best > sure, maps.tags[maps.scores.argmax(axis=0)] + 1, 0).astype(np.uint8)
    return PseudoMask(labels, labels)


STRICT = MaskRule(make=strict, record=StrictConfig)
def next_image(query):
    return np.repeat((query.image[:, None] + 1) % len(query.tags), query.related, axis=1)


NEXT = RelatedImageRule(draw=next_image)


class SparsityConfig(LossConfig):
    """Penalty on large features (loss `sparsity`)."""

    power: float = 1.0
    """Exponent of the features."""


@classifier_loss(record=SparsityConfig)
def sparsity(inputs: LossInputs, *, power: float):
    features = inputs.features_m.flatten(1), inputs.features_n.flatten(1)
    return sum(values.abs().pow(power).mean(dim=1).sum() for values in features)


def dice(matrix):
    with np.errstate(invalid="ignore", divide="ignore"):
        return 200 * np.diagonal(matrix) / (matrix.sum(axis=0) + matrix.sum(axis=1))
'''
STAGE_MODULE = """
import sys

import pyarrow.compute as pc

from mcis.platform.runs.files import read_table, write_json
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.stage import Stage


def run(config, context):
    masks = read_table(context.stage_outputs["pseudo_masks"] / "masks", ["foreground"])
    foreground = round(pc.mean(masks["foreground"]).as_py(), 4)
    write_json(context.output / "foreground.json", foreground)
    return StageResult(counts={"mean foreground": foreground}, notes=(f"{foreground} of the masks is foreground",))


STAGE = Stage(name="foreground", module=sys.modules[__name__], needs=("index", "pseudo_masks"), uses_networks=False)
"""
ENTRIES = """
[mcis.sources]
coco = extra:COCO
[mcis.mask_rules]
strict = extra:STRICT
[mcis.related]
next = extra:NEXT
[mcis.losses]
sparsity = extra:sparsity
[mcis.scores]
dice = extra:dice
[mcis.stages]
foreground = extra_stage:STAGE
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """Returns an environment with the package, as pip would install it."""
    about = tmp_path / "package" / "extra-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    (about.parent / "extra.py").write_text(PACKAGE)
    (about.parent / "extra_stage.py").write_text(STAGE_MODULE)
    return os.environ | {"PYTHONPATH": str(about.parent), "COLUMNS": "200"}


def mcis(package: dict[str, str], *arguments: str) -> str:
    """Returns the output of a command of mcis with the package."""
    command = [sys.executable, "-c", "from mcis.platform.cli import main; main()", *arguments]
    done = subprocess.run(command, env=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_stage_follows_the_stages_it_needs(package: dict[str, str]) -> None:
    code = "from mcis.platform.pipeline import STAGE_NAMES; print(*STAGE_NAMES)"
    names = subprocess.check_output([sys.executable, "-c", code], env=package, text=True).split()
    assert names[names.index("pseudo_masks") + 1] == "foreground"
    assert names[-1] == "report"


def test_a_stage_that_needs_an_unknown_stage_is_refused(package: dict[str, str]) -> None:
    module = Path(package["PYTHONPATH"]) / "extra_stage.py"
    module.write_text(STAGE_MODULE.replace('"pseudo_masks")', '"masks")'))
    code = "import mcis.platform.pipeline"
    done = subprocess.run([sys.executable, "-c", code], env=package, capture_output=True, text=True)
    assert "'foreground' of an installed package" in done.stderr
    assert "needs index, masks" in done.stderr


def test_extensions_are_choices_of_the_configuration(package: dict[str, str]) -> None:
    shown = mcis(package, "config", "show", "coco", "--coco", "a.json", "--set", "pseudo_masks.rule=strict")
    assert "data.coco.images" in shown
    assert "pseudo_masks.strict.sure" in shown
    assert "classifier.losses.sparsity.power" in shown
    assert "--coco" in mcis(package, "run", "--help")


def test_a_stage_of_a_package_is_a_choice_of_the_command_line(package: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from mcis.platform.cli import main; main()"]
    options = ["run", "coco", "--coco", "a.json", "--name", "a", "--until"]
    known_stage = subprocess.run([*command, *options, "foreground"], env=package, capture_output=True, text=True)
    unknown_stage = subprocess.run([*command, *options, "background"], env=package, capture_output=True, text=True)
    assert "a.json" in known_stage.stderr
    assert "foreground" in unknown_stage.stderr


@pytest.mark.parametrize("stage", ["pseudo_masks", "train_classifier"])
def test_editing_an_extension_changes_the_stage_keys(package: dict[str, str], stage: str) -> None:
    folder = Path(package["PYTHONPATH"])
    (folder / "extra").mkdir()
    (folder / "extra.py").rename(folder / "extra" / "__init__.py")
    code = f"from mcis.platform.runs.version import code_of; print(code_of('mcis.platform.stages.{stage}'))"
    codes = []
    for text in ("", "OTHER = 1", "OTHER = 1"):
        (folder / "extra" / "rules.py").write_text(text)
        codes.append(subprocess.check_output([sys.executable, "-c", code], env=package))

    assert codes[0] != codes[1] == codes[2]


@pytest.mark.slow
def test_a_run_uses_extensions(package: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    draw(root, train=12, val=2, size=64, classes=3)
    listing = list_voc(root, classes=root / "classes.txt")
    rows = list(enumerate(listing.table.filter(pc.equal(listing.table["split"], "train")).to_pylist()))
    content = {
        "categories": [{"id": number, "name": name} for number, name in enumerate(listing.classes)],
        "images": [
            {"id": number, "file_name": f"{row['image_id']}.jpg", "mask": row["mask_uri"]} for number, row in rows
        ],
        "annotations": [{"image_id": number, "category_id": tag} for number, row in rows for tag in row["tags"]],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    values = ["pseudo_masks.rule=strict", "pseudo_masks.strict.sure=0.3", "localize.related_by=next"]
    values += ["localize.related=2", "classifier.epochs=1", "classifier.input_size=64", "segmenter.min_steps=2"]
    values += ["classifier.losses.sparsity.weight=0.5", "classifier.losses.sparsity.power=2"]
    values += [f"data.coco.images={root / 'JPEGImages'}", "compute.stop_if_not_learning=false"]
    overrides = [text for value in values for text in ("--set", value)]
    out = tmp_path / "work"
    run = ["run", "coco", "--coco", str(tmp_path / "coco.json"), "--name", "a", "--workspace", str(out)]
    mcis(package, *run, *overrides)
    (foreground,) = out.glob("store/foreground-*/foreground.json")

    assert 0 <= read_json(foreground) <= 1
    assert "of the masks is foreground" in (out / "runs" / "a" / "report.html").read_text()

    steps = [json.loads(line) for log in out.glob("store/train_classifier-*/steps.jsonl") for line in log.open()]

    assert steps
    assert all(step["sparsity"] > 0 for step in steps)

    scores = read_json(out / "runs" / "a" / "scores.json")["scores"]
    masks = next(score for score in scores if "pseudo" in score["output"])
    for label, iou in masks["iou"].items():
        assert masks["label_scores"]["dice"][label] == pytest.approx(200 * iou / (100 + iou), abs=0.02)
    assert_score_is_compared_and_tracked(package, out, masks["label_scores"]["dice"])


def assert_score_is_compared_and_tracked(package: dict[str, str], workspace: Path, dice: dict[str, float]) -> None:
    """`mcis compare` and MLflow have the mean of a registered score."""
    mean_dice = fmean(value for value in dice.values() if value is not None)
    shutil.copytree(workspace, workspace / "copy")
    runs = ["a", str(workspace / "copy" / "runs" / "a"), "--images", "0", "--workspace", str(workspace)]

    assert "mean dice" in mcis(package | {"COLUMNS": "400"}, "compare", *runs)

    differences = json.loads(mcis(package, "compare", *runs, "--json"))["differences"]
    (row,) = [row for row in differences if (row["scored"], row["measure"]) == ("pseudo masks", "mean_dice")]
    assert row["baseline"] == row["compared"] == pytest.approx(mean_dice, abs=0.01)

    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (tracked,) = client.search_runs(experiments)
    assert tracked.data.metrics["pseudo_masks.R 2.mean_dice"] == pytest.approx(mean_dice, abs=0.01)
