"""The recipes `paper` and `released` run whole, and their maps and masks are those of a straight-line script.

All published values are used except sizes of images, numbers of steps and the classifier's learning rate: backbones are
random files, which diverge at the published one. `test_lid.py` runs the recipe `lid`.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mcis.datasets.images.decode import decode_square
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.models.registry import BACKBONES
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.weights_files import WEIGHTS
from mcis.platform.outputs.relations import relations_of_run
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.workspace import Workspace

SIDE = 64
"""Side of the synthetic images, pixels."""
INPUT = 32
"""Side of the classifier's input, pixels."""
SHRUNK = (
    "seed=1",
    "compute.gpu=false",
    "compute.threads=2",
    "compute.shard_rows=8",
    "compute.stop_if_not_learning=false",
    "data.min_side=16",
    f"classifier.input_size={INPUT}",
    "classifier.epoch_pairs=5",
    "classifier.optimizer.learning_rate=1e-5",
    "segmenter.crop=33",
    "segmenter.min_steps=1",
    "predict.crop=97",
    "report.panels=2",
    "tracking.model=false",
)
"""Sizes, numbers of steps, a low learning rate, and no GPU."""
EPOCHS = {
    "paper": ("classifier.epochs=2",),
    "released": ("classifier.epochs=4", "classifier.stop_epoch=2"),  # the contrastive loss starts in epoch 2
}
"""Epochs of one step."""
GAIN = 1.3
"""Factor of the random weights of VGG-16. With larger features, attention is not uniform and maps are not constant."""
STRAIGHT_LINE = Path(__file__).with_name("straight_line.py")


