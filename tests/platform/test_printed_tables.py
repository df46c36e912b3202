"""Tables on a terminal: as wide as it is, and text from outside that is no markup."""

from io import StringIO

import pytest

from mcis.platform.reporting import terminal

COLUMNS = ("run", "meaning", "mIoU", "seconds")
ROWS = [("first", "word " * 12, "51.25", "1234.5"), ("second", "", "2.00", "1.0")]


def printed(monkeypatch: pytest.MonkeyPatch, width: int, **options: list[str]) -> str:
    """What `print_table` prints on a terminal of this width."""
    stream = StringIO()
    monkeypatch.setattr(terminal, "console", type(terminal.console)(file=stream, width=width))
    terminal.print_table("title", COLUMNS, ROWS, numbers=["mIoU", "seconds"], **options)
    return stream.getvalue()


def headings(text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.strip().startswith("run"))
    return line.split()


def test_a_wide_terminal_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, 120, optional=["seconds", "meaning"])
    assert headings(text) == list(COLUMNS)


def test_a_narrow_terminal_loses_optional_columns_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, 80, optional=["seconds", "meaning"])
    assert headings(text) == ["run", "meaning", "mIoU"]
    text = printed(monkeypatch, 40, optional=["seconds", "meaning"])
    assert headings(text) == ["run", "mIoU"]


def test_text_is_wrapped_where_no_column_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, 40)
    assert max(map(len, text.splitlines())) <= 40
    assert headings(text) == list(COLUMNS)
    assert text.split().count("word") == 12
    assert "1234.5" in text


def test_a_cell_with_brackets_is_printed_as_it_is() -> None:
    stream = StringIO()
    console = type(terminal.console)(file=stream, width=100)
    console.print(terminal.make_table("[/title]", ("found",), [["/photos[/x][red] is full"]]))
    assert "[/title]" in stream.getvalue()
    assert "/photos[/x][red] is full" in stream.getvalue()
