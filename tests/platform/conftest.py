"""Fixtures of the platform's tests: a run of the small pipeline, synthetic runs, and a parser that checks pages."""

import dataclasses
import functools
import re
import shutil
import zlib
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.index import INDEX_SCHEMA, REJECTS_SCHEMA
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.models.counts import MASK_PARTS
from mcis.platform import pipeline
from mcis.platform.config.experiment import experiment_text
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, build_segmenter
from mcis.platform.networks.weights_files import WEIGHTS, save_weights
from mcis.platform.outputs.counts import COUNTS_SCHEMA, PREDICTED_IMAGES, TRAINING_IMAGES, mask_rows, sum_counts
from mcis.platform.outputs.tables import MASKS_SCHEMA, PREDICTIONS_SCHEMA
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table, write_json, write_table, write_text
from mcis.platform.runs.results import IndexResult, write_result
from mcis.platform.runs.scores import CURVES, SCORES
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.evaluation.scoring import Scorer, count_predictions

_NETWORKS = ["classifier.channels=24", "classifier.input_size=64", "classifier.batch=8", "segmenter.channels=24"]
TINY = [
    *_NETWORKS,
    "classifier.epochs=2",
    "localize.related=3",
    "pseudo_masks.min_foreground_fraction=0",
    "report.panels=4",
    "segmenter.min_steps=6",
    "segmenter.batch=4",
    "segmenter.width=16",
    "segmenter.crop=64",
    "compute.shard_rows=8",
    "compute.threads=1",
]
LOCALIZABLE = [
    *_NETWORKS,
    "classifier.epochs=4",
    "localize.related=3",
    "localize.extra_scales=[0.5]",
    "classifier.head=own",  # a layer of its own for co-attentive features, so that a mistaken one shows
    "compute.shard_rows=4",
    "compute.threads=1",
]


class Small:
    """Recipe `scratch` in seconds, on a synthetic devkit of 24 training and 6 val images of three classes.

    Attributes:
        root: The devkit.
        workspace: Of all runs.
    """

    def __init__(self, root: Path, workspace: Workspace) -> None:
        self.root = root
        self.workspace = workspace

    @functools.cached_property
    def first(self) -> pipeline.RunResult:
        """The whole pipeline as run `first`, with all outputs, scores and a report; once per session."""
        return self.run("first")

    def draw(self, folder: Path, val: int = 6) -> Path:
        """Draws another copy of the devkit, which a test may change."""
        synthetic.draw(folder / "VOC2012", train=24, val=val, size=64, classes=3)
        return folder / "VOC2012"

    def settings(self, *overrides: str, root: Path | None = None, recipe: str = "scratch") -> Resolved:
        """The configuration for this devkit or another one, with overrides `key=value`."""
        root = root or self.root
        options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
        return resolve("voc", recipe, options, [*(TINY if recipe == "scratch" else []), *overrides])

    def run(self, name: str, *overrides: str, root: Path | None = None, **options: Any) -> pipeline.RunResult:
        """Runs the pipeline with `settings`; `options` are passed to `pipeline.run`."""
        return pipeline.run(self.settings(*overrides, root=root), self.workspace, name, **options)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty workspace."""
    return Workspace(tmp_path / "workspace")


@pytest.fixture(scope="session")
def small(ray_local: None, mlflow_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The small pipeline, its devkit and its workspace, for the whole session."""
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    shutil.copy(mlflow_store, workspace.tracking_store)
    small_pipeline = Small(tmp_path_factory.mktemp("small") / "VOC2012", workspace)
    small_pipeline.draw(small_pipeline.root.parent)
    return small_pipeline


@dataclasses.dataclass(frozen=True)
class Localizable:
    """A small data set with a briefly trained classifier, on which the stage `localize` is run.

    Attributes:
        root: The devkit.
        context: Context of a run that has finished the stage `train_classifier`.
    """

    root: Path
    context: RunContext

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The classifier's weights."""
        return dict(
            torch.load(self.context.stage_outputs["train_classifier"] / WEIGHTS, weights_only=True)["state_dict"]
        )

    def config(self, *overrides: str) -> Config:
        """The configuration with overrides `key=value`."""
        options = {"data.voc": str(self.root), "data.classes": str(self.root / "classes.txt")}
        return resolve("voc", "scratch", options, [*LOCALIZABLE, *overrides]).config

    def into(self, part: Path) -> RunContext:
        """The context with which the stage writes to `part`."""
        part.mkdir(parents=True, exist_ok=True)
        return dataclasses.replace(self.context, output=part)

    def with_index(self, folder: Path, change: Callable[[int], dict[str, Any]]) -> "Localizable":
        """The same data set with another index: `change` returns new values of a row, given its number."""
        index = self.context.stage_outputs["index"]
        table = read_table(index / "index.parquet")
        rows = [row | change(number) for number, row in enumerate(table.to_pylist())]
        write_table(folder / "index.parquet", pa.Table.from_pylist(rows, schema=table.schema))
        shutil.copy(index / "summary.json", folder)
        return self._reading("index", folder)

    def classified(self, config: Config, folder: Path, **changes: torch.Tensor) -> "Localizable":
        """The same data set with the classifier of a configuration: its trained weights, some of them replaced."""
        model = build_classifier(config.classifier, len(self.context.classes))
        state = self.state | changes
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        save_weights(model, folder / WEIGHTS, {})
        return self._reading("train_classifier", folder)

    def _reading(self, stage: str, folder: Path) -> "Localizable":
        stage_outputs = {**self.context.stage_outputs, stage: folder}
        return Localizable(self.root, dataclasses.replace(self.context, stage_outputs=stage_outputs))


