"""Citations of docs/RELEASED_RECIPE.md name sections that the page has."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("datasets", "models", "platform", "tuning", "tests", "benchmarks", "docs")
PAGE = ROOT / "docs" / "RELEASED_RECIPE.md"
SECTIONS = (
    "Tags",
    "Classifier",
    "Localization maps",
    "Pseudo masks",
    "Segmentation network",
    "Inference",
    "What each leaves open",
    "LID challenge",
    "Counts",
    "Scores in the paper",
)


def texts() -> Iterator[tuple[str, str]]:
    """Every file that may cite, but for this one: its path, and its text with line breaks as single spaces."""
    files = [
        path for folder in FOLDERS for ending in ("py", "md", "j2") for path in (ROOT / folder).rglob(f"*.{ending}")
    ]
    for path in [*files, *ROOT.glob("*.md")]:
        if path != Path(__file__).resolve():
            yield path.relative_to(ROOT).as_posix(), " ".join(path.read_text().replace("\n# ", "\n").split())


def wrong_citations(text: str) -> list[str]:
    """Citations of a text that name no section, or one that the page does not have."""
    wrong = [match.group() for match in re.finditer(r'(?<!["\w])RECIPE\b.{0,20}', text)]
    for match in re.finditer(r'RELEASED_RECIPE(?:\.md|, "([^"]*)"|.{0,20})', text):
        cited = match.group(1)
        if cited not in SECTIONS and not match.group().endswith(".md"):
            wrong.append(match.group())
    return wrong


def test_the_page_has_the_sections_in_order() -> None:
    assert tuple(re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)) == SECTIONS


def test_every_citation_names_a_section_of_the_page() -> None:
    wrong = [f"{name}: {citation}" for name, text in texts() for citation in wrong_citations(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('Clips at 0 (RELEASED_RECIPE, "Localization maps").', []),
        ("See docs/RELEASED_RECIPE.md.", []),
        ("Clips at 0 (RECIPE).", ["RECIPE)."]),
        ("Clips at 0 (RELEASED_RECIPE).", ["RELEASED_RECIPE)."]),
        ('Clips at 0 (RELEASED_RECIPE, "Maps").', ['RELEASED_RECIPE, "Maps"']),
    ],
)
def test_a_citation_without_a_section_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_citations(text) == wrong
