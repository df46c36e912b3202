"""The page of one run: scores, pictures, curves, counts -> report.html, one self-contained file, and pictures/*.png.

A pure function of `ReportData`: no Ray, no MLflow. Whatever a run lacks (it stopped early, nobody knows
the truth) the page names instead of failing. Names and reasons come from outside, so the template escapes everything
and the page forbids itself, by its content security policy, to load or run anything.
"""

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from math import isfinite
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
from PIL import Image

from mcis.platform.reporting.panels import (
    COLUMNS,
    UNUSED,
    Panel,
    Steps,
    cells,
    describe,
    gallery,
    labels,
    legend,
    panel_picture,
    share,
    steps_picture,
)
from mcis.platform.reporting.plots import (
    STAGES,
    THEMES,
    Plot,
    best_point,
    iou_chart,
    loss_terms,
    threshold_chart,
    training_chart,
)
from mcis.platform.runs.workspace import written_aside


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page shows. Scores and IoU are in percent, shares in [0, 1], times in seconds.

    name, setting, recipe, created (ISO 8601), git: what ran, when, and from which commit.
    classes: K names; class index k is label k + 1.
    scores: the entries of scores.json; any value but `what` may be None.
    counts: numbers by name, nested as deep as needed: {"images": {"train": 480, "val": 120}, ...}.
    rejects: one an image that was not used: uri, image_id, split, reason.
    notes: warnings in plain words.
    seconds, computed: by stage, its wall time and whether it was computed in this call or taken from before.
    training: "classifier" and "segmenter" -> the records of their training, with keys as in `plots.training_chart`.
    curves: label -> (thresholds, mIoU in percent) of localization maps.
    config: (dotted key, value, where the value comes from).
    environment: versions and machine, by name.
    attention: how some localization maps came to be.
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
    attention: Sequence[Steps] = ()


def write_report(data: ReportData, folder: Path) -> Path:
    """Writes folder/report.html and folder/pictures/*.png, replaces those of an earlier report; returns the page.

    Raises:
        ValueError: a panel's arrays differ in size, or hold a label or a map of a class that `data.classes` lacks.
        UserError: the disk is full or cannot be written.
    """
    pictures = folder / "pictures"
    drawn = {f"panel-{n:02}": panel_picture(panel, data.classes) for n, panel in enumerate(data.panels, 1)}
    if data.panels:
        drawn["gallery"] = gallery(data.panels, data.classes)
    drawn |= {f"attention-{n:02}": steps_picture(steps) for n, steps in enumerate(data.attention, 1)}
    plots = _plots(data)
    content = {f"{name}.png": encode(picture, "PNG") for name, picture in drawn.items()}
    content |= {f"{name}.png": plot.light for name, plot in plots.items()}
    for name, png in content.items():
        with written_aside(pictures / name) as aside:
            aside.write_bytes(png)
    for path in pictures.glob("*.png"):
        if path.name not in content and _PICTURE_NAME.fullmatch(path.name):
            path.unlink()  # an earlier report's: this run has no such picture, or fewer panels
    page = environment().get_template("run_page.html.j2").render(_view(data, plots))
    # A file name that is no UTF-8 reaches Python with lone surrogates: shown as \udcff, not a crash.
    with written_aside(folder / "report.html") as aside:
        aside.write_bytes(page.encode("utf-8", "backslashreplace"))
    return folder / "report.html"


_PICTURE_NAME = re.compile(r"(panel-\d+|attention-\d+|gallery|iou|thresholds|training-\w+)\.png")
_MOST_BARS = 40
"""Labels that the chart of IoU holds; with more, the best and the worst are drawn."""
_MOST_REJECTS = 300
"""Rows of the table of rejects; the counts by reason cover all of them."""
_PAGE_HEIGHT = 240
"""Pixels of a panel's cell in the page, where it is shown at about 200 px width: sharp on a dense screen."""


def _plots(data: ReportData) -> dict[str, Plot]:
    """All plots that the data has points for, by the name of their file."""
    plots: dict[str, Plot] = {}
    order, scores = _iou_table(data.scores)
    if order:
        half = _MOST_BARS // 2
        plots["iou"] = iou_chart(order if len(order) <= _MOST_BARS else order[:half] + order[-half:], scores)
    if curves := {label: curve for label, curve in data.curves.items() if curve[0]}:
        plots["thresholds"] = threshold_chart(curves)
    return plots | {_training_name(who): training_chart(records) for who, records in data.training.items() if records}


