"""What `mcis compare` prints: configuration, scores and differences, each as a table; classes and images: the page."""

from collections.abc import Sequence

from rich.table import Table

from mcis.platform.commands.terminal import console, plain
from mcis.platform.reporting.comparison import Comparison


def show_comparison(comparison: Comparison) -> None:
    """The tables, what the intervals are, and why a score is left out."""
    labels, same = [case.label for case in comparison.cases], comparison.same_origin
    keys = _table("Configuration", "key", *labels)
    for key, values in comparison.keys:
        keys.add_row(plain(key), *(plain(f"{v.value} ({v.origin})") if v else "-" for v in values))
    console.print(keys if comparison.keys else "the configurations are the same")
    scores = _table("Scores", "score", "run", "which", "split", "meaning", right=("mIoU %", "boundary mIoU %"))
    for score in comparison.scores:
        for row in score.rows:
            made = ", ".join(f"{h} {text}" for h, text in row.meaning.items() if h not in ("split", *same))
            figures = (_figure(row.miou, row.deviation), _figure(row.boundary_miou, row.boundary_deviation))
            scores.add_row(*map(plain, (score.title, row.case, row.name, row.meaning["split"], made, *figures)))
        scores.add_section()
    console.print(scores)
    if same:
        console.print(plain(f"all scores: {', '.join(f'{heading} {text}' for heading, text in same.items())}"))
    for score in comparison.scores:
        for label, why in score.left_out.items():
            console.print(plain(f"not compared: {score.title} of {label}: {why}"))
    share = f"{100 * comparison.settings.confidence:g} % interval"
    right = ("images", labels[0], "compared", "difference", share)
    differences = _table(f"Differences to {labels[0]}", "score", "figure", "run", "verdict", right=right)
    for each in comparison.differences:
        figures = (f"{each.first:.2f}", f"{each.second:.2f}")
        found = (f"{each.difference:+.2f}", f"{each.low:+.2f} to {each.high:+.2f}")
        differences.add_row(
            *map(plain, (each.what, each.figure, each.case, each.verdict, str(each.images), *figures, *found))
        )
    console.print(differences)
    console.print(plain(comparison.explanation))


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
