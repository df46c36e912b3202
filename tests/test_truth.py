"""Tests that ground-truth masks are opened only for scores, pictures and explicit requests (runs: test_pipeline)."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READERS: dict[str, set[str]] = {
    "decode_mask": set(),  # only within masks.py
    "decode_mat_labels": {"datasets/images/masks.py"},
    "read_truth": {"platform/outputs/read_index.py"},  # as truth_of_row
    "truth_of_row": {
        "platform/reporting/comparison_page.py",  # pictures of a comparison
        "platform/stages/report.py",  # pictures of a report
        "platform/outputs/corrected_masks.py",  # as given_mask
        "platform/stages/evaluation/__init__.py",
        "platform/stages/evaluation/scoring.py",
    },
    "given_mask": {
        "platform/stages/pseudo_masks/making.py",  # supervision=full, the upper bound; corrected masks
        "platform/stages/train_affinity.py",  # corrected masks
    },
}
"""Functions that open ground-truth masks, and the modules that may import them."""


def importers(function: str) -> set[str]:
    """Returns the modules that import a function or access it as an attribute of a module."""
    packages = ("datasets", "models", "platform", "tuning")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and function in [alias.name for alias in node.names])
        or (isinstance(node, ast.Attribute) and node.attr == function)
    }


def test_truth_is_opened_only_by_the_listed_modules() -> None:
    assert {function: importers(function) for function in READERS} == READERS


def test_all_functions_that_open_masks_are_listed() -> None:
    """The public functions of `datasets.images.masks` that open ground truth are those listed above."""
    tree = ast.parse((ROOT / "datasets" / "images" / "masks.py").read_text())
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert public - READERS.keys() == {"read_saliency", "tags_of_mask"}
