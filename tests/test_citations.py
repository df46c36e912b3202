"""Citations of the paper's equations and tables: the numbers exist, and they belong to what the text is about."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EQUATIONS = (
    "basic loss",
    "affinity",
    "normalization of the affinity",
    "attention summaries",
    "co-attention loss",
    "class-agnostic co-attention",
    "contrastive co-attention",
    "contrastive co-attentive features",
    "contrastive loss",
    "sum of the losses",
)
"""The paper's equations in their printed order; the first has number 1."""
TABLES = {
    "1a": "VOC images only",
    "1b": "with single-label images",
    "1c": "with web images",
    "2": "inference strategies",
    "3": "LID challenge",
    "4": "training losses",
    "5": "number of related images",
}
"""The paper's tables by their printed labels."""
PHRASES = {
    "basic loss": {"1"},
    "co-attention loss": {"5"},
    "contrastive loss": {"9"},
    "all losses": {"10"},
    "sum of the losses": {"10"},
    "weighted and added up": {"10"},
    "global average pooling": {"1"},
    "how positions of two images are compared": {"2"},
    "gate": {"6"},
}
"""What a citation directly after a phrase has to name."""
FUNCTIONS = {
    "models/classifier.py": {
        "pool": {"1"},
        "CoAttentionClassifier.scores": {"1"},
        "CoAttentionClassifier.pair_scores": {"1", "5", "9"},
        "CoAttentionClassifier.query": {"2"},
    },
    "models/classifier_losses.py": {"basic": {"1"}, "co_attention": {"5"}, "contrastive": {"9"}},
    "models/coattention.py": {
        "CoAttentive": {"4"},
        "affinity": {"2"},
        "coattend": {"3", "4"},
        "coattend_fused": {"2", "3", "4"},
        "unshared": {"6", "7", "8"},
    },
    "models/localization.py": {"affinity_query": {"2"}, "contrastive_round": {"6", "7", "8"}},
    "models/affinity.py": {"Affinity": {"2"}},
}
"""Equations that the docstrings of functions and classes cite."""
STUDIES = {
    "table1": {"1a", "1b", "1c"},
    "table2": {"2"},
    "table3": {"3"},
    "table4": {"4"},
    "table5": {"5"},
    "effect": {"2", "4"},
    "domains": {"1a", "1b", "1c"},
}
"""Tables that the descriptions of the studies in tuning/library cite."""

_NUMBER = r"\d+[a-z]?\b"
_NUMBERS = rf"({_NUMBER}(?:(?:\s?-\s?|\sto\s|,\s|,?\sand\s){_NUMBER})*)"
_EQUATION = re.compile(rf"\bEq\.\s{_NUMBERS}")
_TABLE = re.compile(rf"\b[Tt]ables?\s(?!1-\d){_NUMBERS}")  # 1-1 is a table of MATLAB's file format
_OTHER_SOURCE = re.compile(r"\b(?:19|20)\d\d,\s$")
"""Text directly before a citation of another paper, such as `CVPR 2018, `."""


def expand(numbers: str, all_numbers: list[str]) -> set[str]:
    """Returns the numbers of a citation such as `1, 5 to 8 and 10`; a range contains a part of `all_numbers`."""
    found = set()
    for part in re.split(r",\s(?:and\s)?|\sand\s", numbers):
        first, _, last = re.sub(r"\s?-\s?|\sto\s", "-", part).partition("-")
        if last and first in all_numbers and last in all_numbers:
            found.update(all_numbers[all_numbers.index(first) : all_numbers.index(last) + 1])
        else:
            found.update(number for number in (first, last) if number)
    return found


def cited_equations(text: str) -> set[str]:
    """Numbers of the paper's equations that a text cites."""
    all_numbers = [str(number) for number in range(1, 1 + len(EQUATIONS))]
    return _cited(_EQUATION, text, all_numbers)


