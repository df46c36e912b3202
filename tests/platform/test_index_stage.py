"""The stage `index` under faults: temporary faults do not change the index, and images that crash are listed."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import open_index
from mcis.platform.runs.files import read_table
from mcis.platform.runs.image_checks import StoredVerdicts
from mcis.platform.runs.listing import listing
from mcis.platform.runs.results import IndexResult, read_result
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import index
from mcis.platform.stages.index import open_images

IMAGES = 8


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A table of eight valid images."""
    for n in range(IMAGES):
        pixels = np.random.default_rng(n).integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
    lines = [f"{n}.png,{'cat' if n % 2 else 'dog'}" for n in range(IMAGES)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,tags", *lines]) + "\n")
    return tmp_path / "photos.csv"


def indexed(photos: Path, *overrides: str) -> tuple[list[str], dict[str, str], int]:
    """Runs the index; returns its images, the reasons of rejected ones, and the number of opened images."""
    resolved = resolve("tags", "scratch", {"data.tags.table": str(photos)}, ["compute.shard_rows=4", *overrides])
    result = pipeline.run(resolved, Workspace(photos.parent / "workspace"), "index-tags", until="index")
    found = open_index(Workspace(photos.parent / "workspace"), "index-tags")
    rejects = dict(zip(found.rejects["image_id"].to_pylist(), found.rejects["reason"].to_pylist(), strict=True))
    return found.index["image_id"].to_pylist(), rejects, result.context.result("index", IndexResult).counts["opened"]


def all_but(*absent: int) -> list[str]:
    return [f"{n}.png" for n in range(IMAGES) if n not in absent]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_disk_error_rejects_no_image(photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading /proc/self/mem fails with EIO, but its size and time can be read."""

    def impatient(max_pixels: int, rows: pa.Table) -> pa.Table:
        import tenacity

        from mcis.datasets.storage import faults

        faults.RETRY_POLICY = faults.RETRY_POLICY.copy(wait=tenacity.wait_none())
        return open_images(max_pixels, rows)

    path = photos.parent / "3.png"
    path.rename(photos.parent / "whole")
    path.symlink_to("/proc/self/mem")
    with monkeypatch.context() as patched:
        patched.setattr(index, "open_images", impatient)
        for _ in range(2):
            with pytest.raises(UserError, match=r"3\.png cannot be read, .*: Input/output error") as caught:
                indexed(photos)
            assert "repeat the command" in caught.value.remedy
    path.unlink()
    (photos.parent / "whole").rename(path)
    assert indexed(photos)[:2] == (all_but(), {})


def test_a_file_that_changes_is_opened_again(photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(max_pixels: int, rows: pa.Table) -> pa.Table:
        verified = open_images(max_pixels, rows)
        for uri in rows["uri"].to_pylist():
            if uri.endswith("3.png"):
                Image.new("RGB", (64, 64), "red").save(uri)
            if uri.endswith("5.png"):
                os.unlink(uri)
        return verified

    with monkeypatch.context() as patched:
        patched.setattr(index, "open_images", changing)
        with pytest.raises(UserError, match=r"2 file\(s\) changed while they were read: .*3\.png, .*5\.png"):
            indexed(photos)
    images, rejects, opened = indexed(photos)
    assert images == all_but(5)
    assert rejects == {"5.png": "cannot be read: No such file or directory"}
    assert opened == 2
    found = open_index(Workspace(photos.parent / "workspace"), "index-tags").index
    assert found["height"].to_pylist()[3] == 64


def test_an_image_that_crashes_its_process_is_listed_and_checked_again_by_another_index(
    photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killing(max_pixels: int, rows: pa.Table) -> pa.Table:
        if any(uri.endswith("6.png") for uri in rows["uri"].to_pylist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return open_images(max_pixels, rows)

    listed: dict[str, Any] = {"6.png": "kills the decoder: its process was ended by a signal, 3 times"}
    with monkeypatch.context() as patched:
        patched.setattr(index, "open_images", killing)
        assert indexed(photos) == (all_but(6), listed, 8)
    assert "images are rejected: 6.png: kills the" in capsys.readouterr().out.replace("\n", "")
    assert indexed(photos)[:2] == (all_but(6), listed), "the index is finished"
    assert indexed(photos, "data.min_side=33") == (all_but(), {}, 1), "another one opens this image again, and no other"


def test_max_pixels_is_part_of_the_key_and_not_of_the_kept_checks(photos: Path, ray_local: None) -> None:
    Image.new("RGB", (64, 64), "red").save(photos.parent / "3.png")
    images, rejects, opened = indexed(photos, "data.max_pixels=4095")
    assert (images, opened) == (all_but(3), 8)
    assert rejects == {"3.png": "too large: 64x64 pixels, more than 4095"}
    assert indexed(photos) == (all_but(), {}, 1)
    assert indexed(photos, "data.max_pixels=4095")[:2] == (all_but(3), rejects)


def test_checks_in_blocks_give_the_same_index(photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos.parent / "2.png").write_bytes(b"")
    (photos.parent / "6.png").unlink()
    found, stages = [], []
    for block in (2**20, 3):
        monkeypatch.setattr(index, "_BLOCK_ROWS", block)
        found.append(indexed(photos, "data.max_rejected=2"))
        workspace = Workspace(photos.parent / "workspace")
        folder = workspace.outputs("index-tags")["index"]
        stages.append((read_result(folder, IndexResult).identity, read_table(folder / "index.parquet")))
        assert len(StoredVerdicts(workspace).verdicts) == IMAGES - 1, "all but that on the absent file"
        shutil.rmtree(folder)
        shutil.rmtree(workspace.image_checks)
    assert found[0] == found[1]
    assert found[0][2] == IMAGES
    assert stages[0][0] == stages[1][0]
    assert stages[0][1].equals(stages[1][1])


def test_sources_are_listed_once_per_call(photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(config: Config) -> Listing:
        asked.append(config.sources)
        return listing(config)

    monkeypatch.setattr("mcis.platform.runs.listing.listing", counted)
    resolved = resolve("tags", "scratch", {"data.tags.table": str(photos)})
    workspace = Workspace(photos.parent / "workspace")
    for calls in (1, 2):
        sources = pipeline.check(resolved.config, workspace, "index-tags", until="index")
        pipeline.run(resolved, workspace, "index-tags", until="index", sources=sources)
        assert (asked, sources._listing) == (["tags"] * calls, None), "and nobody holds it behind the index"
