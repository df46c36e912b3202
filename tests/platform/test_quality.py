"""Quality floor: a training on the synthetic scenes must reach the mIoU that `benchmarks/quality.py` states."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "quality.py"
RATIO = re.compile(r"ratio (\S+) target (\S+): mIoU of (.+) on synthetic scenes")


@pytest.mark.slow(minutes=4)
def test_pseudo_masks_and_segmentation_reach_their_floors() -> None:
    """A loss of ten points fails."""
    done = subprocess.run([sys.executable, str(BENCHMARK), "--quick"], stdout=subprocess.PIPE, text=True, check=True)
    matches = [match for match in map(RATIO.fullmatch, done.stdout.splitlines()) if match]
    assert [match[3] for match in matches] == ["pseudo masks", "segmentation", "segmentation with CRF"]

    below = [match[0] for match in matches if float(match[1]) < float(match[2])]
    assert not below
