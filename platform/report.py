"""The page of one run: scores, pictures, curves, counts -> report.html, one self-contained file, and pictures/*.png.

A pure function of `ReportData`: no Ray, no MLflow. Whatever a run lacks (it stopped early, nobody knows
the truth) the page names instead of failing. Names and reasons come from outside, so the template escapes everything
and the page forbids itself, by its content security policy, to load or run anything.
"""

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mcis.datasets.classes import BACKGROUND, IGNORE, palette
from mcis.models.metrics import confusion, mean_iou
from mcis.platform.workspace import written_aside


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One image of the gallery with what the stages made of it; (H, W) is the same for all arrays.

    image: (H, W, 3) uint8 RGB.
    truth, pseudo_mask, prediction: (H, W) uint8 labels, k + 1 for class index k, 255 ignored; None where there is none.
    maps: (class name, (H, W) float in [0, 1]) a tag, its localization map; empty where none was made.
    """

    image_id: str
    split: str
    tags: tuple[str, ...]
    image: NDArray[np.uint8]
    truth: NDArray[np.uint8] | None
    maps: tuple[tuple[str, NDArray[np.float32]], ...]
    pseudo_mask: NDArray[np.uint8] | None
    prediction: NDArray[np.uint8] | None


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows. Scores and IoU are in percent, shares in [0, 1], times in seconds.

    name, setting, recipe, created (ISO 8601), git: what ran, when, and from which commit.
    classes: K names; class index k is label k + 1.
    scores: the entries of scores.json; any value may be None.
    counts: numbers by name, nested as deep as needed: {"images": {"train": 480, "val": 120}, ...}.
    rejects: one an image that was not used: uri, image_id, split, reason.
    notes: warnings in plain words.
    seconds, computed: by stage, its wall time and whether it was computed in this call or taken from before.
    training: "classifier" and "segmenter" -> records over steps: step, epoch, loss, learning_rate, images_per_second,
        waiting (share of the time spent waiting for data); every other number is a term of the loss.
    curves: label -> (thresholds, mIoU in percent) of localization maps.
    config: (dotted key, value, where the value comes from).
    environment: versions and machine, by name.
    """

    name: str
    setting: str
    recipe: str
    created: str
    git: str | None
    classes: tuple[str, ...]
    scores: list[dict[str, Any]]
    counts: Mapping[str, Any]
    rejects: list[dict[str, Any]]
    notes: list[str]
    seconds: dict[str, float]
    computed: dict[str, bool]
    training: dict[str, list[dict[str, Any]]]
    curves: dict[str, tuple[list[float], list[float]]]
    config: list[tuple[str, str, str]]
    environment: dict[str, str]
    panels: list[Panel]


def write_report(data: ReportData, folder: Path) -> Path:
    """Writes folder/report.html and folder/pictures/*.png, replaces those of an earlier report; returns the page.

    Raises:
        ValueError: a panel's arrays differ in size, or hold a label or a map of a class that `data.classes` lacks.
        UserError: the disk is full or cannot be written.
    """
    pictures = folder / "pictures"
    files = {f"panel-{n:02}.png": panel_picture(panel, data.classes) for n, panel in enumerate(data.panels, 1)}
    if data.panels:
        files["gallery.png"] = gallery(data.panels, data.classes)
    plots = _plots(data)
    content = {name: _encode(picture, "PNG") for name, picture in files.items()}
    content |= {f"{name}.png": plot.light for name, plot in plots.items()}
    for name, png in content.items():
        with written_aside(pictures / name) as aside:
            aside.write_bytes(png)
    for path in pictures.glob("*.png"):
        if path.name not in content and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # an earlier report's: this run has no such picture, or fewer panels
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = _environment().from_string(template).render(_view(data, plots))
    # A file name that is no UTF-8 reaches Python with lone surrogates: shown as \udcff, not a crash.
    with written_aside(folder / "report.html") as aside:
        aside.write_bytes(page.encode("utf-8", "backslashreplace"))
    return folder / "report.html"


def panel_picture(panel: Panel, classes: Sequence[str], *, height: int = 160) -> Image.Image:
    """One row, RGB on white: image | truth | localization map | pseudo mask | prediction, those that the panel has.

    Each cell keeps the image's shape and is `height` pixels high, less where it would be more than twice as wide.
    """
    cells = [cell for cell in _cells(panel, classes, height).values() if cell]
    row = Image.new("RGB", (sum(cell.width for cell in cells) + _GAP * (len(cells) - 1), cells[0].height), "white")
    x = 0
    for cell in cells:
        row.paste(cell, (x, 0))
        x += cell.width + _GAP
    return row


