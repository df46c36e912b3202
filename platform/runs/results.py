"""Results of stages: typed records for later stages and the report, stored next to the outputs.

Every stage returns a `StageResult`, or a subclass with further fields.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mcis.datasets.errors import BadFile, join_shortened, recompute_command
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.files import sync
from mcis.datasets.storage.folders import TEMPORARY_NAME
from mcis.platform.runs.files import files_in, read_json, read_record_of, write_json
from mcis.platform.runs.workspace import SUMMARY

VAL_MAP = "val mAP"
"""Label in `StageResult.counts` of the classifier's mean average precision in percent on the tags of split val."""


class Problem(NamedTuple):
    """Why later stages cannot learn from an output, in the three parts of a `UserError`.

    Attributes:
        found: What was found.
        expected: What would have been correct.
        remedy: What to do about it.
    """

    found: str
    expected: str
    remedy: str

    def text(self) -> str:
        """Returns the problem as one sentence, for notes."""
        return f"{self.found}; expected {self.expected}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Result of a stage.

    Attributes:
        counts: Numbers for the report by label; a value is a number or a dictionary of numbers by label.
        notes: Sentences for the user.
        identity: Part of the keys of later stages. None: the key of this stage. A stage sets it if outputs with
            different keys can be equivalent.
        problem: Why later stages cannot learn from the output; None if they can.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    identity: str | None = None
    problem: Problem | None = None

    def remarks(self) -> tuple[str, ...]:
        """The notes, followed by the problem if there is one."""
        if self.problem is None:
            return self.notes
        return (*self.notes, self.problem.text())


@dataclass(frozen=True, kw_only=True)
class IndexResult(StageResult):
    """The result of `index`.

    Attributes:
        classes: The K class names; tag k is the class at position k.
        value_range: `data.value_range`, with which its images are read.
    """

    classes: tuple[str, ...]
    value_range: ValueRange | None = None

    @property
    def images(self) -> dict[str, int]:
        """Number of images by split."""
        images: dict[str, int] = self.counts["images"]
        return images


@dataclass(frozen=True, kw_only=True)
class MasksResult(StageResult):
    """The result of `pseudo_masks`.

    Attributes:
        background_cue: Source of the background: `saliency`, `crf`, ..., or the number of images per source.
    """

    background_cue: str


@dataclass(frozen=True, kw_only=True)
class PredictResult(StageResult):
    """The result of `predict`.

    Attributes:
        split: Split of the predicted images.
    """

    split: str


@dataclass(frozen=True, kw_only=True)
class _CacheNames:
    """The part of a summary that names the folders in cache/ that the stage read."""

    caches: tuple[str, ...]


Result = TypeVar("Result", bound=StageResult)
_Summary = TypeVar("_Summary")


def write_result(folder: Path, result: StageResult, *, key: str, caches: Sequence[str] = ()) -> None:
    """Finishes the output of a stage: syncs its folder to disk, then writes its summary.

    The summary also lists the caches that the stage read and the size in bytes of each output file, which
    `find_missing_files` checks.
    """
    files = {}
    for name, size in sorted(files_in(folder).items()):
        # Temporary files and folders of processes that died are not part of the output; `mcis gc` removes them.
        is_temporary = any(TEMPORARY_NAME.fullmatch(part) for part in Path(name).parts)
        if name != SUMMARY and not is_temporary:
            files[name] = size

    sync(folder.parent)
    for parent, _, _ in os.walk(folder):
        sync(Path(parent))

    summary = {"caches": list(dict.fromkeys(caches))} | dataclasses.asdict(result)
    summary["identity"] = result.identity or key
    summary["files"] = files
    write_json(folder / SUMMARY, summary)


def find_missing_files(folder: Path) -> str | None:
    """Describes files of a finished output that are missing or have another size than its summary states.

    Returns:
        The description, or None if the output is complete. Files are listed, not read.
    """
    try:
        listed = dict(read_json(folder / SUMMARY)["files"])
    except FileNotFoundError:
        return f"{SUMMARY} is missing"
    except (BadFile, KeyError, TypeError, ValueError):
        return f"{SUMMARY} is damaged"
    sizes = files_in(folder)
    problems = [f"{name} is missing" for name in listed if name not in sizes]
    for name, size in listed.items():
        if sizes.get(name, size) != size:
            problems.append(f"{name} has {sizes[name]} of {size} bytes")
    return join_shortened(problems) if problems else None


def read_result(folder: Path, kind: type[Result]) -> Result:
    """Reads the result of a finished stage.

    Args:
        folder: Its output.
        kind: Type of the result.

    Raises:
        FileNotFoundError: The stage is not finished.
        UserError: The summary is damaged or was written by another version.
    """
    return _read_summary(folder, kind)


def read_cache_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the folders in cache/ that a finished stage read. For errors see `read_result`.

    Args:
        folder: Its output.
    """
    return _read_summary(folder, _CacheNames).caches


def _read_summary(folder: Path, kind: type[_Summary]) -> _Summary:
    expected = "the summary of a stage as this version of mcis writes it"
    return read_record_of(folder / SUMMARY, kind, expected, f"compute its stage again: {recompute_command()}")
