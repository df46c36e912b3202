"""The threshold explorer of a run's page: its data and policy, and in a real browser its numbers."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from mcis.datasets.classes import IGNORE
from mcis.models.counts import Counts, add_counts, map_counts
from mcis.models.grids import Grid, Grids
from mcis.models.localization import score_maps
from mcis.models.metrics import iou, mean, sweep
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.outputs.counts import read_counts
from mcis.platform.outputs.relations import relations_of_run
from mcis.platform.outputs.tables import ImageMaps
from mcis.platform.reporting.explorer import explorer_data
from mcis.platform.reporting.panels import Panel, labels
from mcis.platform.reporting.run_page import ReportData, write_report
from mcis.platform.runs.files import read_json
from mcis.platform.runs.scores import CURVES, Curve, Score
from mcis.platform.runs.workspace import RunFolder

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CLASSES = ("circle", "square", "star")
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x00\udcff<!--<script>"
SHOWN = "</script><img src=x onerror=alert(1)>\u2028\N{REPLACEMENT CHARACTER}\\udcff<!--<script>"
BINS = 32
MANY = ("localize.related=2", f"evaluate.thresholds={BINS}", "report.panels=8")


def image_of(image_id: str, seed: int, *, tags: tuple[int, ...] = (0, 2), truth: bool = True) -> Panel:
    """An image of 57 x 40 pixels of noise, with maps of 7 x 7 positions that are not at its corners."""
    random = np.random.default_rng(seed)
    maps = (6 * random.standard_normal((len(tags), 7, 7))).astype(np.float16).astype(np.float32)
    labels_at_random = random.choice(np.array([0, 1, 2, 3, IGNORE], np.uint8), (40, 57), p=[0.5, 0.2, 0.1, 0.1, 0.1])
    return Panel(
        image_id=image_id,
        split="train",
        tags=(),
        image=random.integers(0, 256, (40, 57, 3), np.uint8),
        truth=labels_at_random if truth else None,
        full_size=(40, 57),
        maps=ImageMaps(np.array(tags), maps, Grids(Grid(0.05, 0.14, 7), Grid(0.09, 0.13, 7))),
    )


def kept(image: Panel) -> ImageMaps:
    assert image.maps is not None
    return image.maps


def page_of(folder: Path, images: list[Panel], scale: str, classes: tuple[str, ...] = CLASSES) -> Path:
    """Writes a report with these images; its curve is best at threshold 9 / 32."""
    mious = [float("nan"), *(40 - abs(9 - i) for i in range(1, BINS))]
    score = Score(
        output="localization_maps",
        name="R = 3",
        split="train",
        images=2,
        miou=40.0,
        iou={},
        label_scores={},
        confusion=(),
        threshold=9 / BINS,
        related=3,
        seed=0,
        recipe="scratch",
        weights="none",
        git=None,
    )
    panels = [replace(image, tags=tuple(classes[k] for k in kept(image).classes)) for image in images]
    curves = {"R = 3": Curve([i / BINS for i in range(BINS)], mious)}
    settings = [f"maps.scale={scale}", f"evaluate.thresholds={BINS}", "localize.related=3"]
    config = resolve("voc", "scratch", overrides=settings).config
    data = ReportData(
        name="drawn",
        sources="voc",
        recipe="scratch",
        created="2025-03-01T12:00:00+00:00",
        git=None,
        classes=classes,
        scores=[score],
        counts={},
        rejected=0,
        notes=[],
        seconds={},
        computed={},
        training={},
        curves=curves,
        config=[],
        environment={},
        panels=panels,
        explorer=explorer_data(config, classes, panels, None, scores=[score], curves=curves),
    )
    return write_report(data, RunFolder(folder))


def embedded(page: Path) -> dict[str, Any]:
    """The data that a page embeds for its script."""
    (text,) = re.findall(r'<script type="application/json" id="explore-data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(text)


def test_the_page_allows_its_own_script_and_no_other(tmp_path: Path) -> None:
    page = page_of(tmp_path, [image_of("a", 0)], "maximum").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    assert f'content="{policy}"' in page
    assert page.count("<script") == 2
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "http"):
        assert way not in script.replace("http://www.w3.org/2000/svg", "")


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    classes = (HOSTILE, "square", "star")
    page = page_of(tmp_path, [image_of(HOSTILE, 0)], "maximum", classes)
    assert page.read_text().count("<script") == 2
    data = embedded(page)
    assert data["images"][0]["id"] == data["labels"]["1"]["name"] == SHOWN


# ---- in a browser


def opened(browser: "Chrome", page: Path) -> None:
    """Opens a page and waits for its explorer."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    wait(browser, "return document.getElementById('explore').dataset.ready !== undefined")


