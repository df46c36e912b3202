"""What a finished stage hands to later stages and to the report: a typed record, kept beside its output.

`StageResult` is what every stage returns; a stage that hands over more returns one of its subclasses.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mcis.datasets.errors import BadFile
from mcis.datasets.index import shown
from mcis.datasets.storage.files import sync
from mcis.datasets.storage.folders import ASIDE
from mcis.platform.runs.files import files_in, read_json, read_record_of, write_json
from mcis.platform.runs.workspace import SUMMARY

VAL_MAP = "val mAP"
"""The label in `StageResult.counts` of the classifier's mean average precision on the tags of split val, in percent."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What every stage returns.

    Attributes:
        counts: figures for the report by their label; a value is a number or a table of numbers by label.
        notes: sentences that the user should read.
        identity: what the keys of later stages depend on. None, which the pipeline replaces by the stage's own key,
            unless outputs of different keys can have the same meaning.
        problem: why the output teaches later stages nothing, as the three parts of a `UserError`; None where it does.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    identity: str | None = None
    problem: tuple[str, str, str] | None = None

    def remarks(self) -> tuple[str, ...]:
        """The notes, and the problem as one of them."""
        if self.problem is None:
            return self.notes
        found, expected, remedy = self.problem
        return (*self.notes, f"{found}; expected {expected}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class IndexResult(StageResult):
    """The result of `index`.

    Attributes:
        classes: the K class names; a tag k is the position of its class here.
    """

    classes: tuple[str, ...]

    @property
    def images(self) -> dict[str, int]:
        """Number of images by split."""
        images: dict[str, int] = self.counts["images"]
        return images


@dataclass(frozen=True, kw_only=True)
class MasksResult(StageResult):
    """The result of `pseudo_masks`.

    Attributes:
        background_cue: what told background from foreground: `saliency`, `crf`, or how many images had which.
    """

    background_cue: str


@dataclass(frozen=True, kw_only=True)
class PredictResult(StageResult):
    """The result of `predict`.

    Attributes:
        split: the split whose images were predicted.
    """

    split: str


Result = TypeVar("Result", bound=StageResult)


def write_result(folder: Path, result: StageResult, *, key: str, caches: Sequence[str] = ()) -> None:
    """Finishes a stage's output: writes its result, once all names in its folder are on the disk.

    Beside the result stand the caches that it read, and the size in bytes of each of its files, which
    `find_missing_files` checks.
    """
    record = dataclasses.asdict(result) | {"identity": result.identity or key}
    about = {"caches": list(dict.fromkeys(caches))}
    # What a process that is gone left under a temporary name is not of the output: `mcis gc` removes it.
    files = {name: size for name, size in sorted(files_in(folder).items()) if not ASIDE.fullmatch(Path(name).name)}
    files.pop(SUMMARY, None)
    for parent in (str(folder.parent), *(parent for parent, _, _ in os.walk(folder))):
        sync(Path(parent))
    write_json(folder / SUMMARY, about | record | {"files": files})


def find_missing_files(folder: Path) -> str | None:
    """What a finished output lacks of the files that its summary lists, in words; None where they all have their size.

    Files are listed, not read.
    """
    try:
        listed = dict(read_json(folder / SUMMARY)["files"])
    except FileNotFoundError:
        return f"{SUMMARY} is missing"
    except (BadFile, KeyError, TypeError, ValueError):
        return f"{SUMMARY} is damaged"
    there = files_in(folder)
    flaws = [f"{name} is missing" for name in listed if name not in there]
    flaws += [f"{n} has {there[n]} of {size} bytes" for n, size in listed.items() if there.get(n, size) != size]
    return shown(flaws) if flaws else None


def read_result(folder: Path, kind: type[Result]) -> Result:
    """What a finished stage left in its output's folder, a record of type `kind`; errors as of `read_record_of`."""
    expected, remedy = "the summary of a stage as this version writes it", "repeat the command with --from its stage"
    return read_record_of(folder / SUMMARY, kind, expected, remedy)
