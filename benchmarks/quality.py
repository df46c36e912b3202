"""Quality floor: mIoU of pseudo masks and of the segmentation network on the embedded synthetic scenes.

Runs `mcis demo` with seed 0: recipe `photos` is trained on 480 scenes from their tags alone, and the segmentation
network is scored on 120 others. The targets are about 6 points below the measured values, so that a loss of ten points
cannot pass.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import harness

from mcis.platform import api
from mcis.platform.commands.run import demo_configuration


class Floor(NamedTuple):
    """The value that was measured with seed 0 and the smallest one that passes, mIoU in percent."""

    measured: float
    floor: float


FLOORS = {
    "pseudo masks": Floor(measured=71.9, floor=66),
    "segmentation": Floor(measured=61.1, floor=55),
    "segmentation with CRF": Floor(measured=67.5, floor=61),
}
"""Measured: the scores of `mcis demo` in docs/reference/benchmarks.md, section "The demo"."""


def measure(workspace: Path) -> dict[str, float]:
    """Trains on the synthetic scenes and returns mIoU in percent by the keys of `FLOORS`."""
    result = api.run_resolved(demo_configuration(workspace), "quality", workspace=workspace, until="evaluate")

    mious = {}
    for score in result.scores:
        if score.output == "pseudo_masks":
            mious["pseudo masks"] = score.miou
        if score.output == "segmentation":
            mious["segmentation with CRF" if score.crf else "segmentation"] = score.miou
    return mious


def main() -> None:
    """Prints the mIoU of each output with its floor."""
    harness.option_parser(__doc__).parse_args()
    print(harness.describe_machine())
    with tempfile.TemporaryDirectory() as workspace:
        mious = measure(Path(workspace))

    for output, (_, floor) in FLOORS.items():
        print(f"ratio {mious[output]:.1f} target {floor:g}: mIoU of {output} on synthetic scenes")


if __name__ == "__main__":
    main()