@pytest.fixture(scope="session")
def localizable(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Localizable:
    """A run on 30 synthetic images of four classes that has finished the stage `train_classifier`."""
    folder = tmp_path_factory.mktemp("localize")
    root = folder / "VOC2012"
    synthetic.draw(root, train=30, val=4, size=64, classes=4)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    resolved = resolve("voc", "scratch", options, LOCALIZABLE)
    run = pipeline.run(resolved, Workspace(folder / "workspace"), "run", until="train_classifier")
    return Localizable(root, run.context)


class SyntheticImage(NamedTuple):
    """A synthetic image of a scored run.

    Attributes:
        id: id of the image.
        photo: File of the image.
        mask: File of its ground truth.
        tag: Index of its class.
        truth: Ground truth, (H, W) uint8.
    """

    id: str
    photo: Path
    mask: Path
    tag: int
    truth: NDArray[np.uint8]


def draw_image(data: Path, split: str, number: int, classes: int, truths: int) -> SyntheticImage:
    """Draws an image of noise and its ground truth, a rectangle of one class. Existing files are kept.

    Args:
        data: Folder of the files.
        split: Split of the image.
        number: Number of the image in the split.
        classes: Number of classes.
        truths: Seed of the drawing.
    """
    rng = np.random.default_rng([truths, number])
    tag = number % classes
    truth = np.zeros((40, 56), np.uint8)
    top, left = rng.integers(0, 20, 2)
    truth[top : top + 20, left : left + 30] = 1 + tag
    truth[:, -3:] = 255

    image_id = f"{split}{number}"
    photo = data / f"{truths}-{image_id}.jpg"
    mask = data / f"{truths}-{image_id}.png"
    if not mask.exists():
        mask.write_bytes(encode_labels(truth))
        Image.fromarray(rng.integers(0, 256, (*truth.shape, 3), np.uint8)).save(photo)
    return SyntheticImage(image_id, photo, mask, tag, truth)


def add_errors(
    truth: NDArray[np.uint8], classes: int, error: float, rng: np.random.Generator
) -> list[NDArray[np.uint8]]:
    """Returns three label maps: the ground truth with wrong pixels, whose share is `error` on average."""
    labels = np.where(truth == 255, 0, truth)
    is_wrong = rng.random((3, *truth.shape)) < error * rng.uniform(0.2, 1.8)
    other_labels = (labels + 1) % (classes + 1)
    return [np.where(wrong, other_labels, labels).astype(np.uint8) for wrong in is_wrong]


def index_row(image: SyntheticImage, split: str) -> dict[str, object]:
    """Returns the row of an image in the index (INDEX_SCHEMA)."""
    return {
        "image_id": image.id,
        "uri": str(image.photo),
        "split": split,
        "tags": [image.tag],
        "height": image.truth.shape[0],
        "width": image.truth.shape[1],
        "domain": "target",
        "content_hash": image.id,
        "mask_uri": str(image.mask),
        "saliency_uri": None,
        "is_negative": False,
    }


def pseudo_mask_row(image_id: str, pseudo_mask: NDArray[np.uint8]) -> dict[str, object]:
    """Returns the row of an image in the table of pseudo masks (MASKS_SCHEMA)."""
    png = encode_labels(pseudo_mask)
    return {"image_id": image_id, "labels": png, "mask": png, "cue": "crf", "ignored": 0.0, "foreground": 0.3}


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """The rows of a scored run's tables: index, predictions, pseudo masks, and pixel counts of the pseudo masks."""

    index: list[dict[str, object]] = dataclasses.field(default_factory=list)
    predictions: list[dict[str, object]] = dataclasses.field(default_factory=list)
    pseudo_masks: list[dict[str, object]] = dataclasses.field(default_factory=list)
    counts: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def label_images(
    images: Sequence[SyntheticImage], split: str, classes: int, error: float, rng: np.random.Generator
) -> ScoredRows:
    """Returns the rows of images whose predictions and pseudo masks have errors, see `add_errors`."""
    rows = ScoredRows()
    for image in images:
        plain, refined, pseudo_mask = add_errors(image.truth, classes, error, rng)
        rows.index.append(index_row(image, split))
        pngs = {"plain": encode_labels(plain), "crf": encode_labels(refined)}
        rows.predictions.append({"image_id": image.id, **pngs})
        rows.pseudo_masks.append(pseudo_mask_row(image.id, pseudo_mask))
        rows.counts.extend(mask_rows(image.id, image.truth, {"pseudo masks": pseudo_mask}, classes))
    return rows


def write_outputs(outputs: Mapping[str, Path], rows: ScoredRows, result: IndexResult, key: str) -> None:
    """Writes the index, the predictions, the pseudo masks and the pixel counts of a scored run.

    Args:
        outputs: stage -> folder of its output.
        rows: Rows of the tables.
        result: Result of the stage `index`.
        key: Key of the stage `index`.
    """
    index = pa.Table.from_pylist(rows.index, schema=INDEX_SCHEMA)
    write_table(outputs["index"] / "index.parquet", index)
    write_table(outputs["index"] / "rejects.parquet", REJECTS_SCHEMA.empty_table())
    write_result(outputs["index"], result, key=key)

    shard = f"part-{0:08d}-{len(index):08d}.parquet"
    predictions = outputs["predict"] / "predictions"
    write_table(predictions / shard, pa.Table.from_pylist(rows.predictions, schema=PREDICTIONS_SCHEMA))
    pseudo_masks = pa.Table.from_pylist(rows.pseudo_masks, schema=MASKS_SCHEMA)
    write_table(outputs["pseudo_masks"] / "masks" / shard, pseudo_masks)

    with_position = index.append_column("position", pa.array(range(len(index))))
    prediction_counts = count_predictions(len(result.classes), Shards(predictions), with_position)
    write_table(outputs["evaluate"] / PREDICTED_IMAGES / "part-0.parquet", prediction_counts)
    mask_counts = pa.Table.from_pylist(rows.counts, schema=COUNTS_SCHEMA)
    write_table(outputs["evaluate"] / TRAINING_IMAGES / "part-0.parquet", mask_counts)


def write_scores(evaluate: Path, scorer: Scorer) -> None:
    """Writes the scores that follow from the pixel counts in the output of the stage `evaluate`."""
    labels = len(scorer.classes) + 1
    shape = (MASK_PARTS, labels, labels)
    mask_counts = sum_counts(evaluate / TRAINING_IMAGES, {"pseudo masks": shape})["pseudo masks"]
    scores = [scorer.mask_score("pseudo_masks", "R = 3", mask_counts, related=3)]
    prediction_counts = sum_counts(evaluate / PREDICTED_IMAGES, dict.fromkeys(("plain", "with CRF"), shape))
    for title, counts in prediction_counts.items():
        scores.append(scorer.mask_score("segmentation", title, counts, crf=title == "with CRF"))
    write_json(evaluate / SCORES, [dataclasses.asdict(score) for score in scores])
    write_json(evaluate / CURVES, {})


@pytest.fixture(scope="session")
def scored() -> Callable[..., Path]:
    """Makes a scored run with predictions and pseudo masks of synthetic images; returns its folder.

    The masks are the ground truth with errors that depend on the run's name and seed; `error` is the share of wrong
    pixels. The first `wrong_tags` images have the tag of another class. Images are drawn into `data` once, so all runs
    have the same images in each split.
    """

    def make(
        workspace: Path,
        name: str,
        *overrides: str,
        data: Path,
        classes: Sequence[str] = ("cat", "dog"),
        images: int = 8,
        split: str = "val",
        error: float = 0.2,
        truths: int = 0,
        wrong_tags: int = 0,
        recipe: str = "scratch",
    ) -> Path:
        opened = Workspace(workspace)
        resolved = resolve("voc", recipe, overrides=overrides)
        rng = np.random.default_rng([zlib.crc32(name.encode()), resolved.config.seed])
        data.mkdir(parents=True, exist_ok=True)
        drawn_images = [draw_image(data, split, number, len(classes), truths) for number in range(images)]
        rows = label_images(drawn_images, split, len(classes), error, rng)
        for row, image in zip(rows.index[:wrong_tags], drawn_images, strict=False):
            row["tags"] = [(image.tag + 1) % len(classes)]

        outputs = {stage: opened.output(stage, name) for stage in ("index", "pseudo_masks", "predict", "evaluate")}
        identity = f"{split}, {wrong_tags} wrong tags"
        write_outputs(outputs, rows, IndexResult(classes=tuple(classes), counts={}, identity=identity), key=name)
        scorer = Scorer(config=resolved.config, classes=tuple(classes), split=split, images=images)
        write_scores(outputs["evaluate"], scorer)
        write_text(opened.run(name).config, experiment_text(resolved.config, resolved.origins))
        opened.record_outputs(name, outputs)
        return opened.run(name).path

    return make


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run with a segmenter with random weights and an index of images with these widths; returns its folder."""

    def make(classes: int, *overrides: str, sides: Sequence[int] = ()) -> Path:
        workspace = Workspace(tmp_path / "workspace")
        index, segmenter = (workspace.output(stage, "drawn") for stage in ("index", "train_segmenter"))
        row = {"domain": "target", "split": "train", "tags": [0], "is_negative": False, "height": 16}
        texts = {"image_id", "uri", "content_hash"}
        rows = [row | {"width": side} | dict.fromkeys(texts, str(n)) for n, side in enumerate(sides)]
        write_table(index / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
        write_table(index / "rejects.parquet", REJECTS_SCHEMA.empty_table())
        names = tuple(f"class {k}" for k in range(classes))
        write_result(index, IndexResult(classes=names, counts={"images": {}}), key="drawn")
        resolved = resolve("voc", "scratch", overrides=overrides)
        torch.manual_seed(0)
        network = build_segmenter(resolved.config.segmenter, classes)
        layers: Any = getattr(network, "last", network.head)
        torch.nn.init.normal_(layers[-1].weight)  # else nearly every pixel has the same label
        save_weights(network, segmenter / WEIGHTS, {})
        write_text(workspace.run("drawn").config, experiment_text(resolved.config, resolved.origins))
        workspace.record_outputs("drawn", {"index": index, "train_segmenter": segmenter})
        return workspace.run("drawn").path

    return make


VOID = {"meta", "link", "img", "source", "br", "hr", "input"}
LINK = re.compile(r"#[a-z0-9-]+")


class Page(HTMLParser):
    """Parses a page into elements, text, and, by section, texts of table cells and values of `data` elements.

    Parsing fails if elements are not nested, if the page loads external files, runs a script or has a broken internal
    link, or if a picture cannot be decoded or has no description.

    Attributes:
        pictures: Pictures of the `img` elements, in order.
    """

    def __init__(self, page: Path | str):
        super().__init__()
        self.source = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: dict[str, list[list[str]]] = {"": []}
        self.values: dict[str, list[float]] = {}
        self.text = ""
        self._open = [""]
        self._section = ""
        self.feed(self.source)
        self.close()
        assert self._open == [""]
        self._check_self_contained()
        self.pictures = [self._picture(attrs) for attrs in self.of("img")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert len(values) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, values))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = values["id"]
        rows = self.rows.setdefault(self._section, [])
        if tag == "tr":
            rows.append([])
        if tag in ("td", "th"):
            rows[-1].append("")
        if tag == "data":
            self.values.setdefault(self._section, []).append(float(values["value"]))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[self._section][-1][-1] += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def _check_self_contained(self) -> None:
        ids = {attrs["id"] for _, attrs in self.elements if "id" in attrs}
        for tag, attrs in self.elements:
            assert tag not in {"script", "iframe", "object", "embed", "form"}
            assert tag != "th" or attrs["scope"] in {"col", "row", "rowgroup"}
            for name, value in attrs.items():
                assert not name.startswith("on")
                if name in {"src", "srcset"} or (name == "href" and tag != "a"):
                    assert value.startswith("data:"), (tag, name)
                elif name == "href":
                    assert LINK.fullmatch(value)
                    assert value[1:] in ids
                elif name == "style":
                    assert "url(" not in value
        (style,) = re.findall(r"<style>(.*?)</style>", self.source, re.DOTALL)
        assert "url(" not in style
        assert "@import" not in style
        policies = [a["content"] for a in self.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]

    def _picture(self, attrs: dict[str, str]) -> Image.Image:
        assert attrs["alt"]
        picture = _decoded(attrs["src"])
        shown = (int(attrs["width"]), int(attrs["height"]))
        assert picture.size in (shown, (2 * shown[0], 2 * shown[1]))  # plots are drawn at twice the density
        return picture


def _decoded(uri: str) -> Image.Image:
    picture = Image.open(BytesIO(b64decode(uri.partition(",")[2])))
    picture.load()
    return picture


@pytest.fixture(scope="session")
def parsed() -> type[Page]:
    """Parses and checks a page, given its file or its text."""
    return Page