def wait(browser: "Chrome", script: str) -> None:
    """Waits until a script returns true."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(script), script)


def text(browser: "Chrome", name: str) -> str:
    return browser.execute_script(f"return document.getElementById('explore-{name}').textContent")


def move(browser: "Chrome", threshold: int) -> None:
    """Moves the slider by keys."""
    from selenium.webdriver.common.keys import Keys

    slider = browser.find_element("id", "explore-threshold")
    current = int(str(slider.get_property("value")))
    key = Keys.RIGHT if threshold > current else Keys.LEFT
    slider.send_keys(key * abs(threshold - current))
    settled(browser)


def settled(browser: "Chrome") -> None:
    """Waits until the page is drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def mask_shown(browser: "Chrome", selector: str, classes: tuple[str, ...]) -> NDArray[np.uint8]:
    """The labels (h, w) that a canvas of the page shows; the rim of a segment is a lighter shade of its color."""
    png = browser.execute_script("return document.querySelector(arguments[0]).toDataURL()", selector)
    rgba = np.asarray(Image.open(BytesIO(b64decode(png.partition(",")[2]))).convert("RGBA")).astype(np.int64)
    height, width = rgba.shape[:2]
    mask = np.zeros((height, width), np.uint8)
    distance = np.full((height, width), 6.0)
    for label, (_, color) in labels(classes).items():
        if label not in (0, IGNORE):
            flat = np.array(list(bytes.fromhex(color[1:])), np.float64)
            for shade in (flat, flat + 0.65 * (255 - flat)):
                difference = np.where(rgba[..., 3] > 0, np.abs(rgba[..., :3] - shade).max(axis=2), np.inf)
                mask[difference < distance] = label
                distance = np.minimum(distance, difference)
    assert (mask > 0).sum() == (rgba[..., 3] > 0).sum()
    return mask


def expected_masks(image: Panel, scale: str, bins: int) -> Iterator[NDArray[np.uint8]]:
    """The mask at every threshold, computed slowly and in float64 from the program's scores."""
    scores = score_maps(torch.from_numpy(kept(image).maps), kept(image).grids, scale, *image.image.shape[:2]).numpy()
    strongest = np.append(0, kept(image).classes + 1)[scores.argmax(axis=0) + 1].astype(np.uint8)
    for threshold in range(bins):
        yield np.where(scores.max(axis=0).astype(np.float64) >= threshold / bins, strongest, 0).astype(np.uint8)


def mious(image: Panel, scale: str, bins: int, classes: int) -> list[float]:
    """The mIoU of an image at every threshold, by the functions that the stage `evaluate` calls."""
    assert image.truth is not None
    maps = score_maps(torch.from_numpy(kept(image).maps), kept(image).grids, scale, *image.truth.shape).numpy()
    total = np.zeros((bins, classes + 1, classes + 1), np.int64)
    add_counts(total, map_counts(image.truth, maps, kept(image).classes, bins))
    return [mean(iou(matrix)) for matrix in sweep(total)]


