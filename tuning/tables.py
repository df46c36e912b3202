"""Tables of studies, ours beside the paper's, on the terminal and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.table import Table

# VOC 2012 val, mIoU of the segmentation network, ResNet-101, VOC only (table 7 and section 4.5 of the paper).
PAPER_RELATED_IMAGES: Mapping[int, float] = {0: 64.7, 1: 65.9, 2: 66.0, 3: 66.2, 4: 66.1, 5: 66.0}

# The same, by training and related images (tables 5 and 6).
PAPER_EFFECT: Mapping[tuple[str, int], float] = {
    ("none", 0): 61.7,
    ("co", 3): 65.5,
    ("co+contrastive", 0): 64.7,
    ("co+contrastive", 3): 66.2,
}

COLUMNS = ("localization maps", "pseudo masks", "segmentation, no CRF", "segmentation, CRF")


def headline(scores: Sequence[dict[str, Any]], related: int) -> dict[str, float]:
    """The figures of a trial by column: mIoU in percent of its maps, pseudo masks and segmentation."""
    out: dict[str, float] = {}
    for score in scores:
        if score["what"] == "localization_maps" and score["related_images"] == related:
            out[COLUMNS[0]] = score["miou"]
        elif score["what"] == "pseudo_masks":
            out[COLUMNS[1]] = score["miou"]
        elif score["what"] == "segmentation":
            out[COLUMNS[3 if score["crf"] else 2]] = score["miou"]
    return out


def related_images_table(figures: Mapping[int, Mapping[str, float]], title: str) -> Table:
    """mIoU by number of related images, and the paper's column beside ours."""
    table = Table(title=title, title_justify="left")
    table.add_column("related images", justify="right")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("paper, VOC 2012 val", justify="right")
    for related, row in sorted(figures.items()):
        cells = [f"{row[c]:.2f}" if c in row else "-" for c in COLUMNS]
        table.add_row(str(related), *cells, f"{PAPER_RELATED_IMAGES.get(related, float('nan')):.1f}")
    return table


def related_images_picture(figures: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """A plot of the same figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for column in COLUMNS:
        points = [(related, row[column]) for related, row in sorted(figures.items()) if column in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=column)
    axes.set_xlabel("related images R")
    axes.set_ylabel("mIoU %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")


class Effect(NamedTuple):
    """Scores of one cell of the study of effects: mIoU in percent of each seed's run, by column."""

    attention: str
    related: int
    miou: dict[str, list[float]]


def effect_table(figures: Sequence[Effect], title: str) -> Table:
    """Mean and deviation of mIoU by training and number of related images, and the paper's column beside ours."""
    table = Table(title=title, title_justify="left")
    table.add_column("training", no_wrap=True)
    table.add_column("R", justify="right")
    columns = [column for column in COLUMNS if any(column in cell.miou for cell in figures)]
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("paper, VOC 2012 val", justify="right")
    for cell in figures:
        cells = [_spread(cell.miou[column]) if column in cell.miou else "-" for column in columns]
        paper = PAPER_EFFECT.get((cell.attention, cell.related))
        table.add_row(cell.attention, str(cell.related), *cells, "-" if paper is None else f"{paper:.1f}")
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}" + (f" ±{stdev(values):.2f}" if len(values) > 1 else "")


def effect_picture(figures: Sequence[Effect], path: Path) -> None:
    """A plot a column: mIoU over related images, a line a training, bars for the deviation over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = [column for column in COLUMNS if any(column in cell.miou for cell in figures)]
    figure = Figure(figsize=(4.0 * len(columns), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for attention in dict.fromkeys(cell.attention for cell in figures):
            cells = [c for c in figures if c.attention == attention and column in c.miou]
            means = [mean(c.miou[column]) for c in cells]
            bars = [stdev(c.miou[column]) if len(c.miou[column]) > 1 else 0.0 for c in cells]
            axes.errorbar([c.related for c in cells], means, yerr=bars, marker="o", capsize=3, label=attention)
        axes.set_title(column)
        axes.set_xlabel("related images R")
        axes.set_ylabel("mIoU %")
        axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")
