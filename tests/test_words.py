"""One vocabulary: words that are not used, and messages of datasets/ and models/ that name arguments."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcis.datasets.section import Section
from mcis.platform.config.sections import Config

ROOT = Path(__file__).resolve().parent.parent
UNUSED = ("journey", "mend", "mends", "mended", "house", "room", "rooms", "strangers", "how-manieth")
"""Words with a plainer term: pipeline, fix, package, space, random pairs, number."""
NAMES_OF_OTHERS = ("datasets/sources/synsets.py",)
"""Files with names that others gave, such as the house finch."""
NUMERICS = ("datasets", "models")
"""Packages that know nothing of the configuration or the command line."""


def tracked(*suffixes: str) -> list[Path]:
    """The files that Git tracks with one of the suffixes, this one left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name.endswith(suffixes)]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def matches(pattern: str, text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each match, whatever its case."""
    for match in re.finditer(pattern, text, re.IGNORECASE):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def unused_words(text: str) -> list[tuple[int, str]]:
    """Line and word of each of UNUSED in a text."""
    return list(matches(rf"\b(?:{'|'.join(UNUSED)})\b", text))


def keys_and_flags(source: str) -> list[tuple[int, str]]:
    """Line and text of each string of a module that names a configuration key or a command line flag."""
    sections = "|".join(name for name, value in Config() if isinstance(value, Section))
    pattern = rf"(?<![\w./])(?:{sections})\.(?!py\b)[a-z_]+|(?<![\w-])--[a-z]"
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    strings = [(node.lineno, node.value) for node in constants if isinstance(node.value, str)]
    return sorted((line, match) for line, text in strings for _, match in matches(pattern, text))


def listed(problems: dict[Path, list[tuple[int, str]]]) -> str:
    """The problems as `file:line: text`, a line each."""
    return "\n".join(f"{path.relative_to(ROOT)}:{line}: {text}" for path in problems for line, text in problems[path])


def test_words_with_a_plainer_term_are_not_used() -> None:
    paths = [path for path in tracked(".py", ".md") if path.relative_to(ROOT).as_posix() not in NAMES_OF_OTHERS]
    problems = listed({path: unused_words(path.read_text()) for path in paths})
    assert not problems, problems


@pytest.mark.parametrize("package", NUMERICS)
def test_messages_name_arguments_rather_than_keys_or_flags(package: str) -> None:
    files = [path for path in tracked(".py") if path.relative_to(ROOT).parts[0] == package]
    problems = listed({path: keys_and_flags(path.read_text()) for path in files})
    assert not problems, problems


def test_the_checks_find_what_they_are_for() -> None:
    assert unused_words("A\nJourney; roommate") == [(2, "Journey")]
    source = 'raise UserError(f"{n} images", "set data.classes", "give --voc")\ndata.voc\n"data.voc.x --"'
    assert keys_and_flags(source) == [(1, "--v"), (1, "data.classes"), (3, "data.voc")]
