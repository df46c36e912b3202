"""torchvision imports where its compiled operators do not load, and keeps them where they do."""

import subprocess
import sys
from pathlib import Path

import pytest

import mcis.models.torchvision_ops as ops

DEFINE = "import torch; made = torch.library.Library('torchvision', 'DEF'); "
SCHEMA = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def python(code: str, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter: what is registered with torch lasts as long as its process."""
    path = [str(p) for p in first_on_path] + sys.path
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"], capture_output=True, text=True
    )


def test_schemas_are_defined_if_and_only_if_the_compiled_operators_do_not_load() -> None:
    bare = python("import torchvision")
    loads = bare.returncode == 0
    assert loads or "torchvision::nms does not exist" in bare.stderr
    assert ops.compiled_operators_load() == loads
    assert (ops._library is None) == loads


def fake_torchvision(folder: Path, compiled: bytes | None) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported to find out')")
    if compiled is not None:
        (package / "_C.so").write_bytes(compiled)
    return folder


def test_operators_that_are_there_are_left_alone(tmp_path: Path) -> None:
    """Defining a library twice raises in torch; the package itself is not imported to find out."""
    result = python(
        f"{DEFINE}made.define({SCHEMA!r}); import mcis.models.torchvision_ops as ops; "
        "assert ops._library is None; assert ops.compiled_operators_load()",
        fake_torchvision(tmp_path, None),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("compiled", [b"compiled for another machine", None], ids=["does not load", "absent"])
def test_a_library_that_does_not_load_is_replaced_by_schemas(tmp_path: Path, compiled: bytes | None) -> None:
    result = python(
        "import mcis.models.torchvision_ops as ops, torch; assert ops._library is not None; "
        "print(torch.ops.torchvision.nms.default._schema); print(torch.ops.torchvision.qnms.default._schema)",
        fake_torchvision(tmp_path, compiled),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"torchvision::{SCHEMA}", f"torchvision::q{SCHEMA}"]


def test_without_torchvision_there_are_no_operators() -> None:
    """Its folder leaves the path after torch, which lies beside it, was imported."""
    result = python(
        "import importlib; import mcis.models.torchvision_ops as ops\n"
        "sys.path.clear(); importlib.invalidate_caches(); assert not ops.compiled_operators_load()"
    )
    assert result.returncode == 0, result.stderr
