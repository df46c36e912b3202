"""What a process was decoding can be told after its death."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from mcis.datasets.images import noted as module
from mcis.datasets.images.noted import decoded_at_death, noted, noting
from mcis.datasets.images.squares import read_rgb

DIES = """
import os, signal, sys, threading
from pathlib import Path
from mcis.datasets.images.noted import noted, noting

def decode(names):
    with noted(names[0]):
        if names[1:]:
            return decode(names[1:])
        os.kill(os.getpid(), signal.SIGKILL)

with noting(Path(sys.argv[1])):
    with noted("decoded before"):
        pass
    decode(sys.argv[2:])
"""


def die(folder: Path, *names: str) -> None:
    """Has a process die that decodes some images at a time."""
    done = subprocess.run([sys.executable, "-c", DIES, str(folder), *names])
    assert done.returncode == -signal.SIGKILL


def test_what_dead_processes_were_decoding_is_told_and_what_living_ones_did_is_not(tmp_path: Path) -> None:
    assert decoded_at_death(tmp_path / "absent", 1) == []
    die(tmp_path, "innocent", "é\n" * 2000)
    die(tmp_path, "é\n" * 2000, "another")
    (longest,) = decoded_at_death(tmp_path, 2)
    assert ("é\n" * 2000).startswith(longest[:-1])
    assert len(os.fsencode(longest)) == 4095
    assert decoded_at_death(tmp_path, 3) == []
    assert decoded_at_death(tmp_path, 1) == sorted(["innocent", "another", longest])
    with noting(tmp_path):
        with noted("read"):
            pass
        with noted("in work"):
            assert "in work" in decoded_at_death(tmp_path, 1)
        assert "in work" not in decoded_at_death(tmp_path, 1)
        assert len(list(tmp_path.iterdir())) == 3
    assert len(list(tmp_path.iterdir())) == 2, "whoever ends well leaves nothing"
    assert module._note is None


def test_to_note_an_image_costs_next_to_nothing_beside_its_decoder(tmp_path: Path) -> None:
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    uri = str(tmp_path / "a.png")

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(100):
            read_rgb(uri, 64)
        return time.perf_counter() - began

    plain = min(seconds() for _ in range(3))
    with noting(tmp_path / "notes"):
        assert min(seconds() for _ in range(3)) < 2 * plain
