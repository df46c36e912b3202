"""Which images a process decodes, written down so that it can be told once a decoder has ended the process.

A segmentation fault, or a kill for lack of memory, leaves no error. Each process of a training has a file in a folder,
and what the file of a dead one still says it was decoding is what may have ended it.
"""

import contextlib
import itertools
import os
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.sampling.batch_stream import AnyBatch, Decoder

_SLOT = 4096
"""Bytes for the name of an image; the end of a longer one is left out."""


class _Note:
    """The file of this process: a slot for each image that is being decoded, empty where its first byte is 0."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / uuid.uuid4().hex
        self.file = self.path.open("xb", buffering=0)  # closed with the last block that writes into it
        self.numbers, self.free = itertools.count(), deque[int]()

    @contextlib.contextmanager
    def noted(self, uri: str) -> Iterator[None]:
        """Has a slot name an image while the block runs; what is written outlives this process."""
        try:
            slot = self.free.pop()
        except IndexError:
            slot = next(self.numbers)
        os.pwrite(self.file.fileno(), os.fsencode(uri)[: _SLOT - 1] + b"\0", slot * _SLOT)
        try:
            yield
        finally:
            os.pwrite(self.file.fileno(), b"\0", slot * _SLOT)
            self.free.append(slot)


_note: _Note | None = None


@contextlib.contextmanager
def noting(folder: Path) -> Iterator[None]:
    """Has this process write down in a folder which images it decodes, while the block runs, or until it dies."""
    _note_in(folder)
    try:
        yield
    finally:
        _forget()


def noted(uri: str) -> contextlib.AbstractContextManager[None]:
    """Writes down that an image is decoded while the block runs, in a process that notes it."""
    return contextlib.nullcontext() if _note is None else _note.noted(uri)


def decoded_at_death(folder: Path, deaths: int) -> list[str]:
    """The images that so many of the processes of a folder, or more, were decoding when they died, sorted."""
    notes = [path.read_bytes() for path in folder.iterdir()] if folder.is_dir() else []
    slots = [{note[at : at + _SLOT].partition(b"\0")[0] for at in range(0, len(note), _SLOT)} for note in notes]
    died = Counter(name for names in slots for name in names if name)
    return sorted(os.fsdecode(name) for name, count in died.items() if count >= deaths)


class NotingDecoder(Generic[AnyBatch]):
    """A decoder of a stream whose process, whichever decodes, writes down in a folder which images it decodes."""

    def __init__(self, decoder: Decoder[AnyBatch], folder: Path):
        self.decoder, self.folder = decoder, folder

    @property
    def batch_type(self) -> type[AnyBatch]:
        """See `Decoder`."""
        return self.decoder.batch_type

    @property
    def row_bytes(self) -> int:
        """See `Decoder`."""
        return self.decoder.row_bytes

    def __call__(self, steps: NDArray[np.int64]) -> AnyBatch:
        _note_in(self.folder)
        return self.decoder(steps)


def _note_in(folder: Path) -> None:
    global _note
    if _note is None or _note.folder != folder:
        _forget()
        _note = _Note(folder)


def _forget() -> None:
    global _note
    if _note is not None:
        _note.path.unlink(missing_ok=True)
        _note = None
