"""Writes tables as Markdown and LaTeX."""

from collections.abc import Sequence

from mcis.platform.reporting.comparison_tables import Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
}
"""LaTeX of special characters. `<`, `>` and `|` are other characters in LaTeX's default font, and it does not know the
narrow spaces in numbers (`format_count`)."""


def markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown, each below its title."""
    texts = []
    for table in tables:
        alignment = ["---:" if column in table.numbers else "---" for column in table.columns]
        lines = [_markdown_row(cells) for cells in (table.columns, alignment, *table.rows)]
        texts.append("\n".join([table.title, "", *lines, ""]))
    return "\n".join(texts)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def latex(tables: Sequence[Table]) -> str:
    """Tables as LaTeX `table` environments, which need no package. The title is the caption."""
    texts = []
    for table in tables:
        alignment = "".join("r" if column in table.numbers else "l" for column in table.columns)
        heading, *rows = [_latex_row(cells) for cells in (table.columns, *table.rows)]
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex_text(table.title)}}}"]
        lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\hline", heading, r"\hline", *rows, r"\hline"]
        lines += [r"\end{tabular}", r"\end{table}", ""]
        texts.append("\n".join(lines))
    return "\n".join(texts)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
