"""Results of stages are written next to the output and read back unchanged."""

import dataclasses
from pathlib import Path

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage.folders import remove, temporary_path
from mcis.platform.runs.files import read_json
from mcis.platform.runs.results import (
    IndexResult,
    MasksResult,
    PredictResult,
    Problem,
    StageResult,
    find_missing_files,
    read_result,
    write_result,
)
from mcis.platform.runs.workspace import SUMMARY

RESULTS = (
    StageResult(counts={"images": 3, "domains": {"target": 3}}, notes=("one", "two"), identity="content"),
    IndexResult(classes=("cat", "größe"), counts={"images": {"train": 2, "val": 1}}, identity="content"),
    MasksResult(background_cue="saliency, crf for 6 of 26", identity="key"),
    PredictResult(split="val", identity="key"),
    StageResult(identity="key", problem=Problem("found", "expected", "remedy")),
    StageResult(),
)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_a_result_is_read_as_it_was_written(result: StageResult, tmp_path: Path) -> None:
    write_result(tmp_path, result, key="key")
    assert read_result(tmp_path, type(result)) == dataclasses.replace(result, identity=result.identity or "key")
    common = read_result(tmp_path, StageResult)
    assert (common.counts, common.notes) == (result.counts, result.notes)
    assert common.problem == result.problem
    assert common.remarks() == result.remarks()
    written = read_json(tmp_path / SUMMARY)
    assert written["identity"] == (result.identity or "key")


def test_what_a_killed_process_was_removing_is_not_part_of_an_output(tmp_path: Path) -> None:
    """`mcis gc` removes it later, and the output is still complete."""
    half_removed = temporary_path(tmp_path / "embedded")
    for folder in (half_removed / "features", tmp_path / "maps"):
        folder.mkdir(parents=True)
        (folder / "part-00000000-00000004.parquet").write_bytes(bytes(10))

    write_result(tmp_path, StageResult(), key="key")

    assert read_json(tmp_path / SUMMARY)["files"] == {"maps/part-00000000-00000004.parquet": 10}
    assert remove(half_removed)
    assert find_missing_files(tmp_path) is None


def test_the_result_of_another_stage_is_refused(tmp_path: Path) -> None:
    write_result(tmp_path, StageResult(), key="0123")
    with pytest.raises(UserError, match=r"summary.json is damaged \(classes: "):
        read_result(tmp_path, IndexResult)
