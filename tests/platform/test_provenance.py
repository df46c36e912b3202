"""Licenses and addresses of images: from a table of web images to the index, its page and the model card."""

from pathlib import Path

import pyarrow as pa
import pytest

from mcis.datasets.index import PROVENANCE_SCHEMA
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import api
from mcis.platform.networks.hub import license_table
from mcis.platform.outputs.provenance import license_counts
from mcis.platform.outputs.read_index import open_index
from mcis.platform.reporting.index_page import browse_page
from mcis.platform.runs.results import IndexResult
from mcis.platform.runs.workspace import Workspace


def provenance(*rows: tuple[str | None, str | None]) -> pa.Table:
    """Rows of (address, license)."""
    columns = [{"image_id": str(i), "url": url, "license": license} for i, (url, license) in enumerate(rows)]
    return pa.Table.from_pylist(columns, PROVENANCE_SCHEMA)


def test_images_are_counted_by_license() -> None:
    rows = provenance(
        ("https://a.example/1", "CC0"),
        ("https://a.example/2", None),
        ("https://b.example:80/3", "CC0"),
        ("https://b.example/4", "CC0"),
        (None, "all | rights\nreserved"),
        ("http://[broken", None),
    )
    counts = license_counts(rows)
    assert [tuple(count) for count in counts] == [
        ("CC0", 3, ["b.example", "a.example"]),
        ("not stated", 2, ["a.example"]),
        ("all | rights reserved", 1, []),
    ]
    assert "| CC0 | 3 | b.example, a.example |\n" in license_table(rows)
    assert "| all / rights reserved | 1 |  |\n" in license_table(rows)
    assert license_table(provenance()) == ""


@pytest.mark.usefixtures("ray_local")
def test_the_index_keeps_where_images_come_from(tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    synthetic.draw(root, train=4, val=2, size=48, classes=3)
    classes = (root / "classes.txt").read_text().split()
    images = sorted((root / "JPEGImages").iterdir())
    web = tmp_path / "web"
    web.mkdir()
    for number in range(2):
        (web / f"{number}.jpg").write_bytes(images[number].read_bytes() + b" ")
    (web / "2.jpg").write_text("no image")
    lines = [f"{n}.jpg,{classes[0]},https://a.example/{n},CC<BY>" for n in range(3)]
    (web / "t.csv").write_text("\n".join(["image,tags,url,license", *lines]))

    overrides = {"data.classes": str(root / "classes.txt")}
    workspace = tmp_path / "w"
    result = api.run(
        "voc+web", name="one", workspace=workspace, until="index", overrides=overrides, voc=root, web=web / "t.csv"
    )

    assert result.context.result("index", IndexResult).counts["licenses"] == {"CC<BY>": 2}
    index = open_index(Workspace(workspace), "one")
    assert index.provenance["image_id"].to_pylist() == ["web/0.jpg", "web/1.jpg"]
    page = browse_page(index.index, index.rejects, index.classes, notes=(), title="t", provenance=index.provenance)
    assert "CC&lt;BY&gt;" in page
    assert "a.example" in page
    assert "CC&lt;BY&gt;" in result.context.folder.report.read_text()
