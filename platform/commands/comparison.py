"""What `mcis compare` prints: configuration, scores, IoU per class, images and differences, each as a table."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.bar import Bar
from rich.table import Table

from mcis.platform.commands.terminal import console, plain
from mcis.platform.reporting.compared_images import ComparedImages
from mcis.platform.reporting.comparison import ComparedScore, Comparison
from mcis.platform.reporting.comparison_page import by_range, shown_label

_MOST_LABELS = 24
"""Labels whose bars are shown; with more, those that differ most."""
_BAR = 24
"""Characters of an IoU of 100."""
_MASKS = {"segmentation": "predictions", "pseudo_masks": "pseudo masks"}


def show_comparison(comparison: Comparison, images: Sequence[ComparedImages]) -> None:
    """All that a comparison tells, but for the pictures, which are in the page."""
    _show_keys(comparison)
    same = comparison.same_origin
    console.print(_scores(comparison, same))
    if same:
        console.print(plain(f"all scores: {', '.join(f'{heading} {text}' for heading, text in same.items())}"))
    console.print(_classes([score for score in comparison.scores if score.differences][-1]))
    for of in images:
        console.print(_images(of) if of.images else f"no image has {_MASKS[of.what]} of all runs")
    console.print(_differences(comparison))
    console.print(plain(f"{comparison.drawn}. {comparison.limits}"))


def show_page(page: Path) -> None:
    """Where the page lies."""
    console.print(f"page:  {page}", markup=False, soft_wrap=True)


def _show_keys(comparison: Comparison) -> None:
    if not comparison.keys:
        console.print("the configurations are the same")
        return
    table = _table("Configuration", "key", *(case.label for case in comparison.cases))
    for key, values in comparison.keys:
        table.add_row(plain(key), *(plain(f"{v.value} ({v.origin})") if v else "-" for v in values))
    console.print(table)


def _scores(comparison: Comparison, said: Collection[str]) -> Table:
    """All scores with what they mean, but for the headings in `said`."""
    table = _table("Scores", "score", "run", "which", right=("mIoU %", "boundary mIoU %"))
    for column in ("split", "images", "meaning"):
        table.add_column(column, overflow="fold")
    for score in comparison.scores:
        for row in score.rows:
            made = ", ".join(f"{h} {text}" for h, text in row.meaning.items() if h not in ("split", "images", *said))
            mark = f"NOT COMPARABLE, {row.incomparable}; " if row.incomparable else ""
            figures = (_figure(row.miou, row.deviation), _figure(row.boundary_miou, row.boundary_deviation))
            where = (row.meaning["split"], row.meaning["images"])
            table.add_row(*map(plain, (score.title, row.case, row.name, *figures, *where, mark + made)))
        for case in score.absent:
            table.add_row(plain(score.title), plain(case), "has none", "-", "-", "-", "-", "-")
        table.add_section()
    return table


def _classes(score: ComparedScore) -> Table:
    """IoU per class of a score as bars, a line for each case."""
    order = by_range(score)
    title = f"IoU per class: {score.title}"
    title += f", the {_MOST_LABELS} of {len(order)} labels that differ most" if len(order) > _MOST_LABELS else ""
    table = _table(title, "class", "run", right=("IoU %",))
    table.add_column("")
    for name in order[:_MOST_LABELS]:
        for row in score.rows:
            value = row.iou.get(name)
            bar = Bar(100, 0, value or 0, width=_BAR)
            first = plain(name) if row is score.rows[0] else ""
            table.add_row(first, plain(shown_label(row)), _figure(value, None), bar)
    return table


def _images(images: ComparedImages) -> Table:
    """The images of the page: why each was chosen, and its mIoU in each case."""
    title = f"Images of the page: {len(images.images)} of the {images.common} with {_MASKS[images.what]} of all runs"
    runs = [shown.run for shown in images.images[0].masks]
    table = _table(title, "image", "chosen", right=[f"mIoU % {run}" for run in runs])
    for image in images.images:
        chosen = "differs most" if image.chosen.differs_most else "at random"
        table.add_row(plain(image.panel.image_id), chosen, *(_figure(shown.miou, None) for shown in image.masks))
    return table


def _differences(comparison: Comparison) -> Table:
    baseline, share = comparison.cases[0].label, 100 * comparison.settings.confidence
    title = f"Differences to {baseline}"
    right = ("images", baseline, "compared", "difference", f"{share:g} % interval")
    table = _table(title, "score", "figure", "run", right=right)
    table.add_column("verdict")
    for each in comparison.differences:
        interval = f"{each.low:+.2f} to {each.high:+.2f}"
        figures = (f"{each.first:.2f}", f"{each.second:.2f}", f"{each.difference:+.2f}", interval)
        table.add_row(*map(plain, (each.what, each.figure, each.case, str(each.images), *figures, each.verdict)))
    return table


def _figure(value: float | None, deviation: float | None) -> str:
    """A figure, of several seeds with their deviation; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"


def _table(title: str, *left: str, right: Sequence[str] = ()) -> Table:
    """An empty table whose first columns are texts, the others numbers."""
    table = Table(title=plain(title), title_justify="left")
    for column in left:
        table.add_column(plain(column), overflow="fold")
    for column in right:
        table.add_column(plain(column), justify="right")
    return table
