"""Errors that a user can act on: what was found, what was expected, what to do."""

import re

_QUOTED = re.compile(r"""b?'[^']*'|b?"[^"]*\"""")
"""What errors of decoders and parsers quote."""
_ROW = re.compile(r"(got \d+): .*", re.DOTALL)
"""The row that Arrow shows behind the number of its columns."""


_MOST = 4000
"""Longest text of an error, characters."""


def unquoted(error: BaseException) -> str:
    """What an error of a decoder or parser says, without the content that it quotes.

    A file may hold secrets, above all one that was named by mistake, and messages end up in logs.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return _QUOTED.sub("...", _ROW.sub(r"\1", str(error)))


class UserError(Exception):
    """A problem with input, configuration or machine that its owner can correct.

    The texts name configuration keys and options, such as data.classes or --voc, because that is what users set.

    Args:
        found: what was found, with the name of the file, key or value.
        expected: what would have been right.
        remedy: what to do about it.
    """

    def __init__(self, found: str, expected: str, remedy: str):
        self.found, self.expected, self.remedy = (_legible(text) for text in (found, expected, remedy))
        super().__init__(self.found, self.expected, self.remedy)

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  remedy:   {self.remedy}"


def printable(text: str) -> str:
    """A text that names what was found in a file, without characters that a terminal obeys; lines and spaces stay."""
    return "".join(c if c.isprintable() or c in "\n\t\N{NARROW NO-BREAK SPACE}" else "?" for c in text)


def one_line(text: str, most: int = 10_000) -> str:
    """A text of unknown origin as one line of at most so many characters, which terminals and fonts take."""
    line = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    return line if len(line) <= most else f"{line[: most - 3]}..."


class BadFile(UserError):
    """A file whose content is at fault, not the way to it: it is damaged, or not what its reader takes."""


def _legible(text: str) -> str:
    """A text that is printable and of bounded length."""
    text = printable(text)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
