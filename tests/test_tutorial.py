"""The tutorial's notebook: what is committed of it is whole, and its cells take photographs to masks."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.ipynb"


def check(notebook: Any) -> None:
    """Checks that all cells were executed, that what they put out may be committed, and that it is what matters."""
    of, cells = {}, [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        compile(cell["source"], cell["id"], "exec")
        assert not cell["metadata"], "timings"
        kinds = {output.get("name", output["output_type"]) for output in cell["outputs"]}
        assert kinds <= {"stdout", "display_data"}, f"warnings or errors: {cell['outputs']}"
        data = [output.get("data") or {"text/plain": output["text"]} for output in cell["outputs"]]
        of[cell["id"]] = "".join("<picture>" if "image/png" in each else each["text/plain"] for each in data)
        assert not re.findall(r"(?<![\w.:/])/\w+|file:", of[cell["id"]]), "paths of a machine"
    assert "rejected: photos/broken.jpg - truncated" in of["index"]
    assert float(re.findall(r"with CRF: mIoU ([\d.]+) % of 60 images", of["scores"])[0]) > 50
    assert of["pictures"] == "<picture>"
    assert of["predict"].count("->") == 4
    assert "the same mask: True" in of["share"]


def test_the_notebook_is_committed_with_what_its_cells_put_out() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    check(notebook)
    assert FILE.stat().st_size < 400_000
    texts = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    assert all((FILE.parent / target).is_file() for text in texts for target in re.findall(r"\]\(([^)\s]+)\)", text))


@pytest.mark.slow
def test_the_notebook_takes_photographs_to_masks(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    notebook, at = nbformat.read(FILE, as_version=4), {"metadata": {"path": str(tmp_path / "docs")}}
    NotebookClient(notebook, timeout=1800, record_timing=False, resources=at).execute()
    nbformat.write(notebook, tmp_path / "docs" / FILE.name)
    check(notebook)
    assert (tmp_path / "build/tutorial/workspace/runs/mine/report.html").is_file()