def straight_line() -> Any:
    """The module of the straight-line script, which uses nothing of the project."""
    assert "mcis" not in STRAIGHT_LINE.read_text()
    spec = importlib.util.spec_from_file_location("straight_line", STRAIGHT_LINE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Values of a synthetic devkit, of single-label and web images with saliency maps, and of random weights."""
    folder = tmp_path_factory.mktemp("published")
    synthetic.draw(folder / "VOC2012", train=12, val=2, size=SIDE, classes=8)
    listing = list_voc(folder / "VOC2012", classes=folder / "VOC2012" / "classes.txt")
    rows = [row for row in listing.table.to_pylist() if row["split"] == "train"]
    values: dict[str, Any] = {"data.voc": str(folder / "VOC2012"), "data.classes": str(folder / "VOC2012/classes.txt")}

    for source, changed_pixel in (("single", (1, 2, 3)), ("web", (4, 5, 6))):
        for row in rows[:6]:
            path = Path(listing.classes[row["tags"][0]]) / f"{row['image_id']}.png"
            (folder / source / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{source}-saliency" / path).parent.mkdir(parents=True, exist_ok=True)
            with Image.open(row["uri"]) as image:
                image.putpixel((0, 0), changed_pixel)
                image.save(folder / source / path)
            shutil.copy(row["saliency_uri"], folder / f"{source}-saliency" / path)
        values[f"data.{source}.root"] = str(folder / source)
        values[f"data.{source}.saliency"] = str(folder / f"{source}-saliency")

    torch.manual_seed(0)
    vgg16 = BACKBONES["vgg16"]().body.state_dict()
    weights = {name: GAIN * weight for name, weight in vgg16.items() if "extra_convs" not in name}
    torch.save(weights, folder / "vgg16.pth")
    torch.save(BACKBONES["resnet101"]().body.state_dict(), folder / "resnet101.pth")
    values["weights.classifier_backbone"] = str(folder / "vgg16.pth")
    values["weights.segmenter_backbone"] = str(folder / "resnet101.pth")
    return values


def example_of(module: Any, row: dict[str, Any]) -> Any:
    """An image of the index as the straight-line script takes it."""
    with Image.open(row["saliency_uri"]) as saliency:
        return module.Example(
            square=decode_square(Path(row["uri"]).read_bytes(), INPUT),
            is_source=row["domain"] == "source",
            height=row["height"],
            width=row["width"],
            saliency=np.array(saliency),
        )


@pytest.mark.parametrize(
    ("recipe", "sources"),
    [
        ("paper", "voc"),
        pytest.param("paper", "voc+single", marks=pytest.mark.slow),
        pytest.param("released", "voc+single+web", marks=pytest.mark.slow),
    ],
)
def test_maps_and_masks_are_those_of_a_straight_line(
    ray_local: None, drawn: dict[str, Any], tmp_path: Path, recipe: str, sources: str
) -> None:
    extra_sources = {"single", "web"} - {*sources.split("+")}
    values = {key: value for key, value in drawn.items() if key.split(".")[1] not in extra_sources}
    resolved = resolve(sources, recipe, values, [*SHRUNK, *EPOCHS[recipe]])
    result = pipeline.run(resolved, Workspace(tmp_path), "run")
    assert {score.output for score in result.scores} >= {"localization_maps", "pseudo_masks", "segmentation"}

    with torch.inference_mode():
        compare(resolved.config, result.context)


def compare(config: Any, context: RunContext) -> None:
    """Compares all maps of a run with those of the straight-line script, and the masks with those of the same maps.

    A small rounding of a map changes many labels where the map is nearly constant, so masks are made from stored maps.
    """
    module = straight_line()
    state = torch.load(context.stage_outputs["train_classifier"] / WEIGHTS, weights_only=True)["state_dict"]
    classifier = module.Classifier(state, released=config.recipe == "released")
    relations = relations_of_run(config, context)
    assert relations
    rows = relations.rows.to_pylist()
    examples = [example_of(module, row) for row in rows]
    maps = Shards(context.stage_outputs["localize"] / "maps")
    masks = Shards(context.stage_outputs["pseudo_masks"] / "masks")

    tolerance = 1.2 / 255 if config.recipe == "released" else None  # 8 bits, stored as float16
    spreads: list[float] = []
    pixels = 0
    foreground = 0
    differing = {"labels": 0, "mask": 0}
    for position, row in enumerate(rows):
        expected: dict[int, torch.Tensor] = {}
        for tag, related in relations.maps_of(position):
            expected[tag] = classifier.map(examples[position], [examples[other] for other in related], tag)
        stored = stored_maps(maps, row["image_id"])
        spreads += check_maps(stored, expected, tolerance)

        pixels += row["height"] * row["width"]
        columns = masks.rows(row["image_id"])
        for column, expected_labels in module.pseudo_mask(stored, examples[position]).items():
            labels = decode_labels(columns[column][0].as_py())
            differing[column] += int((labels != expected_labels).sum())
            foreground += int((labels > 0).sum())
    assert np.mean(spreads) > 0.2, "nearly constant maps would show nothing"
    assert foreground > 0.05 * pixels
    assert max(differing.values()) <= 1e-3 * pixels, differing


def stored_maps(maps: Shards, image_id: str) -> dict[int, torch.Tensor]:
    """The maps of an image by class, (H, W) each."""
    stored = image_maps(maps, image_id)
    return dict(zip(stored.classes.tolist(), torch.from_numpy(stored.maps), strict=True))


def check_maps(
    found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor], tolerance: float | None
) -> list[float]:
    """Compares the maps of an image.

    Args:
        found: The maps by class, (H, W) each.
        expected: The expected maps.
        tolerance: Largest difference. None: relative to the largest value of a map.

    Returns:
        The range of the values of each expected map, as a share of its largest value.
    """
    assert found.keys() == expected.keys()
    spreads = []
    for tag, expected_map in expected.items():
        largest = max(float(expected_map.abs().max()), 1e-6)
        spreads.append(float(expected_map.max() - expected_map.min()) / largest)
        max_difference = 2e-3 * largest if tolerance is None else tolerance
        torch.testing.assert_close(found[tag], expected_map, rtol=0, atol=max_difference)
    return spreads