def _training_name(who: str) -> str:
    return f"training-{re.sub(r'[^a-z0-9]', '_', who.lower())}"


def environment() -> jinja2.Environment:
    """Of all pages: escapes every value, raises for names that the view lacks, replaces control characters.

    HTML forbids those.
    """
    controls = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(9), 11, 12, *range(14, 32), *range(127, 160)]}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "–" if value is None else value.translate(controls) if type(value) is str else value,
    )
    environment.filters |= {"count": count, "decimal": "{:.1f}".format, "duration": _duration, "exact": float}
    environment.globals["zip"] = zip
    return environment


def _view(data: ReportData, plots: Mapping[str, Plot]) -> dict[str, Any]:
    """All that the template shows, ready to be written down."""
    order, columns = _iou_table(data.scores)
    return {
        "data": data,
        "created": f"{datetime.fromisoformat(data.created):%d %B %Y, %H:%M %Z}".lstrip("0"),
        "commit": _commit(data.git) if data.git else "not known",
        "tiles": [_tile(data.scores, what) for what in STAGES],
        "missing": _missing(data),
        "splits": _gallery_by_split(data.panels, data.classes),
        "attention_unused": any(title == UNUSED for one in data.attention for title, _ in one.tiles),
        "attention": [
            (one.image_id, one.name, [(title, data_uri(encode(p, "JPEG"), "JPEG"), p.size) for title, p in one.tiles])
            for one in data.attention
        ],
        "legend": legend(data.panels, data.classes),
        "colors": dict(labels(data.classes).values()),
        "score_table": _score_table(data.scores),
        "iou_columns": [(what, STAGES[what], score) for what, score in columns.items()],
        "iou_order": order,
        "iou_cut": len(order) > _MOST_BARS,
        "most_bars": _MOST_BARS,
        "iou_alt": _iou_alt(order, columns) if order else "",
        "curves": [(label, len(x), best_point(x, y)) for label, (x, y) in data.curves.items()],
        "truth_shown": any(panel.truth is not None for panel in data.panels),
        "maps_shown": any(panel.maps for panel in data.panels),
        "training": [_training_view(who, records) for who, records in data.training.items()],
        "counts": _count_groups(data.counts),
        "reject_reasons": Counter(reject["reason"] for reject in data.rejects).most_common(),
        "rejects": data.rejects[:_MOST_REJECTS],
        "stages": _stage_times(data.seconds, data.computed),
        "spent": sum(s for stage, s in data.seconds.items() if data.computed.get(stage, True)),
        "sources": Counter(source for _, _, source in data.config).most_common(),
        "plots": {
            name: plot._asdict() | {"light": data_uri(plot.light, "PNG"), "dark": data_uri(plot.dark, "PNG")}
            for name, plot in plots.items()
        },
        **THEMES,
    }


def _missing(data: ReportData) -> list[str]:
    """What a whole run has and this one lacks, in plain words."""
    absent = []
    for what, title in STAGES.items():
        entries = [score for score in data.scores if score["what"] == what]
        if not entries:
            absent.append(f"{title}: not scored; the run ended before, or there is no truth to score against.")
        elif not any(_known(score["miou"]) for score in entries):
            absent.append(f"{title}: no mIoU, for there is no truth to score against.")
    for who in ("classifier", "segmenter"):
        if not data.training.get(who):
            absent.append(f"Training of the {who}: no records.")
    if not data.panels:
        absent.append("Gallery: no images.")
    elif all(panel.truth is None for panel in data.panels):
        absent.append("Truth: not known for the gallery's images.")
    return absent


