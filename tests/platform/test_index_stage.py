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
from mcis.platform.runs.image_checks import StoredChecks
from mcis.platform.runs.listing import list_images
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
        assert len(StoredChecks(workspace).checks) == IMAGES - 1, "all but that of the absent file"
        shutil.rmtree(folder)
        shutil.rmtree(workspace.image_checks)
    assert found[0] == found[1]
    assert found[0][2] == IMAGES
    assert stages[0][0] == stages[1][0]
    assert stages[0][1].equals(stages[1][1])


def test_sources_are_listed_once_per_call(photos: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    listed_sources: list[str] = []

    def recording(config: Config) -> Listing:
        listed_sources.append(config.sources)
        return list_images(config)

    monkeypatch.setattr("mcis.platform.runs.listing.list_images", recording)
    resolved = resolve("tags", "scratch", {"data.tags.table": str(photos)})
    workspace = Workspace(photos.parent / "workspace")
    for _ in range(2):
        listed_sources.clear()
        sources = pipeline.check(resolved.config, workspace, "index-tags", until="index")
        pipeline.run(resolved, workspace, "index-tags", until="index", sources=sources)
        assert listed_sources == ["tags"]
        sources.listing()
        assert listed_sources == ["tags", "tags"], "the listing is released after the index"


# --- pixels of unclear meaning


def write_deep_images(folder: Path) -> None:
    """Replaces images: 0 to 2 by gray of 12 bits, 3 by color of 16 bits, 4 by hidden colors, and 5 by labels."""
    values = np.linspace(0, 4095, 2000).astype(np.uint16).reshape(40, 50)
    for n in range(3):
        Image.fromarray(np.roll(values, n)).save(folder / f"{n}.png")
    Image.fromarray(np.zeros((40, 50, 4), np.uint8)).save(folder / "4.png")
    Image.fromarray((values // 400).astype(np.uint8)).save(folder / "5.png")


def test_unclear_pixels_are_noted_once_with_their_number(photos: Path, ray_local: None) -> None:
    write_deep_images(photos.parent)
    workspace = Workspace(photos.parent / "workspace")

    images, rejects, _ = indexed(photos)
    notes = open_index(workspace, "index-tags").notes
    _, _, opened = indexed(photos, "data.value_range=0,4095")
    noted = open_index(workspace, "index-tags")

    assert (images, rejects) == (all_but(), {})
    assert [note for note in notes if "data.value_range" in note] == [
        "3 gray image(s) have more than 8 bits and values from 0 to 4095; 0 is read as black and 65535 as white "
        "(data.value_range): 0.png, 1.png, 2.png. The values use a small part of this range; if theirs is another, set "
        "data.value_range=0,4095"
    ]
    assert sum("1 image(s) are transparent in most of their pixels, which are read as white: 4.png" in n for n in notes)
    assert sum("1 image(s) are almost black, with no value above 31 of 255: 5.png" in note for note in notes) == 1
    assert opened == 0, "the values are stored with the checks"
    assert noted.value_range == (0, 4095)
    assert [note for note in noted.notes if "data.value_range" in note] == [
        "3 gray image(s) have more than 8 bits and values from 0 to 4095; 0 is read as black and 4095 as white "
        "(data.value_range): 0.png, 1.png, 2.png"
    ]


def test_value_range_changes_the_keys_of_later_stages(photos: Path, ray_local: None) -> None:
    workspace = Workspace(photos.parent / "workspace")
    identities = []
    for overrides in ([], ["data.value_range=0,4095"], ["data.value_range=[0, 255]"]):
        indexed(photos, *overrides)
        identities.append(read_result(workspace.outputs("index-tags")["index"], IndexResult).identity)
    assert len(set(identities)) == 3


def test_floating_point_images_need_a_value_range(photos: Path, ray_local: None) -> None:
    Image.fromarray(np.linspace(0, 1, 2000).astype(np.float32).reshape(40, 50)).save(photos.parent / "3.tif")
    photos.write_text(photos.read_text().replace("3.png", "3.tif"))

    images, rejects, _ = indexed(photos)
    assert images == all_but(3)
    assert rejects == {
        "3.tif": "unsupported: floating-point pixels from 0 to 1, whose range is unknown; name the values of black and "
        "white, for example by data.value_range=0,1"
    }

    images, rejects, opened = indexed(photos, "data.value_range=0,1")
    assert "3.tif" in images
    assert (len(images), rejects, opened) == (IMAGES, {}, 0)


@pytest.mark.parametrize("value", ["1,0", "0,0", "0", "black,white", "0,nan", "[0, 1, 2]"])
def test_invalid_value_ranges_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"data\.value_range"):
        resolve("tags", "scratch", {"data.tags.table": "t.csv"}, [f"data.value_range={value}"])
