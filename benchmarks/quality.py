"""Quality floor: mIoU of pseudo masks and of the segmentation network on the embedded synthetic scenes.

Runs `mcis demo` with seed 0: recipe `photos` is trained on 480 scenes from their tags alone, and the segmentation
network is scored on 120 others. With `--quick`, the network is trained for 80 steps instead of 200. The targets are
about 6 points below the measured values, so that a loss of ten points cannot pass.
"""

import tempfile
from collections.abc import Sequence
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
QUICK = ("segmenter.min_steps=80", "segmenter.min_epochs=0")
QUICK_FLOORS = {
    "pseudo masks": FLOORS["pseudo masks"],
    "segmentation": Floor(measured=52.6, floor=47),
    "segmentation with CRF": Floor(measured=60.8, floor=55),
}


def measure(workspace: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Trains on the synthetic scenes and returns mIoU in percent by the keys of `FLOORS`."""
    configuration = demo_configuration(workspace, overrides)
    result = api.run_resolved(configuration, "quality", workspace=workspace, until="evaluate")

    mious = {}
    for score in result.scores:
        if score.output == "pseudo_masks":
            mious["pseudo masks"] = score.miou
        if score.output == "segmentation":
            mious["segmentation with CRF" if score.crf else "segmentation"] = score.miou
    return mious


def main() -> None:
    """Prints the mIoU of each output with its floor."""
    parser = harness.option_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="train the segmentation network for 80 steps")
    options = parser.parse_args()
    print(harness.describe_machine())
    with tempfile.TemporaryDirectory() as workspace:
        mious = measure(Path(workspace), QUICK if options.quick else ())

    floors = QUICK_FLOORS if options.quick else FLOORS
    for output, (_, floor) in floors.items():
        print(f"ratio {mious[output]:.1f} target {floor:g}: mIoU of {output} on synthetic scenes")


if __name__ == "__main__":
    main()
