"""Maps, attention and gates of pairs on a run's page: their data against the equations, and in a browser."""

import base64
import json
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.tables.quantized import dequantize, quantize
from mcis.datasets.tables.shards import Shards
from mcis.models.backbones import to_float_images
from mcis.models.classifier import CoAttentionClassifier
from mcis.models.coattention import affinity
from mcis.models.grids import Grid, pixel_grids
from mcis.models.localization import embed, score_maps
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.outputs.relations import MapRelations, relations_of_run
from mcis.platform.outputs.tables import ImageMaps, image_maps
from mcis.platform.reporting.pairs import POINTS, PairData
from mcis.platform.reporting.panels import Panel
from mcis.platform.runs.context import RunContext
from mcis.platform.stages import localization

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CONTRASTIVE = "localize.method.contrastive=true"


def unpacked(text: str, kind: Any) -> NDArray[Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)


class Direct:
    """Features of a run's images, and the whole affinity of a pair, one pair at a time."""

    def __init__(self, config: Config, context: RunContext, relations: MapRelations):
        self.config = config
        self.relations = relations
        network = build_classifier(config.classifier, len(context.classes))
        self.model: CoAttentionClassifier = load_trained(network, context.stage_outputs["train_classifier"])
        self.model.requires_grad_(False)

    @torch.inference_mode()
    def features(self, row: int) -> torch.Tensor:
        """(1, C, h, w), in 8 bits if the maps were made from such features."""
        uri = self.relations.rows["uri"][row].as_py()
        pixels = torch.from_numpy(read_rgb(uri, self.config.classifier.input_size))[None]
        images = self.model.backbone.normalize(to_float_images(pixels))
        how = self.config.localize
        features = embed(
            self.model.backbone, self.model.standardize, images, extra_scales=how.extra_scales, hflip=how.hflip
        )
        if how.feature_type == "int8":
            return torch.from_numpy(dequantize(quantize(features.numpy()), features.shape[1:]))
        return features

    @torch.inference_mode()
    def weights(self, row: int, other: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of both images of a pair, whose target is m or n: (HW, H'W') and (H'W', HW)."""
        method = self.config.localize.method
        w_p = None if method.w_p == "identity" else self.model.affinity_weights(torch.tensor([0]))
        settings: dict[str, Any] = {"form": self.model.form, "scale": self.model.affinity.scale}
        if method.target == "m":
            p = affinity(self.features(row), self.features(other), w_p, **settings)[0]
        else:
            p = affinity(self.features(other), self.features(row), w_p, **settings)[0].T
        return torch.softmax(p, dim=1), torch.softmax(p.T, dim=1)

    @torch.inference_mode()
    def gate(self, weights: torch.Tensor, partner: int) -> torch.Tensor:
        """B, (h, w)."""
        features = self.features(partner)[0]
        common = weights @ features.flatten(1).T  # F^{m & n} of Eq. 4
        b = torch.sigmoid(common @ self.model.w_b.weight[0, :, 0, 0])
        return b.unflatten(0, self.features(partner).shape[2:])


class Examined:
    """A run's maps, and what its page would have of an image with several tags and of one with a single tag."""

    def __init__(self, localizable: Any, folder: Path, *overrides: str):
        self.config: Config = localizable.config(*overrides)
        self.context = localizable.classified(self.config, folder).into(folder / "localize")
        localization.run(self.config, self.context)
        relations = relations_of_run(self.config, self.context)
        assert relations is not None
        self.relations = relations
        self.direct = Direct(self.config, self.context, relations)
        self.maps = Shards(self.context.output / "maps")
        num_tags = np.diff(relations.relations.start)
        self.rows = [int(np.flatnonzero(num_tags > 1)[0]), int(np.flatnonzero(num_tags == 1)[0])]

    def stored(self, row: int) -> ImageMaps:
        return image_maps(self.maps, self.relations.rows["image_id"][row].as_py())

    def data(self, row: int) -> Any:
        """The data of an image, as a script reads it."""
        classifier = self.context.stage_outputs["train_classifier"]
        single = self.context.output / "single"
        pair_data = PairData(self.config, len(self.context.classes), classifier, single, self.relations)
        image_id = self.relations.rows["image_id"][row].as_py()
        image = np.zeros((4, 4, 3), np.uint8)
        panel = Panel(image_id=image_id, split="train", tags=(), image=image, maps=self.stored(row))
        return json.loads(json.dumps(pair_data(panel, row)))


def points_of(entry: Any, name: str) -> NDArray[np.float64]:
    """A map of the page in [0, 1], (POINTS, POINTS)."""
    (points,) = [kind["points"] for kind in entry["kinds"] if kind["name"] == name]
    return unpacked(points, np.uint8).reshape(POINTS, POINTS) / 255


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("localize.method.target=n",),
        ("localize.method.w_p=identity", "localize.hflip=true"),
        ("localize.feature_type=int8",),
    ],
)
def test_attention_is_that_with_which_the_maps_were_made(
    localizable: Any, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = Examined(localizable, tmp_path, *overrides)
    weight, bias = run.direct.model.attention_layer()
    for row in run.rows:
        stored = run.stored(row)
        entries = zip(run.data(row)["maps"], run.relations.maps_of(row), strict=True)
        for number, (entry, (tag, related)) in enumerate(entries):
            assert (entry["label"], entry["related"]) == (tag + 1, 3)
            expected = score_maps(torch.from_numpy(stored.maps[number])[None], stored.grids, "maximum", POINTS, POINTS)
            np.testing.assert_allclose(points_of(entry, "with related images"), expected[0], atol=0.003)

            activations = []
            for pair, other in zip(entry["pairs"], related, strict=False):
                assert pair["id"] == run.relations.rows["image_id"][other].as_py()
                weights, _ = run.direct.weights(row, other)
                shares = shares_of(pair)
                np.testing.assert_allclose(shares, weights, atol=2e-3 * float(weights.max()) + 1e-4)
                values = weight[tag, :, 0, 0] @ run.direct.features(other)[0].flatten(1)
                activations.append(weights @ (values if bias is None else values + bias[tag]))
            if len(set(related)) == len(entry["pairs"]) == 3:
                activation = torch.stack(activations).mean(dim=0).reshape(stored.maps[number].shape)
                torch.testing.assert_close(activation, torch.from_numpy(stored.maps[number]), atol=0.02, rtol=0.02)


def shares_of(pair: Any) -> NDArray[np.float64]:
    """The attention of a pair on the page, (positions, cells)."""
    largest = unpacked(pair["largest"], "<f4")
    shares: NDArray[np.float64] = unpacked(pair["shares"], np.uint8).reshape(len(largest), -1) / 255 * largest[:, None]
    return shares


def test_gates_and_contrastive_maps_are_equations_6_to_8(localizable: Any, tmp_path: Path) -> None:
    run = Examined(localizable, tmp_path, CONTRASTIVE)
    row, single_tag = run.rows
    assert all(len(entry["kinds"]) == 2 for entry in run.data(single_tag)["maps"])
    grids = run.stored(row).grids
    weight, bias = run.direct.model.attention_layer()
    drawn = run.relations.relations  # with the images that localization contrasts maps with
    num_contrastive = 0
    for number, entry in enumerate(run.data(row)["maps"], int(drawn.start[row])):
        for pair, other in zip(entry["pairs"], drawn.related[number].tolist(), strict=False):
            weights, reverse = run.direct.weights(row, other)
            gates = [run.direct.gate(weights, other), run.direct.gate(reverse, row)]
            for text, gate in zip(pair["gates"], gates, strict=True):
                points = resample(gate, grids, pixel_grids(POINTS, POINTS))
                np.testing.assert_allclose(unpacked(text, np.uint8).reshape(POINTS, POINTS) / 255, points, atol=0.004)

        begin, end = drawn.contrastive_start[number : number + 2]
        assert entry["contrasted"] == end - begin
        if begin == end:
            assert len(entry["kinds"]) == 2
            continue
        tag = entry["label"] - 1
        activations = []
        for other in drawn.contrastive[begin:end].tolist():
            gate = run.direct.gate(run.direct.weights(row, other)[0], other)
            values = (weight[tag, :, 0, 0] @ run.direct.features(row)[0].flatten(1)).reshape(gate.shape) * (1 - gate)
            activations.append(values if bias is None else values + bias[tag])
        activation = torch.stack(activations).mean(dim=0)
        expected = score_maps(activation[None], grids, "maximum", POINTS, POINTS)[0]
        np.testing.assert_allclose(points_of(entry, "contrastive"), expected, atol=0.02)
        num_contrastive += 1
    assert num_contrastive


# ---- in a browser


def text(browser: "Chrome", selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def point(browser: "Chrome", selector: str, across: float, down: float) -> tuple[float, float]:
    """Moves the pointer over an element; returns its position there as fractions of the sides."""
    from selenium.webdriver import ActionChains

    target = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
    box = browser.execute_script("const b = arguments[0].getBoundingClientRect(); return [b.width, b.height]", target)
    offset = [round((across - 0.5) * box[0]), round((down - 0.5) * box[1])]
    ActionChains(browser).move_to_element_with_offset(target, *offset).perform()
    return 0.5 + offset[0] / box[0], 0.5 + offset[1] / box[1]


def shown_at(browser: "Chrome") -> tuple[int, int]:
    """Row and column of the marked position."""
    row, column = str(browser.execute_script("return document.getElementById('pairs-maps').dataset.at")).split(",")
    return int(row), int(column)


@pytest.mark.slow
def test_the_attention_of_the_pointed_position_is_that_of_the_classifier(browser: "Chrome", small: Any) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    settings = ("localize.related=2", "report.panels=8", "evaluate.thresholds=32")
    run = small.run("explored", *settings)
    config = small.settings(*settings).config
    relations = relations_of_run(config, run.context)
    assert relations is not None
    direct = Direct(config, run.context, relations)
    browser.get_log("browser")
    browser.get(run.context.folder.report.as_uri())
    ready = "return document.getElementById('pairs').dataset.ready !== undefined"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(ready))

    image_id = text(browser, "#pairs-shelf button[aria-pressed=true] .mono")
    row = relations.rows["image_id"].to_pylist().index(image_id)
    _, related = next(iter(relations.maps_of(row)))
    stored = image_maps(Shards(run.context.stage_outputs["localize"] / "maps"), image_id)
    grid = stored.grids.rows
    strongest = np.unravel_index(stored.maps[0].argmax(), stored.maps[0].shape)
    assert np.abs(np.subtract(shown_at(browser), strongest)).max() <= 1  # it is resized bicubically before

    positions = set()
    for across, down in ((0.2, 0.3), (0.7, 0.4), (0.5, 0.9)):
        position = check_pointed_position(browser, stored, across, down)
        positions.add(position)
        for number, other in enumerate(dict.fromkeys(related)):
            weights, _ = direct.weights(row, other)
            check_shown_attention(browser, number, weights[position[0] * grid.num_positions + position[1]])
    assert len(positions) == 3

    check_clicked_position(browser, direct, grid, row, related[0])
    browser.find_elements("css selector", "#pairs-related button")[1].click()
    assert text(browser, "#pairs-pair") == relations.rows["image_id"][related[1]].as_py()
    assert browser.get_log("browser") == []


def check_pointed_position(browser: "Chrome", stored: ImageMaps, across: float, down: float) -> tuple[int, int]:
    """Points at the map with related images: the nearest position is marked, and the tooltip has the map's value.

    Returns:
        Row and column of the marked position.
    """
    x, y = point(browser, "#pairs-maps figure:nth-child(3) .layers", across, down)
    row, column = shown_at(browser)
    grid = stored.grids.rows
    for fraction, position in ((y, row), (x, column)):
        assert abs(grid.first + grid.step * position - fraction) <= grid.step / 2 + 0.01

    points = score_maps(torch.from_numpy(stored.maps[0])[None], stored.grids, "maximum", POINTS, POINTS)[0]
    value = float(points[int(y * POINTS), int(x * POINTS)])
    lines = str(browser.execute_script("return document.getElementById('explore-tip').innerText"))
    assert abs(float(lines.split("with related images")[1].split()[0]) - value) < 0.15
    return row, column


def check_shown_attention(browser: "Chrome", number: int, shares: torch.Tensor) -> None:
    """A related image shows these shares of its positions, (HW,): the largest as text, all as opacity."""
    figure = f"#pairs-related figure:nth-child({number + 1})"
    note = text(browser, f"{figure} figcaption span")
    brightest = float(note.split("brightest cell ")[1].split(" %")[0])
    assert brightest == pytest.approx(100 * float(shares.max()), rel=0.01)
    opacity = alpha_of(browser, f"{figure} canvas")
    relative = (opacity / 235) ** (1 / 0.7)
    np.testing.assert_allclose(relative, (shares / shares.max()).reshape(opacity.shape), atol=0.01)


def check_clicked_position(browser: "Chrome", direct: Direct, grid: Grid, row: int, other: int) -> None:
    """A click keeps the position while the pointer is over a related image, which shows the share of a cell.

    The gates show B and 1 - B at the pointer.
    """
    browser.find_element("css selector", "#pairs-maps figure:nth-child(3) .layers").click()
    clicked = shown_at(browser)
    x, y = point(browser, "#pairs-related figure:nth-child(1) .layers", 0.6, 0.4)
    assert shown_at(browser) == clicked
    weights, _ = direct.weights(row, other)
    cell = [min(max(round((f - grid.first) / grid.step), 0), grid.num_positions - 1) for f in (y, x)]
    share = weights.reshape(grid.num_positions, grid.num_positions, grid.num_positions, grid.num_positions)[
        (*clicked, *cell)
    ]
    tip = text(browser, "#explore-tip").removeprefix("attention of the position").removesuffix(" %")
    assert float(tip) == pytest.approx(100 * float(share), rel=0.02, abs=0.02)

    gate = direct.gate(weights, other)
    point(browser, "#pairs-gate figure:nth-child(1) .layers", 0.5, 0.5)
    value = float(text(browser, "#explore-tip").removeprefix("B"))
    assert float(gate.min()) - 0.01 <= value <= float(gate.max()) + 0.01
    point(browser, "#pairs-gate figure:nth-child(2) .layers", 0.5, 0.5)
    assert float(text(browser, "#explore-tip").removeprefix("1 \u2212 B")) == pytest.approx(1 - value, abs=0.011)


def alpha_of(browser: "Chrome", selector: str) -> NDArray[np.uint8]:
    """Opacity of each pixel of a canvas, (h, w)."""
    png = browser.execute_script("return document.querySelector(arguments[0]).toDataURL()", selector)
    rgba = Image.open(BytesIO(base64.b64decode(png.partition(",")[2]))).convert("RGBA")
    return np.asarray(rgba)[..., 3]


@pytest.mark.slow
def test_the_gallery_shows_the_chosen_order_and_class(browser: "Chrome", small: Any) -> None:
    run = small.run("explored", "localize.related=2", "report.panels=8", "evaluate.thresholds=32")
    browser.get(run.context.folder.report.as_uri())

    def shown() -> list[Any]:
        articles = browser.find_elements("css selector", "#gallery article")
        return [article for article in articles if article.is_displayed()]

    even = shown()
    assert len(even) == 8
    assert not any(article.find_elements("css selector", ".value") for article in even)
    browser.find_element("id", "gallery-worst").click()
    worst = shown()
    assert len(worst) == 8
    values = [float(article.find_element("css selector", ".value").text.removeprefix("mIoU ")) for article in worst]
    assert values[:4] == sorted(values[:4])
    assert values[4:] == sorted(values[4:])

    radio = browser.find_elements("css selector", "#gallery input[name=gallery-class]")[1]
    radio.click()
    label = str(radio.get_attribute("id")).removeprefix("gallery-class-")
    of_class = shown()
    assert of_class
    assert all(label in str(article.get_attribute("data-labels")).split() for article in of_class)
    browser.find_element("id", "gallery-even").click()
    assert all(label in str(article.get_attribute("data-labels")).split() for article in shown())
