"""What `mcis compare` prints: configuration, scores and differences, each as a table; classes and images: the page."""

from mcis.platform.commands.terminal import console, plain, table_of
from mcis.platform.reporting.comparison import Comparison


def show_comparison(comparison: Comparison) -> None:
    """The tables, what the intervals are, and why a score is left out."""
    labels, same = [case.label for case in comparison.cases], comparison.same_origin
    keys = [(key, *(f"{v.value} ({v.origin})" if v else "-" for v in of)) for key, of in comparison.keys]
    console.print(table_of("Configuration", ("key", *labels), keys) if keys else "the configurations are the same")
    numbers = ("mIoU %", "boundary mIoU %")
    scores = table_of("Scores", ("score", "run", "which", "split", "meaning", *numbers), (), numbers=numbers)
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
    rows = []
    for each in comparison.differences:
        figures = (f"{each.first:.2f}", f"{each.second:.2f}")
        found = (f"{each.difference:+.2f}", f"{each.low:+.2f} to {each.high:+.2f}")
        rows.append((each.what, each.figure, each.case, each.verdict, each.images, *figures, *found))
    columns = ("score", "figure", "run", "verdict", *right)
    console.print(table_of(f"Differences to {labels[0]}", columns, rows, numbers=right))
    console.print(plain(comparison.explanation))


def _figure(value: float | None, deviation: float | None) -> str:
    """A figure, of several seeds with their deviation; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"
