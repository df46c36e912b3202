"""Tables of studies, ours beside the paper's, on the terminal and as a picture."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
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
_HEADS = dict(zip(COLUMNS, ("maps", "pseudo masks", "segments", "with CRF"), strict=True))  # eighty characters are few
_MEANING = ("split", "images", "background_cue", "map_scale", "aggregation", "scales", "mirror", "weights", "git")

Meaning = dict[str, Any]
"""What a column of a study's figures means: the values of its scores' keys, a list where the trials differ."""


def _entries(scores: Sequence[dict[str, Any]], related: int) -> dict[str, dict[str, Any]]:
    """The entries of a trial's scores that a study shows, by column."""
    out: dict[str, dict[str, Any]] = {}
    for score in scores:
        if score["what"] == "localization_maps" and score["related_images"] == related:
            out[COLUMNS[0]] = score
        elif score["what"] == "pseudo_masks":
            out[COLUMNS[1]] = score
        elif score["what"] == "segmentation":
            out[COLUMNS[3 if score["crf"] else 2]] = score
    return out


def headline(scores: Sequence[dict[str, Any]], related: int) -> dict[str, float]:
    """The figures of a trial by column: mIoU in percent of its maps, pseudo masks and segmentation."""
    return {column: entry["miou"] for column, entry in _entries(scores, related).items()}


def meaning(trials: Sequence[tuple[Sequence[dict[str, Any]], int]]) -> dict[str, Meaning]:
    """What each column means, from the scores of trials and their numbers of related images."""
    out: dict[str, Meaning] = {}
    for column in COLUMNS:
        entries = [found[column] for scores, related in trials if column in (found := _entries(scores, related))]
        for key in _MEANING if entries else ():
            values: list[Any] = []
            for entry in entries:
                values += [entry[key]] if entry[key] not in values else []
            out.setdefault(column, {})[key] = values[0] if len(values) == 1 else values
    return out


def caption(means: Mapping[str, Meaning]) -> str:
    """One line on what the columns mean."""
    parts = []
    for column, of in means.items():
        how = of["background_cue"] or f"scales {of['scales']}{' and mirror' if of['mirror'] else ''}"
        parts.append(f"{column}: {of['split']}, {of['images']} images, {how}")
    for key, words in (("map_scale", "maps.scale={}"), ("aggregation", "related images by {}")):
        values = [of[key] if isinstance(of[key], list) else [of[key]] for of in means.values()]
        parts += [words.format(v) for v in dict.fromkeys(itertools.chain(*values)) if v is not None]
    return "; ".join(parts)


def related_images_table(figures: Mapping[int, Mapping[str, float]], title: str) -> Table:
    """mIoU by number of related images, and the paper's column beside ours."""
    table = Table(title=title, title_justify="left")
    table.add_column("R", justify="right")
    for column in COLUMNS:
        table.add_column(_HEADS[column], justify="right")
    table.add_column("paper, VOC", justify="right")
    for related, row in sorted(figures.items()):
        cells = [f"{row[c]:.2f}" if c in row else "-" for c in COLUMNS]
        table.add_row(str(related), *cells, f"{PAPER_RELATED_IMAGES.get(related, float('nan')):.1f}")
    return table


def related_images_picture(figures: Mapping[int, Mapping[str, float]], path: Path, title: str, below: str) -> None:
    """A plot of the same figures, with a line below on what they mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for column in COLUMNS:
        points = [(related, row[column]) for related, row in sorted(figures.items()) if column in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=column)
    axes.set_title(f"{title}, mIoU %")
    axes.set_xlabel("related images R")
    axes.set_xticks(sorted(figures))
    axes.set_ylabel("mIoU %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.supxlabel(fill(below, 110), fontsize=6)
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
        table.add_column(_HEADS[column], justify="right")
    table.add_column("paper, VOC", justify="right")
    for cell in figures:
        cells = [_spread(cell.miou[column]) if column in cell.miou else "-" for column in columns]
        paper = PAPER_EFFECT.get((cell.attention, cell.related))
        table.add_row(cell.attention, str(cell.related), *cells, "-" if paper is None else f"{paper:.1f}")
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}" + (f" ±{stdev(values):.2f}" if len(values) > 1 else "")


def effect_picture(figures: Sequence[Effect], path: Path, title: str, below: str) -> None:
    """A plot a column: mIoU over related images, a line a training, bars for the deviation over seeds.

    Numbers of related images stand side by side, whatever lies between them; `below` says what the columns mean.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = [column for column in COLUMNS if any(column in cell.miou for cell in figures)]
    figure = Figure(figsize=(4.0 * max(1, len(columns)), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    numbers = sorted({cell.related for cell in figures})
    trainings = list(dict.fromkeys(cell.attention for cell in figures))
    for axes, column in zip(figure.subplots(1, max(1, len(columns)), squeeze=False)[0], columns, strict=False):
        for nth, attention in enumerate(trainings):
            cells = [c for c in figures if c.attention == attention and column in c.miou]
            # Beside one another, or their bars cover each other.
            places = [numbers.index(c.related) + 0.08 * (nth - (len(trainings) - 1) / 2) for c in cells]
            bars = [stdev(c.miou[column]) if len(c.miou[column]) > 1 else 0.0 for c in cells]
            means = [mean(c.miou[column]) for c in cells]
            axes.errorbar(places, means, yerr=bars, marker="o", linewidth=1, capsize=3, label=attention)
        axes.set_title(column)
        axes.set_xlabel("related images R")
        axes.set_xticks(range(len(numbers)), [str(r) for r in numbers])
        axes.set_ylabel("mIoU %, its own range")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=max(1, len(labels)), frameon=False, fontsize=8)
    seeds = max((len(values) for cell in figures for values in cell.miou.values()), default=0)
    figure.suptitle(f"{title}: mean of {seeds} seeds, bars: their deviation", x=0.01, ha="left", fontsize=9)
    figure.supxlabel(fill(below, 70 * max(1, len(columns))), fontsize=6)
    figure.savefig(path, dpi=150, format="png")
