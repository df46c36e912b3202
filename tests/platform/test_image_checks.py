"""Verdicts on image files: what a workspace keeps of them, and which file counts as the same."""

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
from mcis.platform.runs.image_checks import VERDICT_SCHEMA, KeptVerdicts, image_files, keep_verdicts
from mcis.platform.runs.workspace import Workspace

SOUND = ImageCheck(40, 50, "abc", None)
BROKEN = ImageCheck(0, 0, "def", "empty: 0 bytes")
UNREADABLE = ImageCheck(0, 0, "", "cannot be read: Permission denied")
TOO_LARGE = ImageCheck(0, 0, "abc", "too large: 9000x9000 pixels, more than 50000000")


class ImageFile(NamedTuple):
    uri: str
    size: int
    changed: int


def keep(workspace: Workspace, of_files: dict[ImageFile, ImageCheck]) -> None:
    rows = [file._asdict() | verdict._asdict() for file, verdict in of_files.items()]
    keep_verdicts(workspace, pa.Table.from_pylist(rows, VERDICT_SCHEMA))


def found(workspace: Workspace, *files: ImageFile) -> list[ImageCheck | None]:
    kept = KeptVerdicts(workspace)
    asked = [file._asdict() for file in files]
    rows = kept.find(pa.Table.from_pylist(asked, pa.schema(list(VERDICT_SCHEMA)[:3])))
    made = [ImageCheck(**row) for row in kept.verdicts.to_pylist()]
    return [made[row] if row >= 0 else None for row in rows.tolist()]


def test_verdicts_are_kept_by_file_and_replaced_with_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    old, other = ImageFile("/a.jpg", 3, 1), ImageFile("/b.jpg", 0, 1)
    assert found(workspace, old) == [None]
    keep(workspace, {old: SOUND, other: BROKEN})
    assert found(workspace, other, old, other) == [BROKEN, SOUND, BROKEN]
    changed, new = ImageFile("/a.jpg", 4, 2), SOUND._replace(content_hash="new")
    keep(workspace, {changed: new})
    assert found(workspace, old, changed, other) == [None, new, BROKEN]
    touched, larger = ImageFile("/a.jpg", 4, 3), ImageFile("/a.jpg", 5, 2)
    assert found(workspace, touched, larger) == [None, None]


@pytest.mark.parametrize("verdict", [UNREADABLE, TOO_LARGE])
def test_verdicts_that_may_change_are_not_kept(tmp_path: Path, verdict: ImageCheck) -> None:
    """Of files that could not be read, and of limits, which another index may have other ones of."""
    workspace, file = Workspace(tmp_path), ImageFile("/a.jpg", 3, 1)
    keep(workspace, {file: verdict})
    assert found(workspace, file) == [None]


def test_a_damaged_table_counts_as_empty(tmp_path: Path) -> None:
    workspace, first, second = Workspace(tmp_path), ImageFile("/a.jpg", 3, 1), ImageFile("/b.jpg", 3, 1)
    keep(workspace, {first: SOUND})
    (table,) = workspace.image_checks.iterdir()
    table.write_bytes(b"PAR1 and no more")
    assert found(workspace, first) == [None]
    keep(workspace, {second: SOUND})
    assert found(workspace, first, second) == [None, SOUND]


def test_a_disk_that_is_full_costs_no_verdict(small_disk: Callable[..., Path]) -> None:
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


def test_verdicts_that_cannot_be_read_at_present_are_not_given_up(
    tmp_path: Path, no_pauses: None, no_more_files: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    workspace, file = Workspace(tmp_path), ImageFile("/a.jpg", 3, 1)
    keep(workspace, {file: SOUND})
    with no_more_files(), pytest.raises(UserError, match="cannot be read, after several attempts"):
        found(workspace, file)
    assert found(workspace, file) == [SOUND]


def test_a_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"abc")
    os.utime(path, ns=(5, 7))
    uris = pa.chunked_array([[str(path)], [str(tmp_path / "absent")]])
    assert image_files(uris).to_pylist() == [
        {"uri": str(path), "size": 3, "changed": 7},
        {"uri": str(tmp_path / "absent"), "size": -1, "changed": -1},
    ]


def test_limits_reject_sound_images_alone() -> None:
    both = pa.Table.from_pylist([SOUND._asdict(), BROKEN._asdict()], CHECK_SCHEMA)
    limits = ((40, 2000), (41, 2000), (40, 1999))
    assert {bounds: reject_out_of_bounds(both, *bounds)["reason"].to_pylist() for bounds in limits} == {
        (40, 2000): [None, BROKEN.reason],
        (41, 2000): ["too small: 50x40 pixels, both sides must be at least 41", BROKEN.reason],
        (40, 1999): ["too large: 50x40 pixels, more than 1999", BROKEN.reason],
    }