def cited_tables(text: str) -> set[str]:
    """Labels of the paper's tables that a text cites."""
    return _cited(_TABLE, text, list(TABLES))


def _cited(pattern: re.Pattern[str], text: str, all_numbers: list[str]) -> set[str]:
    found = set()
    for match in pattern.finditer(text):
        if not _OTHER_SOURCE.search(text[: match.start()]):
            found.update(expand(match[1], all_numbers))
    return found


def wrong_citations(text: str) -> list[str]:
    """Descriptions of the citations in a text that name no equation or table, or another one than their phrase's."""
    wrong = []
    equations = {str(number) for number in range(1, 1 + len(EQUATIONS))}
    for number in sorted(cited_equations(text) - equations):
        wrong.append(f"Eq. {number} does not exist")
    for label in sorted(cited_tables(text) - TABLES.keys()):
        wrong.append(f"table {label} does not exist")

    for phrase, expected in PHRASES.items():
        for match in re.finditer(rf"\b{phrase}\W{{1,3}}Eq\.\s{_NUMBERS}", text, re.IGNORECASE):
            if expand(match[1], sorted(equations, key=int)) != expected:
                wrong.append(f"{match[0]!r} should be Eq. {', '.join(expected)}")
    return wrong


def documents() -> Iterator[Path]:
    """All texts and modules of the project, except this one, which has wrong citations as examples."""
    yield from ROOT.glob("*.md")
    for folder in ("datasets", "models", "platform", "tuning", "tests", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".md", ".py", ".toml"} and path != Path(__file__).resolve():
                yield path


def docstrings(module: Path) -> dict[str, str]:
    """Docstrings of a module's functions and classes by qualified name."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = ast.get_docstring(child) or ""
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(module.read_text()), "")
    return found


def test_citations_name_existing_equations_and_tables() -> None:
    wrong = {}
    citations = 0
    for path in documents():
        text = path.read_text()
        citations += len(cited_equations(text)) + len(cited_tables(text))
        problems = wrong_citations(text)
        if problems:
            wrong[path.relative_to(ROOT).as_posix()] = problems
    assert not wrong
    assert citations > 60


@pytest.mark.parametrize("module", FUNCTIONS)
def test_docstrings_cite_the_equations_that_functions_compute(module: str) -> None:
    found = docstrings(ROOT / module)
    assert {name: cited_equations(found[name]) for name in FUNCTIONS[module]} == FUNCTIONS[module]


@pytest.mark.parametrize("study", STUDIES)
def test_studies_cite_the_tables_that_they_reproduce(study: str) -> None:
    content = tomllib.loads((ROOT / "tuning" / "library" / f"{study}.toml").read_text())
    assert cited_tables(content["about"]) == STUDIES[study]


def test_ranges_and_lists_are_expanded() -> None:
    assert cited_equations("(Eq. 1, 5, 9), Eq. 2-4 and 6 to 8") == {"1", "2", "3", "4", "5", "6", "7", "8", "9"}
    assert cited_tables("tables 1a to 1c, Table 4") == {"1a", "1b", "1c", "4"}


def test_citations_of_other_papers_are_ignored() -> None:
    assert cited_equations("(CVPR 2018, Eq. 14 to 16)") == set()
    assert cited_tables("(MAT-File Level 5 File Format, table 1-1)") == set()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("see Eq. 11", "Eq. 11 does not exist"),
        ("see Eq. 9 to 12", "Eq. 12 does not exist"),
        ("table 7", "table 7 does not exist"),
        ("tables 1 to 3", "table 1 does not exist"),
        ("The contrastive loss (Eq. 10).", "'contrastive loss (Eq. 10' should be Eq. 9"),
        ("the co-attention loss, Eq. 6", "'co-attention loss, Eq. 6' should be Eq. 5"),
    ],
)
def test_wrong_citations_are_found(text: str, problem: str) -> None:
    assert problem in wrong_citations(text)