def requested(browser: "Chrome") -> list[str]:
    """URLs requested since the page was opened, without data URIs."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("data:")]


@pytest.mark.slow
def test_masks_and_iou_agree_with_the_program(browser: "Chrome", tmp_path: Path) -> None:
    smaller = replace(image_of("b", 1, tags=(1,)), full_size=(400, 570))
    images = [image_of("a", 0), smaller, image_of("c", 2, tags=(2, 0, 1), truth=False)]
    page = page_of(tmp_path, images, "logarithm")
    opened(browser, page)
    assert text(browser, "at") == f"{9 / BINS:.3g}"
    for number, image in enumerate(images):
        browser.execute_script(f"document.querySelectorAll('#explore-shelf button')[{number}].click()")
        size = "the image has 570 × 400, at which the run is scored" if image is smaller else "the image's own size"
        assert text(browser, "size").startswith("Computed at 57 × 40 pixels")
        assert size in text(browser, "size")
        masks = list(expected_masks(image, "logarithm", BINS))
        for threshold in (0, 9, 17, 18, BINS - 1):
            move(browser, threshold)
            assert text(browser, "at") == f"{threshold / BINS:.3g}"
            assert text(browser, "split") == ("\u2013" if not threshold else f"{40 - abs(9 - threshold):.1f}")
            for canvas in ("#explore-canvas", f"#explore-shelf li:nth-child({number + 1}) canvas"):
                np.testing.assert_array_equal(mask_shown(browser, canvas, CLASSES), masks[threshold])
            shown = "\u2013" if image.truth is None else f"{mious(image, 'logarithm', BINS, 3)[threshold]:.1f}"
            assert text(browser, "miou") == shown
    assert browser.get_log("browser") == []
    assert requested(browser) == [page.as_uri()]


@pytest.mark.slow
def test_the_tooltip_has_labels_and_scores_of_a_position(browser: "Chrome", tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    image = image_of(HOSTILE, 0)
    names = (HOSTILE, "square", "star")
    opened(browser, page_of(tmp_path, [image], "range", names))
    scores = score_maps(torch.from_numpy(kept(image).maps), kept(image).grids, "range", 40, 57).numpy()
    mask = list(expected_masks(image, "range", BINS))[9]
    true_labels = image.truth
    assert true_labels is not None
    label_names = ["background", SHOWN, *names[1:]]

    def check() -> tuple[int, int]:
        x, y = map(int, str(browser.find_element("id", "explore-tip").get_attribute("data-at")).split(","))
        truth = "ignored" if true_labels[y, x] == IGNORE else label_names[true_labels[y, x]]
        lines = ["mask" + label_names[mask[y, x]], "truth" + truth]
        reached = np.minimum(scores[:, y, x].astype(np.float64) * BINS, BINS - 1).astype(int) / BINS
        for class_index, threshold in zip(kept(image).classes, reached, strict=True):
            lines.append(f"{label_names[class_index + 1]}{threshold:.3g}")
        assert text(browser, "tip") == "".join(lines)
        return x, y

    canvas = browser.find_element("id", "explore-canvas")
    pixels = set()
    for dx, dy in ((-200, -150), (-40, 90), (130, 10)):
        ActionChains(browser).move_to_element_with_offset(canvas, dx, dy).perform()
        pixels.add(check())
        size = canvas.size
        expected = ((0.5 + dx / size["width"]) * 57, (0.5 + dy / size["height"]) * 40)
        np.testing.assert_allclose(np.add(check(), 0.5), expected, atol=0.8)  # the pointer is at a whole pixel
    assert len(pixels) == 3
    canvas.send_keys(Keys.RIGHT * 3 + Keys.UP)
    assert check() == (int((0.5 + 3 / 32) * 57), int((0.5 - 1 / 32) * 40))
    canvas.send_keys(Keys.ESCAPE)
    assert not browser.find_element("id", "explore-tip").is_displayed()
    gallery = browser.find_element("css selector", "article[data-explore] img")
    ActionChains(browser).move_to_element(gallery).perform()
    assert check() == (28, 20)
    gallery.click()
    assert browser.switch_to.active_element.tag_name == "button"
    assert browser.get_log("browser") == []


def captions(strip: Any) -> list[str]:
    return [caption.text for caption in strip.find_elements("css selector", "figcaption")]


@pytest.fixture(scope="module")
def ended(small: Any) -> pipeline.RunResult:
    """A run whose maps were made with two related images."""
    return small.run("explored", *MANY)


@pytest.mark.slow
def test_the_page_scores_each_image_as_the_run_did(browser: "Chrome", ended: pipeline.RunResult) -> None:
    page = ended.context.folder.report
    opened(browser, page)
    (score,) = (score for score in ended.scores if score.output == "localization_maps" and score.related)
    counted = read_counts(ended.context.stage_outputs["evaluate"], score)
    classes = len(ended.context.classes)
    curve = read_json(ended.context.stage_outputs["evaluate"] / CURVES)[score.name]
    assert score.threshold is not None
    best = round(score.threshold * BINS)
    images = embedded(page)["images"]
    assert len(images) == 4

    for number, image in enumerate(images):
        browser.execute_script(f"document.querySelectorAll('#explore-shelf button')[{number}].click()")
        chosen = np.array(counted.images) == counted.image_ids.to_pylist().index(image["id"])
        total = np.zeros((BINS, classes + 1, classes + 1), np.int64)
        add_counts(total, Counts(*(column[chosen] for column in counted.counts)))
        expected = [mean(iou(matrix)) for matrix in sweep(total)]
        for threshold in (3, best):
            move(browser, threshold)
            assert text(browser, "id") == image["id"]
            assert float(text(browser, "miou")) == pytest.approx(expected[threshold], abs=0.051)
            assert float(text(browser, "split")) == pytest.approx(curve[1][threshold], abs=0.051)
        assert "the image's own size, as the scores of the run are" in text(browser, "size")

    move(browser, 0)
    browser.find_element("id", "explore-best").click()
    settled(browser)
    assert text(browser, "at") == f"{score.threshold:.3g}"
    assert browser.get_log("browser") == []
    assert requested(browser) == [page.as_uri()]


@pytest.mark.slow
def test_a_click_shows_the_related_images_of_each_map(browser: "Chrome", small: Any, ended: pipeline.RunResult) -> None:
    page = ended.context.folder.report
    relations = relations_of_run(small.settings(*MANY).config, ended.context)
    assert relations is not None
    ids = relations.rows["image_id"].to_pylist()
    opened(browser, page)
    images = embedded(page)["images"]
    for number, image in enumerate(images):
        button = browser.find_elements("css selector", "#explore-shelf button")[number]
        button.send_keys("\n")
        assert button.get_attribute("aria-pressed") == "true"
        strips = browser.find_elements("css selector", "#explore-related .strip")
        shown = [captions(strip) for strip in strips]
        expected = [[ids[row] for row in related] for _, related in relations.maps_of(ids.index(image["id"]))]
        assert shown == expected
        assert all(len(related) == 2 for related in shown)
        pictures = browser.find_elements("css selector", "#explore-related img")
        assert all(str(picture.get_property("naturalWidth")) != "0" for picture in pictures)
    assert browser.get_log("browser") == []
