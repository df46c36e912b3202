"""Tests of the cache of decoded images: it is written once, bounded, and removes none that another run is using."""

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import Squares, image_bytes, make_squares, read_rgb
from mcis.datasets.tables.memory_mapped import CachedRows
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine import cache
from mcis.platform.engine.cache import cache_limit, decoded_cache
from mcis.platform.engine.mapping import map_table
from mcis.platform.engine.reused_rows import ReuseRows, find_rows, num_found, record_images
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

SIZE = 64
COMPUTE = ComputeConfig(cache_gb=10 * image_bytes(SIZE) / 2**30, shard_rows=2)  # ten images fit

HOLD = """
import sys
from collections.abc import Callable
from pathlib import Path
from mcis.platform.runs.workspace import Workspace
with Workspace(Path(sys.argv[1])).lock("cache", sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def context(ray_local: None, tmp_path: Path) -> RunContext:
    workspace = Workspace(tmp_path / "workspace")
    folder = workspace.run("run")
    tracker = Tracker(workspace, "run", identity="")
    return RunContext(workspace=workspace, name="run", output=folder.path, tracker=tracker, origins={})


def pictures(folder: Path, name: str, count: int) -> pa.Table:
    """Rows of `count` pictures of noise, others for each name."""
    rng = np.random.default_rng(list(name.encode()))
    folder.mkdir(exist_ok=True)
    uris = [str(folder / f"{name}{n}.png") for n in range(count)]
    for uri in uris:
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(uri)
    return pa.table({"uri": uris, "content_hash": [hashlib.sha256(Path(uri).read_bytes()).hexdigest() for uri in uris]})


def cached(rows: pa.Table, context: RunContext) -> Path:
    folder = decoded_cache(rows, SIZE, context, COMPUTE)
    assert folder is not None
    return folder


def folders(context: RunContext) -> set[str]:
    return {path.name for path in context.workspace.cache.iterdir() if path.is_dir()}


def test_a_cache_is_made_once_and_holds_the_images(context: RunContext, tmp_path: Path) -> None:
    rows = pictures(tmp_path / "images", "a", 3)
    folder = cached(rows, context)
    uris = rows["uri"].to_pylist()
    expected = np.stack([read_rgb(uri, SIZE) for uri in uris])
    for uri in uris:
        Path(uri).unlink()
    np.testing.assert_array_equal(Squares(uris, SIZE, cache=folder)(np.arange(3)), expected)
    assert cached(rows, context) == folder, "the files are gone: the cache can only have been there already"
    assert folders(context) == {folder.name}


def test_images_of_an_earlier_cache_are_copied(context: RunContext, tmp_path: Path) -> None:
    earlier = pictures(tmp_path / "images", "a", 3)
    added = pictures(tmp_path / "images", "b", 2)
    rows = pa.concat_tables([added.slice(0, 1), earlier.slice(1), added.slice(1)])
    expected = np.stack([read_rgb(uri, SIZE) for uri in rows["uri"].to_pylist()])
    cached(earlier, context)
    for uri in earlier["uri"].to_pylist():
        Path(uri).unlink()

    folder = cached(rows, context)

    np.testing.assert_array_equal(Squares(rows["uri"].to_pylist(), SIZE, cache=folder)(np.arange(4)), expected)


def test_a_cache_that_was_removed_meanwhile_is_not_copied(tmp_path: Path) -> None:
    rows = pictures(tmp_path / "images", "a", 2)
    record_images(tmp_path / "removed", rows.slice(0, 1))
    found = find_rows([tmp_path / "removed"], rows)
    assert num_found(found) == 1
    worker = ReuseRows(functools.partial(make_squares, SIZE), (SIZE, SIZE, 3), [tmp_path / "removed"])
    assert worker(found).equals(make_squares(SIZE)(rows))


def test_no_more_images_than_fit(context: RunContext, tmp_path: Path) -> None:
    folder = cached(pictures(tmp_path / "images", "a", 12), context)
    assert sorted(file.name for file in folder.iterdir())[-1] == "part-00000008-00000010.arrow"
    none = ComputeConfig(cache_gb=0)
    assert decoded_cache(pictures(tmp_path / "images", "b", 2), SIZE, context, none) is None


def test_a_cache_with_a_part_of_the_images_grows_with_the_limit(context: RunContext, tmp_path: Path) -> None:
    rows = pictures(tmp_path / "images", "a", 15)
    folder = cached(rows, context)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert len(before) == 5

    larger = COMPUTE.model_copy(update={"cache_gb": 20 * image_bytes(SIZE) / 2**30})
    assert decoded_cache(rows, SIZE, context, larger) == folder
    reader = CachedRows(folder, (SIZE, SIZE, 3))
    np.testing.assert_array_equal(reader.holds(np.arange(17)), np.arange(17) < 15)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert before.items() < after.items()
    last = read_rgb(rows["uri"][14].as_py(), SIZE)
    np.testing.assert_array_equal(reader.row(14), last)

    assert cached(rows, context) == folder, "a lower limit takes nothing away"
    assert len(list(folder.glob("part-*"))) == 8


def test_a_cache_grows_by_shards_of_its_own_size(context: RunContext, tmp_path: Path) -> None:
    """Another run may read the shards that it has."""
    rows = pictures(tmp_path / "images", "a", 15)
    folder = cached(rows, context)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}

    larger = COMPUTE.model_copy(update={"cache_gb": 20 * image_bytes(SIZE) / 2**30, "shard_rows": 4})
    assert decoded_cache(rows, SIZE, context, larger) == folder
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert len(after) == 8
    assert before.items() < after.items()


def test_without_a_limit_caches_take_half_of_the_free_disk(small_disk: Callable[..., Path]) -> None:
    workspace = Workspace(small_disk("16m"))
    assert abs(cache_limit(ComputeConfig(), workspace) - 2**23) < 2**18
    folder = workspace.cache / f"squash{SIZE}-{'0' * 16}-{'0' * 16}"
    folder.mkdir()
    (folder / "part-00000000-00000010.arrow").write_bytes(bytes(2**22))
    assert abs(cache_limit(ComputeConfig(), workspace) - 2**23) < 2**18, "what the cache holds counts as free"
    assert cache_limit(ComputeConfig(cache_gb=3), workspace) == 3 * 2**30


def test_the_least_recently_used_cache_is_removed(context: RunContext, tmp_path: Path) -> None:
    old, used = (cached(pictures(tmp_path / "images", name, 3), context) for name in "ab")
    notes = context.workspace.cache / "notes"
    notes.mkdir()
    (notes / "large").write_bytes(bytes(20 * image_bytes(SIZE)))
    os.utime(old, (2, 2))
    os.utime(used, (1, 1))
    assert cached(pictures(tmp_path / "images", "b", 3), context) == used
    new = cached(pictures(tmp_path / "images", "d", 4), context)
    assert folders(context) == {used.name, new.name, notes.name}, "what no run made is not a cache"


def test_a_cache_that_another_run_reads_stays_until_that_run_ends(context: RunContext, tmp_path: Path) -> None:
    other = dataclasses.replace(context, name="other", caches=[])
    with hold_run(context.workspace, "other"):
        read = cached(pictures(tmp_path / "images", "a", 5), other)
        os.utime(read, (1, 1))
        second = cached(pictures(tmp_path / "images", "b", 6), context)
        assert folders(context) == {read.name, second.name}
        held = CachedRows(second, (SIZE, SIZE, 3)).holds(np.arange(6))
        np.testing.assert_array_equal(held, np.arange(6) < 4, "whole shards that fit next to the other run's images")

    third = cached(pictures(tmp_path / "images", "c", 4), context)
    assert folders(context) == {second.name, third.name}


def test_runs_that_start_together_share_the_limit(
    context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run starts when the first one has not yet written any image."""
    other = dataclasses.replace(context, name="other", caches=[])
    first_rows = pictures(tmp_path / "images", "a", 7)
    second_rows = pictures(tmp_path / "images", "b", 6)
    seconds = []

    def start_second(*arguments: Any, **options: Any) -> int:
        monkeypatch.undo()
        seconds.append(cached(second_rows, context))
        return map_table(*arguments, **options)

    monkeypatch.setattr(cache, "map_table", start_second)
    with hold_run(context.workspace, "other"):
        first = cached(first_rows, other)
    assert len(CachedRows(first, (SIZE, SIZE, 3)).spans) == 4
    held = CachedRows(seconds[0], (SIZE, SIZE, 3)).holds(np.arange(6))
    np.testing.assert_array_equal(held, np.arange(6) < 2, "whole shards that fit next to the planned images")
    assert not list(context.workspace.cache.rglob("planned*"))