def _candidates(scores: Iterable[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """Scores with a mIoU that may stand for a stage: of segmentation, if possible, not on images it learnt from."""
    known = [score for score in scores if score["what"] == what and _known(score["miou"])]
    if what == "segmentation":
        return [score for score in known if not str(score["split"]).startswith("train")] or known
    return known


def _tile(scores: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """What the page's head says of a stage; beside pseudo masks, the marks of the same split, without a classifier."""
    candidates = _candidates(scores, what)
    score = max(candidates, key=itemgetter("miou"), default=None)
    mious = [other["miou"] for other in scores if other["what"] == what]
    marks = _candidates(scores, "mark") if score and what == "pseudo_masks" else []
    return {
        "what": what,
        "title": STAGES[what],
        "score": score,
        "how": _how(score) if score else "",
        "why": "scored without truth: no mIoU" if mious else "no score in this run",
        "of": len(candidates),
        "aside": sum(map(_known, mious)) > len(candidates),
        "marks": [mark for mark in marks if score and mark["split"] == score["split"]],
    }


def _how(score: Mapping[str, Any]) -> str:
    """How a score was made, after its split and images: `threshold 0.26 · related images 3`."""
    keys = [key for key in _MEANING if key not in {"split", "images"} | _ORIGIN and score[key] is not None]
    return " · ".join(f"{_heading(key)} {_MEANING[key](score[key])}" for key in keys)


def _score_table(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Groups of scores by what was scored, with a column for every meaning that any of them has.

    Of a score's origin, what all scores share is said once, under the table.
    """
    present = [key for key in _MEANING if any(score[key] is not None for score in scores)]
    same = [key for key in present if key in _ORIGIN and len({score[key] for score in scores}) == 1]
    columns = [key for key in present if key not in same]
    titles = STAGES | {"mark": "Marks, without a classifier"}
    groups: dict[str, list[dict[str, Any]]] = {what: [] for what in titles}
    for score in scores:
        texts = ["–" if score[key] is None else _MEANING[key](score[key]) for key in columns]
        row = {"name": score["name"] or "unnamed", "miou": score["miou"], "texts": texts}
        groups.setdefault(score["what"], []).append(row)
    return {
        "headings": [(_heading(key), key in _NUMBERS) for key in columns],
        "groups": [(what in titles and what, titles.get(what, what), rows) for what, rows in groups.items() if rows],
        "same": [(_heading(key), _MEANING[key](scores[0][key])) for key in same],
    }


def _heading(key: str) -> str:
    return "CRF" if key == "crf" else _words(key)


def _iou_table(scores: Sequence[dict[str, Any]]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Names in falling order of the last stage's IoU, and the score that stands for each stage."""
    best = {what: max(_candidates(scores, what), key=itemgetter("miou"), default=None) for what in STAGES}
    columns = {what: score for what, score in best.items() if score and score["iou"]}
    names = dict.fromkeys(name for score in columns.values() for name in score["iou"])

    def rank(name: str) -> list[float]:
        values = [score["iou"].get(name) for score in reversed(columns.values())]
        return [value if _known(value) else -1.0 for value in values]

    return sorted(names, key=rank, reverse=True), columns


def _iou_alt(order: Sequence[str], columns: Mapping[str, Mapping[str, Any]]) -> str:
    stages, last = ", ".join(STAGES[what].lower() for what in columns), [*columns.values()][-1]["iou"]
    known = [f"{name} {last[name]:.1f}" for name in order if _known(last.get(name))]
    ends = f", from {known[0]} to {known[-1]}" if known else ""
    return f"Bars: IoU of {len(order)} labels, {stages}{ends}; the table beside has all figures"


def _gallery_by_split(panels: Sequence[Panel], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Panels by split, with the columns that any of the split's has."""
    known, splits = labels(classes), []
    for split in dict.fromkeys(panel.split for panel in panels):
        members = [panel for panel in panels if panel.split == split]
        rows = [cells(panel, classes, _PAGE_HEIGHT) for panel in members]
        columns = [column for column in COLUMNS if any(column in row for row in rows)]
        shown = [
            {
                "id": panel.image_id,
                "tags": [known[classes.index(name) + 1] for name in panel.tags],
                "cells": [(c, _cell_view(panel, c, row[c], classes) if c in row else None) for c in columns],
            }
            for panel, row in zip(members, rows, strict=True)
        ]
        splits.append({"name": split, "columns": columns, "panels": shown})
    return splits


def _cell_view(panel: Panel, column: str, cell: Image.Image, classes: Sequence[str]) -> dict[str, Any]:
    # Masks are flat colors, which PNG packs small and exact; pictures with grain are ten times smaller as JPEG.
    kind = "PNG" if column in panel.masks else "JPEG"
    alt, note = describe(panel, column, classes)
    uri = data_uri(encode(cell, kind), kind)
    return {"uri": uri, "width": cell.width, "height": cell.height, "alt": alt, "note": note}


def _training_view(who: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of a training and words for its plot; without facts the template asks for nothing else."""
    if not records:
        return {"who": who, "facts": []}
    losses = [record["loss"] for record in records]
    speeds = [record["images_per_second"] for record in records if "images_per_second" in record]
    waits = [record["waiting"] for record in records if "waiting" in record]
    precision = [record["val_map"] for record in records if "val_map" in record]
    first, last = f"{losses[0]:.3g}", f"{fmean(losses[-max(1, len(losses) // 20) :]):.3g}"
    facts = [("steps", count(records[-1]["step"])), ("epochs", f"{records[-1]['epoch']:.4g}")]
    facts.append(("loss", f"{first} → {last}"))
    if precision:
        facts.append(("mAP on val tags", f"{precision[-1]:.1f}"))
    if speeds:
        facts.append(("images a second", f"{median(speeds):,.0f}"))
    if waits:
        facts.append(("waiting for data", share(fmean(waits))))
    alt = f"Loss of the {who} over {len(records)} records, from {first} to {last}"
    alt += f"; terms: {', '.join(terms)}" if (terms := loss_terms(records)) else ""
    broken = not all(map(isfinite, losses))
    return {"who": who, "facts": facts, "plot": _training_name(who), "alt": alt, "broken": broken}


def _count_groups(counts: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Counts as titled lists: plain numbers first, then a list a nested dictionary, deeper names joined by arrows."""

    def flat(nested: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in nested.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{above}{name} → ")
            else:
                yield above + name, value

    plain = [(name, value) for name, value in counts.items() if not isinstance(value, Mapping)]
    nested = [(_words(name), list(flat(value))) for name, value in counts.items() if isinstance(value, Mapping)]
    return ([("overall", plain)] if plain else []) + nested


def _stage_times(seconds: dict[str, float], computed: dict[str, bool]) -> list[dict[str, Any]]:
    longest = max(seconds.values(), default=0) or 1
    known = dict.fromkeys([*seconds, *computed]) | seconds  # None for a stage without a time
    return [
        {"name": _words(stage), "seconds": s, "computed": computed.get(stage), "share": 100 * (s or 0) / longest}
        for stage, s in known.items()
    ]


def _known(value: float | None) -> bool:
    """Whether a score was computed: neither None nor NaN."""
    return value is not None and isfinite(value)


def count(value: float) -> str:
    """With thin spaces between thousands: 10 582."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


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


def _commit(commit: str) -> str:
    """A full hash cut to ten digits, with what follows it (such as -dirty) kept."""
    return re.sub(r"^([0-9a-f]{10})[0-9a-f]{30}", r"\1", commit)


def _words(name: str) -> str:
    return name.replace("_", " ")


def encode(picture: Image.Image, kind: str) -> bytes:
    """A picture as a file: kind is "JPEG" or "PNG"."""
    buffer = BytesIO()
    picture.save(buffer, kind, **({"quality": 88} if kind == "JPEG" else {"optimize": True}))
    return buffer.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    """A picture's file as the address of itself."""
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


_MEANING: dict[str, Callable[[Any], str]] = {
    "split": str,
    "images": count,
    "threshold": "{:.3g}".format,
    "background_cue": str,
    "map_scale": str,
    "related_images": count,
    "aggregation": str,
    "scales": lambda scales: ", ".join(f"{scale:g}" for scale in scales),
    "mirror": lambda on: "yes" if on else "no",
    "crf": lambda on: "yes" if on else "no",
    "ignored_share": share,
    "seed": str,
    "recipe": str,
    "weights": str,
    "git": _commit,
}
"""What a score means: keys of scores.json in the order of the table's columns, and how a value is written."""
_NUMBERS = {"images", "threshold", "related_images", "ignored_share", "seed"}
_ORIGIN = {"seed", "recipe", "weights", "git"}
"""Where a score comes from; the other keys say of what it is and how it was made."""
