"""Tests of the tutorial's notebook: its outputs are complete, and its cells compute masks from photographs."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def check(notebook: Any, *, val_images: int) -> dict[str, str]:
    """Checks that all cells were executed and that their outputs are expected and free of local paths.

    Returns:
        The output of each cell of code, by the cell's name.
    """
    outputs = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        compile(cell["source"], cell["id"], "exec")
        assert not cell["metadata"], "timings"
        kinds = {output.get("name", output["output_type"]) for output in cell["outputs"]}
        assert kinds <= {"stdout", "display_data"}, f"warnings or errors: {cell['outputs']}"
        data = [output.get("data") or {"text/plain": output["text"]} for output in cell["outputs"]]
        texts = ["<picture>" if "image/png" in content else content["text/plain"] for content in data]
        outputs[cell["id"]] = "".join(texts)
        assert not re.findall(r"(?<![\w.:/])/\w+|file:", outputs[cell["id"]]), "local paths"

    assert "rejected: photos/broken.jpg - truncated" in outputs["index"]
    assert len(mious(outputs["scores"], val_images)) == 2, "without and with CRF"
    assert outputs["pictures"] == "<picture>"
    assert outputs["predict"].count("->") == 4
    assert "the same mask: True" in outputs["share"]
    return outputs


def mious(scores: str, images: int) -> list[float]:
    """Returns the mIoU of the segmentation network, in percent, from the output of the cell with scores."""
    return [float(miou) for miou in re.findall(rf"mIoU ([\d.]+) % of {images} images of val", scores)]


def test_the_committed_notebook_has_valid_outputs() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    outputs = check(notebook, val_images=60)
    plain, with_crf = mious(outputs["scores"], 60)
    assert 50 < plain < with_crf
    assert FILE.stat().st_size < 400_000
    texts = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    assert all((FILE.parent / target).is_file() for text in texts for target in re.findall(r"\]\(([^)\s]+)\)", text))


FEWER = {
    "range(300)": "[*range(20), *range(240, 250)]",
    '"classifier.min_steps": 480': '"classifier.min_steps": 40',
    '"affinity_net.crop": 160': '"affinity_net.crop": 96, "affinity_net.min_steps": 10',
    '"segmenter.min_steps": 200': '"segmenter.min_steps": 10',
    '"segmenter.trainable_stages": 4': '"segmenter.trainable_stages": 1',
}
"""Replacements that shorten the notebook's training. Its full length takes ten minutes."""


@pytest.mark.slow
def test_the_notebook_computes_masks_from_photographs(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    notebook = nbformat.read(FILE, as_version=4)
    sources = {cell["id"]: cell for cell in notebook["cells"]}
    for old, new in FEWER.items():
        (cell,) = (cell for cell in sources.values() if old in cell["source"])
        cell["source"] = cell["source"].replace(old, new)

    at = {"metadata": {"path": str(tmp_path / "docs")}}
    NotebookClient(notebook, timeout=1800, record_timing=False, resources=at).execute()
    check(notebook, val_images=10)
    assert (tmp_path / "build/tutorial/workspace/runs/mine/report.html").is_file()