def test_a_run_that_was_killed_reserves_nothing(
    context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    killed = dataclasses.replace(context, name="killed", caches=[])
    monkeypatch.setattr(cache, "map_table", die)
    with hold_run(context.workspace, "killed"), pytest.raises(KeyboardInterrupt):
        cached(pictures(tmp_path / "images", "a", 8), killed)
    monkeypatch.undo()

    folder = cached(pictures(tmp_path / "images", "b", 10), context)
    assert len(CachedRows(folder, (SIZE, SIZE, 3)).spans) == 5


def test_all_images_or_none_are_read_from_a_cache_that_another_run_reads(context: RunContext, tmp_path: Path) -> None:
    rows = pictures(tmp_path / "images", "a", 6)
    others = pictures(tmp_path / "images", "b", 6)
    run = dataclasses.replace(context, name="other", caches=[])
    all_or_none = functools.partial(decoded_cache, size=SIZE, compute=COMPUTE, all_or_none=True)
    with hold_run(context.workspace, "other"):
        read = all_or_none(rows, context=run)
        assert read is not None
        assert all_or_none(others, context=context) is None, "they do not fit next to the other run's images"
        assert all_or_none(rows, context=context) == read
    assert all_or_none(others, context=context, reserved_images=5) is None
    assert all_or_none(others, context=context, reserved_images=4) is not None


def test_an_unfinished_cache_is_removed_unless_another_run_is_writing_it(context: RunContext, tmp_path: Path) -> None:
    part = context.workspace.cache / f"squash{SIZE}-{'0' * 16}.part"
    part.mkdir()
    (part / "part-00000000-00000010.arrow").write_bytes(bytes(10 * image_bytes(SIZE)))
    (part / ".aside").symlink_to(part / "renamed meanwhile")
    os.utime(part, (1, 1))
    command = [sys.executable, "-c", HOLD, str(context.workspace.root), part.stem]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        first = cached(pictures(tmp_path / "images", "a", 2), context)
        second = cached(pictures(tmp_path / "images", "b", 2), context)
        assert folders(context) == {part.name, second.name}, "a cache that no run holds is removed instead"
        assert not first.exists()
        other.communicate()
    assert other.returncode == 0
    third = cached(pictures(tmp_path / "images", "c", 2), context)
    assert folders(context) == {second.name, third.name}


def test_a_cache_is_not_made_of_a_file_that_was_replaced_until_it_is_back(context: RunContext, tmp_path: Path) -> None:
    rows = pictures(tmp_path / "images", "a", 3)
    path = Path(rows["uri"][1].as_py())
    content = path.read_bytes()
    Image.new("RGB", (50, 40)).save(path)
    with pytest.raises(UserError, match=r"a1\.png was replaced or changed since it was indexed"):
        cached(rows, context)
    path.write_bytes(content)
    assert len(CachedRows(cached(rows, context), (SIZE, SIZE, 3)).spans) == 2