def gallery(panels: Sequence[Panel], classes: Sequence[str], *, height: int = 160) -> Image.Image:
    """All panels as rows under column headings, each with its name and tags, over a legend of the classes that occur.

    Columns that no panel has are left out; the picture is `len(columns)` times the widest cell, plus gaps and margin.
    """
    rows = [_cells(panel, classes, height) for panel in panels]
    columns = [column for column in _COLUMNS if any(row[column] for row in rows)]
    width = max((cell.width for row in rows for cell in row.values() if cell), default=height)
    heights = [max(cell.height for cell in row.values() if cell) for row in rows]
    legend = _legend(panels, classes)
    total = 2 * _MARGIN + len(columns) * width + _GAP * (len(columns) - 1)
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    lines = list(_wrapped(legend, small, total - 2 * _MARGIN))
    above = _MARGIN + _HEADING
    below = _MARGIN + len(lines) * _LEGEND_LINE
    picture = Image.new("RGB", (total, above + sum(heights) + len(rows) * _CAPTION + below), "white")
    draw = ImageDraw.Draw(picture)
    lefts = [_MARGIN + i * (width + _GAP) for i in range(len(columns))]
    for left, column in zip(lefts, columns, strict=True):
        draw.text((left, _MARGIN), column, "#16181d", font)
    y = above
    for panel, row, row_height in zip(panels, rows, heights, strict=True):
        for left, column in zip(lefts, columns, strict=True):
            if cell := row[column]:
                picture.paste(cell, (left, y))
            else:
                draw.rectangle((left, y, left + width - 1, y + row_height - 1), fill="#f3f4f6")
                draw.text((left + width / 2, y + row_height / 2), "none", "#8a919c", small, anchor="mm")
        caption = f"{panel.image_id}  ·  {panel.split}  ·  {', '.join(panel.tags) or 'no tag'}"
        draw.text((_MARGIN, y + row_height + 5), _fitted(caption, small, total - 2 * _MARGIN), "#5c6370", small)
        y += row_height + _CAPTION
    for line in lines:
        for left, item in line:
            draw.rectangle((_MARGIN + left, y, _MARGIN + left + 12, y + 12), fill=item.colour, outline="#8a919c")
            name = _fitted(item.name, small, total - 2 * _MARGIN - 18)
            draw.text((_MARGIN + left + 18, y - 1), name, "#16181d", small)
        y += _LEGEND_LINE
    return picture


# -------------------------------------------------------------------------------------------------- pictures of panels

_COLUMNS = ("image", "truth", "localization map", "pseudo mask", "prediction")
_PICTURE_NAME = re.compile(r"(panel-\d+|gallery|iou|thresholds|training-\w+)\.png")
_GAP, _MARGIN, _HEADING, _CAPTION, _LEGEND_LINE = 10, 20, 28, 34, 24
"""Pixels: between cells, around the gallery, for its column headings, for a row's caption, for a line of its legend."""
_PAGE_HEIGHT = 240
"""Pixels of a cell in the page, where it is shown at about 200 px width: sharp on a dense screen."""
_DIMMED = np.array([0.36, 0.39, 0.44])
"""What localization maps leave of the grey image's brightness, red to blue: cool, so that grey classes show too."""
_IGNORE_STRIPES = np.array([[236, 236, 230], [196, 198, 204]], np.uint8)


class _LegendItem(NamedTuple):
    name: str
    colour: str


def _cells(panel: Panel, classes: Sequence[str], height: int) -> dict[str, Image.Image | None]:
    """The pictures of a panel by column, all of one size; None where the panel has none."""
    _check(panel, classes)
    full_height, full_width = panel.image.shape[:2]
    scale = min(height / full_height, 2 * height / full_width)
    size = (max(1, round(full_width * scale)), max(1, round(full_height * scale)))
    image = Image.fromarray(panel.image).resize(size, Image.Resampling.LANCZOS)

    def mask(labels: NDArray[np.uint8] | None) -> Image.Image | None:
        return None if labels is None else _mask_picture(labels, size)

    heat = _heat_picture(image, panel.maps, classes) if panel.maps else None
    cells = (image, mask(panel.truth), heat, mask(panel.pseudo_mask), mask(panel.prediction))
    return dict(zip(_COLUMNS, cells, strict=True))


def _check(panel: Panel, classes: Sequence[str]) -> None:
    size = panel.image.shape[:2]
    arrays = {"truth": panel.truth, "pseudo mask": panel.pseudo_mask, "prediction": panel.prediction}
    for what, labels in arrays.items():
        if labels is None:
            continue
        if labels.shape != size:
            raise ValueError(f"{what} of {panel.image_id} is {labels.shape}; expected its image's {size}")
        known = labels[labels != IGNORE]
        if known.size and known.max() > len(classes):
            raise ValueError(f"{what} of {panel.image_id} has label {known.max()}; expected at most {len(classes)}")
    for name, heat in panel.maps:
        if heat.shape != size:
            raise ValueError(f"map of {name} on {panel.image_id} is {heat.shape}; expected its image's {size}")
    if unknown := [name for name in (*panel.tags, *(name for name, _ in panel.maps)) if name not in classes]:
        raise ValueError(f"{panel.image_id} has the unknown class {unknown[0]!r}; expected one of {', '.join(classes)}")


