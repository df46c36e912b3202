"""Results of image checks: which ones a workspace keeps, and when a file counts as unchanged."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.index import CHECK_SCHEMA, ImageCheck, reject_out_of_bounds
from mcis.platform.runs.image_checks import STORED_CHECK_SCHEMA, StoredChecks, image_files, store_checks
from mcis.platform.runs.workspace import Workspace

SOUND = ImageCheck(40, 50, "abc", None)
BROKEN = ImageCheck(0, 0, "def", "empty: 0 bytes")
UNREADABLE = ImageCheck(0, 0, "", "cannot be read: Permission denied")
TOO_LARGE = ImageCheck(0, 0, "abc", "too large: 9000x9000 pixels, more than 50000000")


class ImageFile(NamedTuple):
    uri: str
    size: int
    changed: int


def keep(workspace: Workspace, checks: dict[ImageFile, ImageCheck]) -> None:
    rows = [file._asdict() | check._asdict() for file, check in checks.items()]
    store_checks(workspace, pa.Table.from_pylist(rows, STORED_CHECK_SCHEMA))


def found(workspace: Workspace, *files: ImageFile) -> list[ImageCheck | None]:
    """The kept check of each file, or None."""
    kept = StoredChecks(workspace)
    file_rows = [file._asdict() for file in files]
    rows = kept.find(pa.Table.from_pylist(file_rows, pa.schema(list(STORED_CHECK_SCHEMA)[:3])))
    checks = [ImageCheck(**row) for row in kept.checks.to_pylist()]
    return [checks[row] if row >= 0 else None for row in rows.tolist()]


A_JPG = ImageFile("/a.jpg", 3, 1)
B_JPG = ImageFile("/b.jpg", 0, 1)


def test_checks_are_found_by_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert found(workspace, A_JPG) == [None]
    keep(workspace, {A_JPG: SOUND, B_JPG: BROKEN})
    assert found(workspace, B_JPG, A_JPG, B_JPG) == [BROKEN, SOUND, BROKEN]


def test_the_check_of_a_changed_file_replaces_the_earlier_one(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keep(workspace, {A_JPG: SOUND, B_JPG: BROKEN})
    changed = ImageFile("/a.jpg", 4, 2)
    new_check = SOUND._replace(content_hash="new")
    keep(workspace, {changed: new_check})
    assert found(workspace, A_JPG, changed, B_JPG) == [None, new_check, BROKEN]


def test_another_size_or_time_is_another_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keep(workspace, {A_JPG: SOUND})
    touched = A_JPG._replace(changed=2)
    larger = A_JPG._replace(size=4)
    assert found(workspace, touched, larger) == [None, None]


@pytest.mark.parametrize("check", [UNREADABLE, TOO_LARGE])
def test_checks_that_may_change_are_not_kept(tmp_path: Path, check: ImageCheck) -> None:
    """An unreadable file may become readable, and another index may have other limits."""
    workspace = Workspace(tmp_path)
    keep(workspace, {A_JPG: check})
    assert found(workspace, A_JPG) == [None]


def test_a_damaged_table_counts_as_empty(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keep(workspace, {A_JPG: SOUND})
    (table,) = workspace.image_checks.iterdir()
    table.write_bytes(b"PAR1 and no more")
    assert found(workspace, A_JPG) == [None]
    keep(workspace, {B_JPG: SOUND})
    assert found(workspace, A_JPG, B_JPG) == [None, SOUND]


def test_a_full_disk_loses_no_kept_check(small_disk: Callable[..., Path]) -> None:
    workspace = Workspace(small_disk("256k"))
    kept = {ImageFile(f"/{n}.jpg", n, n): SOUND._replace(content_hash=f"{n}") for n in range(1000)}
    more = {ImageFile(f"/more{n}.jpg", n, n): SOUND._replace(content_hash=f"more{n}") for n in range(3)}
    keep(workspace, kept)
    filling = workspace.root / "filling"
    filling.write_bytes(b"1" * shutil.disk_usage(workspace.root).free)
    with pytest.raises(UserError, match="no space left"):
        keep(workspace, more)
    assert found(workspace, *kept) == list(kept.values())
    filling.unlink()
    keep(workspace, more)
    assert found(workspace, *kept, *more) == [*kept.values(), *more.values()]


def test_checks_that_cannot_be_read_at_present_are_kept(
    tmp_path: Path, no_pauses: None, no_more_files: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    workspace = Workspace(tmp_path)
    keep(workspace, {A_JPG: SOUND})
    with no_more_files(), pytest.raises(UserError, match="cannot be read, after several attempts"):
        found(workspace, A_JPG)
    assert found(workspace, A_JPG) == [SOUND]


def test_image_files_have_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"abc")
    os.utime(path, ns=(5, 7))
    uris = pa.chunked_array([[str(path)], [str(tmp_path / "absent")]])
    assert image_files(uris).to_pylist() == [
        {"uri": str(path), "size": 3, "changed": 7},
        {"uri": str(tmp_path / "absent"), "size": -1, "changed": -1},
    ]


@pytest.mark.parametrize(
    ("min_side", "max_pixels", "reason"),
    [
        (40, 2000, None),
        (41, 2000, "too small: 50x40 pixels, both sides must be at least 41"),
        (40, 1999, "too large: 50x40 pixels, more than 1999"),
    ],
)
def test_limits_reject_only_sound_images(min_side: int, max_pixels: int, reason: str | None) -> None:
    checks = pa.Table.from_pylist([SOUND._asdict(), BROKEN._asdict()], CHECK_SCHEMA)
    limited = reject_out_of_bounds(checks, min_side, max_pixels)
    assert limited["reason"].to_pylist() == [reason, BROKEN.reason]
