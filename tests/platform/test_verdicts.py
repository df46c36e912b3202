"""Verdicts on image files: what a workspace keeps of them, and which file counts as the same."""

import os
from pathlib import Path

from mcis.datasets.index import Verdict
from mcis.platform.runs.verdicts import ImageFile, image_files, keep_verdicts, read_verdicts
from mcis.platform.runs.workspace import Workspace

SOUND = Verdict(40, 50, "abc", None)
BROKEN = Verdict(0, 0, "def", "empty: 0 bytes")
UNREADABLE = Verdict(0, 0, "", "cannot be read: Permission denied")


def test_verdicts_are_kept_by_file_and_replaced_with_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert read_verdicts(workspace) == {}
    old, other = ImageFile("/a.jpg", 3, 1), ImageFile("/b.jpg", 0, 1)
    keep_verdicts(workspace, {old: SOUND, other: BROKEN})
    assert read_verdicts(workspace) == {old: SOUND, other: BROKEN}
    changed = ImageFile("/a.jpg", 4, 2)
    keep_verdicts(workspace, {changed: SOUND._replace(content_hash="new")})
    assert read_verdicts(workspace) == {changed: SOUND._replace(content_hash="new"), other: BROKEN}


def test_files_that_could_not_be_read_are_not_kept(tmp_path: Path) -> None:
    workspace, file = Workspace(tmp_path), ImageFile("/a.jpg", 3, 1)
    keep_verdicts(workspace, {file: SOUND})
    keep_verdicts(workspace, {file: UNREADABLE})
    assert read_verdicts(workspace) == {}


def test_what_a_limit_rejects_is_not_kept(tmp_path: Path) -> None:
    """Another index may have another limit, and a verdict of this one has no size."""
    workspace, file = Workspace(tmp_path), ImageFile("/a.jpg", 3, 1)
    keep_verdicts(workspace, {file: Verdict(0, 0, "abc", "too large: 9000x9000 pixels, more than 50000000")})
    assert read_verdicts(workspace) == {}


def test_a_damaged_table_counts_as_empty(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keep_verdicts(workspace, {ImageFile("/a.jpg", 3, 1): SOUND})
    workspace.verdicts.write_bytes(b"PAR1 and no more")
    assert read_verdicts(workspace) == {}
    keep_verdicts(workspace, {ImageFile("/b.jpg", 3, 1): SOUND})
    assert read_verdicts(workspace) == {ImageFile("/b.jpg", 3, 1): SOUND}


def test_a_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"abc")
    os.utime(path, ns=(5, 7))
    assert image_files([str(path), str(tmp_path / "absent")]) == [
        ImageFile(str(path), 3, 7),
        ImageFile(str(tmp_path / "absent"), -1, -1),
    ]


def test_limits_reject_sound_images_alone() -> None:
    assert SOUND.within(40, 2000) is SOUND
    assert SOUND.within(41, 2000).reason == "too small: 50x40 pixels, both sides must be at least 41"
    assert SOUND.within(40, 1999).reason == "too large: 50x40 pixels, more than 1999"
    assert BROKEN.within(41, 1) is BROKEN
