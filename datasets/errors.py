"""Errors that a user can act on: what was found, what was expected, what to do."""

import re
from collections.abc import Sequence

_QUOTED = re.compile(r"""b?'[^']*'|b?"[^"]*\"""")
"""Matches content that errors of decoders and parsers quote."""
_ROW = re.compile(r"(got \d+): .*", re.DOTALL)
"""Matches the row that Arrow's errors show after its number of columns."""
_MAX_LENGTH = 4000
"""Maximum length of a text of an error, characters."""


def unquoted(error: BaseException) -> str:
    """Returns the message of a decoder or parser without the content that it quotes.

    Files may contain secrets, in particular files that were named by mistake, and messages end up in logs.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 at byte {error.start}"
    return _QUOTED.sub("...", _ROW.sub(r"\1", str(error)))


class UserError(Exception):
    """A problem with input, the configuration or the machine that the user can correct.

    The texts name configuration keys and options, for example data.classes or --voc, since these are what users set.

    Args:
        found: What was found, with the name of the file, key or value.
        expected: What would have been correct.
        remedy: What to do about it.
    """

    def __init__(self, found: str, expected: str, remedy: str):
        self.found = _bounded(printable(found))
        self.expected = _bounded(printable(expected))
        self.remedy = _bounded(printable(remedy))
        super().__init__(self.found, self.expected, self.remedy)

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  remedy:   {self.remedy}"


def printable(text: str) -> str:
    """Replaces characters that control a terminal by `?`. Line breaks, tabs and narrow spaces are kept."""
    kept = "\n\t\N{NARROW NO-BREAK SPACE}"
    return "".join(char if char.isprintable() or char in kept else "?" for char in text)


def one_line(text: str, max_length: int = 10_000) -> str:
    """Returns a text of unknown origin as one printable line of at most `max_length` characters."""
    line = "".join(_printable_char(char) for char in text)
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."


def _printable_char(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else "?"


def join_shortened(names: Sequence[str], max_names: int = 5) -> str:
    """Joins the first `max_names` names with commas and appends how many more there are, for a message."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def join_shortened_quoted(names: Sequence[str], max_names: int = 5) -> str:
    """Works like `join_shortened`, with quotes around names that contain a comma."""
    return join_shortened([f'"{name}"' if "," in name else name for name in names], max_names)


def recompute_command(stage: str = "STAGE") -> str:
    """Returns the command that computes a stage of a run and all later ones again, whatever command made the run.

    Args:
        stage: The stage; by default a placeholder, for messages about an output of any stage.
    """
    command = f"`mcis run --config WORKSPACE/runs/NAME/config.toml --name NAME --from {stage}`"
    return f"{command}, with --until if the run ends before the report"


class BadFile(UserError):
    """A file whose content is invalid: it is damaged, or not in the expected format."""


class UnreachableFile(UserError):
    """A file that cannot be read at present: a disk or a server does not respond, or memory is insufficient.

    Args:
        reason: The message of the file system.
    """

    def __init__(self, found: str, expected: str, remedy: str, reason: str = ""):
        super().__init__(found, expected, remedy)
        self.reason = one_line(reason)


def _bounded(text: str) -> str:
    """Shortens a text to _MAX_LENGTH characters."""
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