def _mask_picture(labels: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    """Labels in palette colours, ignored pixels striped, segments with a light rim that lifts dark ones off black."""
    labels = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
    colours = palette()[labels].astype(np.float32)
    framed = np.pad(labels, 1, mode="edge")
    neighbours = (framed[:-2, 1:-1], framed[2:, 1:-1], framed[1:-1, :-2], framed[1:-1, 2:])
    rim = np.logical_or.reduce([labels != other for other in neighbours]) & (labels != BACKGROUND)
    colours[rim] += 0.65 * (255 - colours[rim])
    ignored = labels == IGNORE
    stripe = np.add.outer(np.arange(size[1]), np.arange(size[0])) // 5 % 2
    colours[ignored] = _IGNORE_STRIPES[stripe[ignored]]
    return Image.fromarray(colours.astype(np.uint8))


def _heat_picture(
    image: Image.Image, maps: Sequence[tuple[str, NDArray[np.float32]]], classes: Sequence[str]
) -> Image.Image:
    """Localization maps as heat over the dimmed grey image: a class in its hue, pale at 1, mixed where maps overlap."""
    values = np.stack([np.asarray(Image.fromarray(heat.astype(np.float32)).resize(image.size)) for _, heat in maps])
    values = np.nan_to_num(values).clip(0, 1)
    hues = np.array([_hue(list(classes).index(name) + 1) for name, _ in maps])
    strength = values.max(axis=0)[..., None]
    weights = values**3 / np.maximum((values**3).sum(axis=0), 1e-9)
    colour = np.einsum("thw,tc->hwc", weights, hues)
    colour += (255 - colour) * 0.7 * np.maximum(strength - 0.55, 0) / 0.45
    grey = np.asarray(image.convert("L"), np.float32)[..., None] * _DIMMED + 10
    opacity = np.minimum(strength / 0.6, 1) * 0.88
    return Image.fromarray((grey * (1 - opacity) + colour * opacity).astype(np.uint8))


def _hue(label: int) -> NDArray[np.float64]:
    """A label's palette colour, (3,), stronger and brighter to shine over a grey image; dark ones stay darker."""
    colour = palette()[label].astype(np.float64)
    colour -= 0.5 * colour.min()
    return colour * 255 / colour.max() * (0.76 + 0.24 * min(colour.max() / 192, 1))


def _hex(label: int) -> str:
    return "#" + palette()[label].tobytes().hex()


def _legend(panels: Iterable[Panel], classes: Sequence[str]) -> list[_LegendItem]:
    """Names and colours of the labels that occur in the panels: background first, ignored last."""
    seen: set[int] = set()
    for panel in panels:
        seen |= {list(classes).index(name) + 1 for name in panel.tags}
        for labels in (panel.truth, panel.pseudo_mask, panel.prediction):
            if labels is not None:
                seen |= set(np.unique(labels).tolist())
    names = {BACKGROUND: "background", IGNORE: "ignored"} | {k: name for k, name in enumerate(classes, 1)}
    ignored = "#" + _IGNORE_STRIPES[0].tobytes().hex()
    return [_LegendItem(names[label], ignored if label == IGNORE else _hex(label)) for label in sorted(seen)]


def _wrapped(items: Iterable[_LegendItem], font: Any, width: int) -> Iterator[list[tuple[int, _LegendItem]]]:
    """Items with their x positions, a list a line."""
    line: list[tuple[int, _LegendItem]] = []
    x = 0
    for item in items:
        needed = 18 + min(int(font.getlength(_drawable(item.name))), width - 18) + 22
        if line and x + needed > width:
            yield line
            line, x = [], 0
        line.append((x, item))
        x += needed
    if line:
        yield line


def _fitted(text: str, font: Any, width: float) -> str:
    """The text, cut with an ellipsis to a width in pixels."""
    text = _drawable(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[: max(0, len(text) - 1 - len(text) // 16)]
    return text + "…"


def _drawable(text: str, limit: int = 400) -> str:
    """Text from outside as one line that font renderers take: no line breaks, control characters, lone surrogates."""
    text = text[:limit].encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else " " for c in text)


# --------------------------------------------------------------------------------------------------------------- plots


class _Theme(NamedTuple):
    """Colours of a plot; the stylesheet of the page has the same ones."""

    paper: str
    ink: str
    muted: str
    line: str
    stages: tuple[str, ...]
    """Localization maps, pseudo masks, segmentation."""
    series: tuple[str, ...]


_LIGHT = _Theme(
    "#ffffff", "#16181d", "#5c6370", "#e3e6ea",
    ("#d98200", "#009e73", "#2467c9"),
    ("#d98200", "#2467c9", "#009e73", "#c2408b", "#7a52c7", "#8a6d3b", "#3aa3c4", "#d1495b"),
)  # fmt: skip
_DARK = _Theme(
    "#171a21", "#e8eaee", "#9aa3b0", "#2c313b",
    ("#f2ac3c", "#2fc79a", "#6ba6ff"),
    ("#f2ac3c", "#6ba6ff", "#2fc79a", "#f07fbf", "#b295f5", "#cdb07a", "#6fd0ec", "#ff8a94"),
)  # fmt: skip
_STAGES = {"localization_maps": "Localization maps", "pseudo_masks": "Pseudo masks", "segmentation": "Segmentation"}
_PIXEL = 1 / 96
"""Inches of a CSS pixel; plots are drawn at twice the density."""
_MOST_BARS = 40
"""Classes that the bar chart holds; with more, the best and the worst are drawn."""


class _Plot(NamedTuple):
    """A plot as PNG for a light and a dark page; width and height in CSS pixels."""

    light: bytes
    dark: bytes
    width: int
    height: int


def _plots(data: ReportData) -> dict[str, _Plot]:
    """All plots that the data has points for, by the name of their file."""
    plots: dict[str, _Plot] = {}
    order, columns = _iou_table(data)
    if order:
        shown = order if len(order) <= _MOST_BARS else order[: _MOST_BARS // 2] + order[-(_MOST_BARS // 2) :]
        height = 90 + len(shown) * (12 + 8 * len(columns))
        plots["iou"] = _plot(480, height, partial(_draw_iou, names=shown, columns=columns))
    curves = {label: curve for label, curve in data.curves.items() if len(curve[0])}
    if curves:
        plots["thresholds"] = _plot(480, 320 + 18 * len(curves), partial(_draw_thresholds, curves=curves))
    for who, records in data.training.items():
        if records:
            plots[_training_plot(who)] = _plot(480, 480, partial(_draw_training, records=records))
    return plots


def _training_plot(who: str) -> str:
    return f"training-{re.sub(r'[^a-z0-9]', '_', who.lower())}"


def _plot(width: int, height: int, draw: Callable[[Figure, _Theme], None]) -> _Plot:
    pngs = []
    for theme in (_LIGHT, _DARK):
        figure = Figure(figsize=(width * _PIXEL, height * _PIXEL), layout="constrained", facecolor=theme.paper)
        draw(figure, theme)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=192, facecolor=theme.paper)
        pngs.append(buffer.getvalue())
    return _Plot(pngs[0], pngs[1], width, height)


def _draw_iou(figure: Figure, theme: _Theme, names: Sequence[str], columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Horizontal bars, a group a class in the order given from the top; dashed lines are the means."""
    axes = _axes(figure.add_subplot(), theme, grid="x")
    bar = 0.78 / len(columns)
    for i, (what, score) in enumerate(columns.items()):
        colour = theme.stages[list(_STAGES).index(what)]
        values = [_float(score["iou"].get(name)) for name in names]
        places = np.arange(len(names)) + (i - (len(columns) - 1) / 2) * bar
        axes.barh(places, np.nan_to_num(values), bar * 0.86, color=colour, label=_STAGES[what])
        if math.isfinite(mean := _float(score.get("miou"))):
            axes.axvline(mean, color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
    axes.set_yticks(range(len(names)), [_short(name) for name in names], parse_math=False)
    axes.tick_params("y", labelcolor=theme.ink, labelsize=9.5)
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))
    axes.set_xlabel("IoU in percent, dashed: mIoU", color=theme.muted, fontsize=9)
    _outside_legend(figure, theme, "outside upper left", columns=3)


def _draw_thresholds(
    figure: Figure, theme: _Theme, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> None:
    """mIoU over the background threshold, a line a label, its best point marked."""
    axes = _axes(figure.add_subplot(), theme, grid="both")
    for i, (label, (thresholds, values)) in enumerate(curves.items()):
        colour = theme.series[i % len(theme.series)]
        style = ("-", "--", ":")[i // len(theme.series) % 3]
        text = _short(label, 40)
        best = _best(thresholds, values)
        if best:
            axes.axvline(best[0], color=colour, linewidth=0.8, alpha=0.5)
            axes.plot(*best, "o", color=colour, markersize=8, markeredgecolor=theme.paper, zorder=3)
            text += f": best {best[1]:.1f} at {best[0]:g}"
        marker = "o" if len(thresholds) == 1 else None
        axes.plot(thresholds, values, style, color=colour, linewidth=1.8, marker=marker, label=f" {text}")
    axes.set_xlabel("threshold of the background", color=theme.muted, fontsize=9)
    axes.set_ylabel("mIoU in percent", color=theme.muted, fontsize=9)
    _outside_legend(figure, theme, "outside lower left", columns=1)


def _draw_training(figure: Figure, theme: _Theme, records: Sequence[Mapping[str, Any]]) -> None:
    """Loss and its terms, learning rate, share of time waiting for data, over steps; thin lines begin the epochs."""
    steps = _column(records, "step")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    terms = _terms(records)
    marker = "o" if len(records) == 1 else None
    for i, term in enumerate(["loss", *terms]):
        colour = theme.ink if term == "loss" else theme.series[(i - 1) % len(theme.series)]
        values = _column(records, term)
        line = {"color": colour, "marker": marker, "markersize": 4, "zorder": 3 if term == "loss" else 2}
        if len(records) > _SMOOTH_FROM:
            top.plot(steps, values, color=colour, linewidth=0.6, alpha=0.25)
            values = _smoothed(values)
        top.plot(steps, values, linewidth=2 if term == "loss" else 1.4, label=f" {_short(term, 30)}", **line)
    middle.plot(steps, _column(records, "learning_rate"), color=theme.series[1], linewidth=1.6, marker=marker)
    waiting = 100 * _column(records, "waiting")
    bottom.fill_between(steps, 0, waiting, color=theme.series[0], alpha=0.35, linewidth=0)
    bottom.plot(steps, waiting, color=theme.series[0], linewidth=1.2, marker=marker)
    epochs = _column(records, "epoch")
    starts = steps[1:][np.diff(epochs) > 0]
    shown = starts if len(starts) <= _MOST_EPOCHS else starts[:0]
    titles = ("loss" if not terms else "loss and its terms", "learning rate", "waiting for data, percent of the time")
    for axes, title in zip((top, middle, bottom), titles, strict=True):
        _axes(axes, theme, grid="y")
        axes.set_title(title, loc="left", color=theme.ink, fontsize=9.5)
        axes.locator_params(axis="y", nbins=6 if axes is top else 3)
        for start in shown:
            axes.axvline(start, color=theme.line, linewidth=0.8, zorder=0.5)
    top.set_ylim(bottom=min(0, top.get_ylim()[0]))
    middle.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    middle.yaxis.get_offset_text().set(color=theme.muted, fontsize=8)
    middle.set_ylim(bottom=0)
    bottom.set_ylim(0, max(10.0, float(np.nanmax([*waiting, 0.0])) * 1.15))
    bottom.set_xlabel("step, thin lines: epochs" if len(shown) else "step", color=theme.muted, fontsize=9)
    _outside_legend(figure, theme, "outside lower left", columns=4)


_SMOOTH_FROM = 60
"""Records from which on the loss is drawn smoothed over its faint self."""
_MOST_EPOCHS = 60
"""Epochs up to which each is marked."""
_NO_TERMS = {"step", "epoch", "loss", "learning_rate", "images_per_second", "waiting"}


def _terms(records: Iterable[Mapping[str, Any]]) -> list[str]:
    numbers = (key for record in records for key, value in record.items() if isinstance(value, int | float))
    return list(dict.fromkeys(key for key in numbers if key not in _NO_TERMS))


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centred window of 1/30 of the records, at the ends over what there is of it; NaN are left out."""
    half = max(1, len(values) // 60)
    known = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, values, 0), kernel, "same")
    count = np.convolve(known, kernel, "same")
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _axes(axes: Axes, theme: _Theme, *, grid: str) -> Axes:
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.line)
    axes.tick_params(color=theme.line, labelcolor=theme.muted, labelsize=9, length=0)
    axes.grid(axis=grid, color=theme.line, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    return axes


def _outside_legend(
    figure: Figure, theme: _Theme, where: Literal["outside upper left", "outside lower left"], *, columns: int
) -> None:
    legend = figure.legend(
        loc=where, ncols=columns, frameon=False, fontsize=9, labelcolor=theme.ink, handlelength=1.2, columnspacing=1.4
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # "$" in a name is a dollar


def _column(records: Iterable[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    return np.array([_float(record.get(key)) for record in records])


def _best(thresholds: Sequence[float], values: Sequence[float]) -> tuple[float, float] | None:
    """The point of the highest value, the first of equals; None where no value is a number."""
    known = [(value, -i) for i, value in enumerate(values) if math.isfinite(_float(value))]
    if not known:
        return None
    value, i = max(known)
    return float(thresholds[-i]), float(value)


def _short(text: str, limit: int = 24) -> str:
    text = _drawable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --------------------------------------------------------------------------------------------------- words and numbers


def _float(value: Any) -> float:
    """A number, NaN for None."""
    return math.nan if value is None else float(value)


def _decimal(value: Any) -> str:
    """One decimal, the precision of a score: 43.5; a dash where there is no number."""
    return f"{value:.1f}" if math.isfinite(_float(value)) else "–"


def _brief(value: Any) -> str:
    """Numbers without needless digits, one or several: 0.26 or 0.75, 1, 1.25; words as they are."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_brief, value))
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _figure(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def _count(value: Any) -> str:
    """With thin spaces between thousands: 10 582."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}") if isinstance(value, int | float) else str(value)


def _share(value: Any) -> str:
    """A share in [0, 1] as percent: 12.3 %."""
    percent = 100 * _float(value)
    if not math.isfinite(percent):
        return "–"
    return f"{percent:.1f}\N{NARROW NO-BREAK SPACE}%"


def _exact(value: Any) -> str:
    """For machines: all digits of a number."""
    return repr(float(value))


def _flag(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _duration(seconds: float | None) -> str:
    """4.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _moment(iso: str) -> str:
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{moment:%d %B %Y, %H:%M} {moment.tzname() or ''}".strip().lstrip("0")


def _commit(commit: str) -> str:
    """A full hash cut to ten digits, with what follows it (such as -dirty) kept."""
    return re.sub(r"^([0-9a-f]{10})[0-9a-f]{30}", r"\1", str(commit))


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _encode(picture: Image.Image, kind: str) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, kind, **({"quality": 88} if kind == "JPEG" else {"optimize": True}))
    return buffer.getvalue()


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


# ---------------------------------------------------------------------------------------------------------------- page

_MOST_REJECTS = 300
"""Rows of the table of rejects; the counts by reason cover all of them."""


def _environment() -> jinja2.Environment:
    """Escapes every value, raises for names that the view lacks, replaces control characters, which HTML forbids."""
    controls = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(9), 11, 12, *range(14, 32), *range(127, 160)]}
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "–" if value is None else value.translate(controls) if type(value) is str else value,
    )
    environment.filters |= {"count": _count, "decimal": _decimal, "duration": _duration, "exact": _exact}
    environment.globals["zip"] = zip
    return environment


def _view(data: ReportData, plots: Mapping[str, _Plot]) -> dict[str, Any]:
    """All that the template shows, ready to be written down."""
    data = replace(data, scores=[_NO_SCORE | score for score in data.scores])
    headlines = {what: _headline(data.scores, what) for what in _STAGES}
    tiles = [_tile(data.scores, what, score) for what, score in headlines.items()]
    order, columns = _iou_table(data)
    colours = {name: _hex(k) for k, name in enumerate(data.classes, 1)} | {"background": _hex(BACKGROUND)}
    return {
        "data": data,
        "created": _moment(data.created),
        "commit": _commit(data.git) if data.git else "not known",
        "tiles": tiles,
        "missing": _missing(data),
        "splits": _gallery_by_split(data.panels, data.classes),
        "legend": _legend(data.panels, data.classes),
        "colours": colours,
        "score_table": _score_table(data.scores),
        "iou_columns": [(what, _STAGES[what], score) for what, score in columns.items()],
        "iou_order": order,
        "iou_cut": len(order) > _MOST_BARS,
        "most_bars": _MOST_BARS,
        "iou_alt": _iou_alt(order, columns),
        "curves": [(label, len(x), _best(x, y)) for label, (x, y) in data.curves.items()],
        "truth_shown": any(panel.truth is not None for panel in data.panels),
        "maps_shown": any(panel.maps for panel in data.panels),
        "training": [_training_view(who, records) for who, records in data.training.items()],
        "counts": _count_groups(data.counts),
        "reject_reasons": Counter(str(reject.get("reason")) for reject in data.rejects).most_common(),
        "rejects": data.rejects[:_MOST_REJECTS],
        "stages": _stage_times(data.seconds, data.computed),
        "spent": sum(s for stage, s in data.seconds.items() if data.computed.get(stage, True)),
        "sources": Counter(source for _, _, source in data.config).most_common(),
        "plots": {name: _plot_view(plot) for name, plot in plots.items()},
        "light": _LIGHT,
        "dark": _DARK,
    }


def _headline(scores: Iterable[dict[str, Any]], what: str) -> dict[str, Any] | None:
    """The score that stands for a stage: its best mIoU; of segmentation, if possible, not on images it learnt from."""
    known = [score for score in scores if score.get("what") == what and math.isfinite(_float(score.get("miou")))]
    if what == "segmentation":
        known = [score for score in known if not str(score.get("split")).startswith("train")] or known
    return max(known, key=lambda score: score["miou"], default=None)


def _tile(scores: Sequence[dict[str, Any]], what: str, score: dict[str, Any] | None) -> dict[str, Any]:
    same = sum(other.get("what") == what for other in scores)
    marks = []
    if score and what == "pseudo_masks":
        marks = [
            mark
            for mark in scores
            if mark.get("what") == "mark"
            and mark.get("split") == score.get("split")
            and math.isfinite(_float(mark.get("miou")))
        ]
    why = "scored without truth: no mIoU" if same else "no score in this run"
    return {
        "what": what, "title": _STAGES[what], "score": score, "marks": marks, "of": same,
        "how": _meaning_in_words(score) if score else "", "why": why,
    }  # fmt: skip


def _missing(data: ReportData) -> list[str]:
    """What a whole run has and this one lacks, in plain words."""
    absent = []
    for what, title in _STAGES.items():
        entries = [score for score in data.scores if score.get("what") == what]
        if not entries:
            absent.append(f"{title}: not scored; the run ended before, or there is no truth to score against.")
        elif all(not math.isfinite(_float(score.get("miou"))) for score in entries):
            absent.append(f"{title}: no mIoU, for there is no truth to score against.")
    for who in ("classifier", "segmenter"):
        if not data.training.get(who):
            absent.append(f"Training of the {who}: no records.")
    if not data.panels:
        absent.append("Gallery: no images.")
    elif all(panel.truth is None for panel in data.panels):
        absent.append("Truth: not known for the gallery's images.")
    return absent


# What a score means, in the order of the table's columns: key, heading, how a value is written.
_MEANING: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("split", "split", str),
    ("images", "images", _count),
    ("threshold", "threshold", _brief),
    ("background_cue", "background cue", str),
    ("related_images", "related images", _count),
    ("scales", "scales", _brief),
    ("mirror", "mirror", _flag),
    ("crf", "CRF", _flag),
    ("ignored_share", "ignored", _share),
    ("seed", "seed", str),
    ("recipe", "recipe", str),
    ("weights", "weights", str),
    ("git", "git", _commit),
)  # fmt: skip
_NUMBERS = {"images", "threshold", "related_images", "ignored_share", "seed"}
_IN_WORDS = {
    "threshold": "threshold {}", "background_cue": "background by {}", "related_images": "{} related images",
    "scales": "scales {}", "mirror": "mirror {}", "crf": "CRF {}", "ignored_share": "{} ignored",
}  # fmt: skip
_NO_SCORE = dict.fromkeys(["what", "name", "miou", "iou", *(key for key, _, _ in _MEANING)])
_OFTEN_THE_SAME = {"seed", "recipe", "weights", "git"}


def _meaning_in_words(score: Mapping[str, Any]) -> str:
    """How a score was made, after its split and images: `threshold 0.26 · 3 related images`."""
    known = ((key, write) for key, _, write in _MEANING if key in _IN_WORDS and score.get(key) is not None)
    return " · ".join(_IN_WORDS[key].format(write(score[key])) for key, write in known)


def _score_table(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Groups of scores by what was scored, with a column for every meaning that any of them has.

    Of seed, recipe, weights and git, those that all scores share are said once, under the table.
    """
    same: list[tuple[str, str]] = []
    columns = []
    for key, heading, write in _MEANING:
        values = [score.get(key) for score in scores]
        if all(value is None for value in values):
            continue
        if key in _OFTEN_THE_SAME and all(value == values[0] for value in values):
            same.append((heading, write(values[0])))
        else:
            columns.append((key, heading, write))
    groups: dict[str, list[dict[str, Any]]] = {}
    known = [*_STAGES, "mark"]
    for score in sorted(scores, key=lambda s: known.index(s["what"]) if s.get("what") in known else len(known)):
        texts = ["–" if score.get(key) is None else write(score[key]) for key, _, write in columns]
        row = {"name": score.get("name") or "unnamed", "miou": score.get("miou"), "texts": texts}
        groups.setdefault(str(score.get("what")), []).append(row)
    titles = _STAGES | {"mark": "Marks, without a classifier"}
    return {
        "headings": [(heading, key in _NUMBERS) for key, heading, _ in columns],
        "groups": [(what in titles and what, titles.get(what, what), rows) for what, rows in groups.items()],
        "same": same,
    }


def _iou_table(data: ReportData) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Names in falling order of the last stage's IoU, and each stage's headline score."""
    found = {what: _headline(data.scores, what) for what in _STAGES}
    columns = {what: score for what, score in found.items() if score and score.get("iou")}
    if not columns:
        return [], {}
    names = list(dict.fromkeys(name for score in columns.values() for name in score["iou"]))

    def rank(name: str) -> list[float]:
        values = [_float(score["iou"].get(name)) for score in reversed(columns.values())]
        return [value if math.isfinite(value) else -1.0 for value in values]

    return sorted(names, key=rank, reverse=True), columns


def _iou_alt(order: Sequence[str], columns: Mapping[str, Mapping[str, Any]]) -> str:
    if not order:
        return ""
    last = [*columns.values()][-1]["iou"]
    known = [name for name in order if math.isfinite(_float(last.get(name)))]
    ends = f", from {known[0]} {_decimal(last[known[0]])} to {known[-1]} {_decimal(last[known[-1]])}" if known else ""
    stages = ", ".join(_STAGES[what].lower() for what in columns)
    return f"Bars: IoU of {len(order)} labels, {stages}{ends}; the table beside has all figures"


def _gallery_by_split(panels: Sequence[Panel], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Panels by split, with the columns that any of the split's has."""
    groups: dict[str, list[Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.split, []).append(panel)
    splits = []
    for split, members in groups.items():
        rows = [_cells(panel, classes, _PAGE_HEIGHT) for panel in members]
        columns = [column for column in _COLUMNS if any(row[column] for row in rows)]
        shown = [
            {
                "id": panel.image_id,
                "tags": [(name, _hex(list(classes).index(name) + 1)) for name in panel.tags],
                "cells": [(column, _cell_view(panel, column, row[column], classes)) for column in columns],
            }
            for panel, row in zip(members, rows, strict=True)
        ]
        splits.append({"name": split, "columns": columns, "panels": shown})
    return splits


def _cell_view(panel: Panel, column: str, cell: Image.Image | None, classes: Sequence[str]) -> dict[str, Any] | None:
    """A cell as data URI, with a note for its caption and words for those who cannot see it."""
    if cell is None:
        return None
    labels = {"truth": panel.truth, "pseudo mask": panel.pseudo_mask, "prediction": panel.prediction}.get(column)
    note = ""
    if labels is not None:
        alt = f"{column} of {panel.image_id}: {_areas(labels, classes)}"
        ignored = float((labels == IGNORE).mean())
        if column == "prediction" and panel.truth is not None and (panel.truth != IGNORE).any() and not ignored:
            note = f"mIoU here {mean_iou(confusion(panel.truth, labels, len(classes))):.0f}"
        elif column == "pseudo mask" and ignored:
            note = f"{_share(ignored)} ignored"
    elif column == "localization map":
        strong = (f"{name} above one half on {_share((heat > 0.5).mean())}" for name, heat in panel.maps)
        alt = f"localization maps of {panel.image_id}: {', '.join(strong)} of the image"
    else:
        alt = f"image {panel.image_id}, tagged {', '.join(panel.tags) or 'with nothing'}"
    # Masks are flat colours, which PNG packs small and exact; pictures with grain are ten times smaller as JPEG.
    kind = "JPEG" if labels is None else "PNG"
    uri = _data_uri(_encode(cell, kind), kind)
    return {"uri": uri, "width": cell.width, "height": cell.height, "alt": alt, "note": note}


def _areas(labels: NDArray[np.uint8], classes: Sequence[str]) -> str:
    names = {BACKGROUND: "background", IGNORE: "ignored"} | {k: name for k, name in enumerate(classes, 1)}
    values, counts = np.unique(labels, return_counts=True)
    shares = zip(values.tolist(), (counts / labels.size).tolist(), strict=True)
    return ", ".join(f"{names[label]} {_share(share)}" for label, share in shares)


def _training_view(who: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    plot = _training_plot(who)
    losses = _column(records, "loss")
    if not len(losses):
        return {"who": who, "plot": plot, "facts": [], "alt": "", "broken": False}
    speed, waiting = _column(records, "images_per_second"), _column(records, "waiting")
    tail = losses[-max(1, len(losses) // 20) :]
    facts = [
        ("steps", _count(int(np.nanmax(_column(records, "step"))))),
        ("epochs", _count(len(set(_column(records, "epoch").tolist())))),
        ("loss", f"{_figure(losses[0])} → {_figure(tail.mean())}"),
    ]
    if np.isfinite(speed).any():
        facts.append(("images a second", f"{np.nanmedian(speed):,.0f}"))
    if np.isfinite(waiting).any():
        facts.append(("waiting for data", _share(float(np.nanmean(waiting)))))
    terms = ", ".join(_terms(records))
    alt = f"Loss of the {who} over {len(records)} records, from {_figure(losses[0])} to {_figure(tail.mean())}"
    alt += f"; terms: {terms}" if terms else ""
    return {"who": who, "plot": plot, "facts": facts, "alt": alt, "broken": not np.isfinite(losses).all()}


def _count_groups(counts: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Counts as titled lists: plain numbers first, then a list a nested dictionary, deeper names joined by arrows."""

    def flat(nested: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in nested.items():
            if isinstance(value, Mapping):
                yield from ((f"{name} → {inner}", number) for inner, number in flat(value))
            else:
                yield name, value

    plain = [(name, value) for name, value in counts.items() if not isinstance(value, Mapping)]
    nested = [(_words(name), list(flat(value))) for name, value in counts.items() if isinstance(value, Mapping)]
    return ([("overall", plain)] if plain else []) + nested


def _stage_times(seconds: Mapping[str, float], computed: Mapping[str, bool]) -> list[dict[str, Any]]:
    longest = max(seconds.values(), default=0) or 1
    stages = dict.fromkeys([*seconds, *computed])
    return [
        {
            "name": _words(stage),
            "seconds": seconds.get(stage),
            "computed": computed.get(stage),
            "share": 100 * seconds.get(stage, 0) / longest,
        }
        for stage in stages
    ]


def _plot_view(plot: _Plot) -> dict[str, Any]:
    light, dark = _data_uri(plot.light, "PNG"), _data_uri(plot.dark, "PNG")
    return {"light": light, "dark": dark, "width": plot.width, "height": plot.height}
