"""Tests that torchvision can be imported if its compiled operators do not load, and keeps them if they do."""

import subprocess
import sys
from pathlib import Path

import pytest

import mcis.models.torchvision_ops as ops

SCHEMA = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DEFINE_NMS = f"""
import torch
library = torch.library.Library("torchvision", "DEF")
library.define({SCHEMA!r})
"""


def run_python(code: str, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter, because operators stay registered for as long as their process runs."""
    path = [str(folder) for folder in first_on_path] + sys.path
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"], capture_output=True, text=True
    )


def make_torchvision(folder: Path, library: bytes | None) -> Path:
    """Writes a package `torchvision` that must not be imported, with this content of its compiled library."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    if library is not None:
        (package / "_C.so").write_bytes(library)
    return folder


def test_schemas_are_defined_if_and_only_if_the_compiled_operators_do_not_load() -> None:
    bare = run_python("import torchvision")
    loads = bare.returncode == 0
    assert loads or "torchvision::nms does not exist" in bare.stderr
    assert ops.compiled_operators_load() == loads
    assert (ops._library is None) == loads


def test_existing_operators_are_not_defined_again(tmp_path: Path) -> None:
    """torch raises an error for a second definition. torchvision is not imported for the check."""
    code = f"""{DEFINE_NMS}
import mcis.models.torchvision_ops as ops
assert ops._library is None
assert ops.compiled_operators_load()
"""
    result = run_python(code, make_torchvision(tmp_path, None))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("library", [b"compiled for another machine", None], ids=["does not load", "absent"])
def test_schemas_replace_a_library_that_does_not_load(tmp_path: Path, library: bytes | None) -> None:
    code = """
import mcis.models.torchvision_ops as ops
import torch
assert ops._library is not None
print(torch.ops.torchvision.nms.default._schema)
print(torch.ops.torchvision.qnms.default._schema)
"""
    result = run_python(code, make_torchvision(tmp_path, library))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"torchvision::{SCHEMA}", f"torchvision::q{SCHEMA}"]


def test_no_operators_load_without_torchvision() -> None:
    """The path is cleared after torch was imported, because both are in the same folder."""
    code = """
import importlib
import mcis.models.torchvision_ops as ops
sys.path.clear()
importlib.invalidate_caches()
assert not ops.compiled_operators_load()
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
