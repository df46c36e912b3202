"""Features after ten photographs were added to a table, relative to the features of the whole table.

Recipe `photos`. The classifier is trained for one step, so the time is that of the features; the stage before it, the
index, is not counted. The trainings and all stages after them depend on every photograph and are computed again.
"""

from pathlib import Path

import harness
import jpeg_files

from mcis.platform import api
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session

TARGET = 0.2
ADDED = 10
SHORT = ["classifier.epochs=1", "classifier.min_steps=0", "classifier.epoch_pairs=16", "classifier.val_every=0"]
"""Settings that make the training negligible."""


def main() -> None:
    """Runs the classifier on the smaller table and on the whole one, and on the whole one in an empty workspace."""
    options = harness.option_parser(__doc__, images=300).parse_args()
    print(harness.describe_machine())
    with harness.working_folder(None) as root, ray_session(ComputeConfig()):
        names = [Path(path).name for path in jpeg_files.write_jpegs(root, options.images)]
        for table, count in (("before", len(names) - ADDED), ("after", len(names))):
            rows = "".join(f"{name},{'ab'[number % 2]}\n" for number, name in enumerate(names[:count]))
            (root / f"{table}.csv").write_text(f"image,tags\n{rows}")

        seconds_of_stage(root / "before.csv", root / "workspace")
        added = seconds_of_stage(root / "after.csv", root / "workspace")
        fresh = seconds_of_stage(root / "after.csv", root / "empty")

    print(f"{options.images - ADDED} photographs and {ADDED} added: {added:.1f} s; all {options.images}: {fresh:.1f} s")
    print(
        f"ratio {added / fresh:.2f} target at most {TARGET:g}: time to update the feature cache after adding "
        f"{ADDED} of {options.images} photographs, relative to computing all"
    )


def seconds_of_stage(table: Path, workspace: Path) -> float:
    """Runs the classifier on a table and returns the seconds of its stage."""
    settings = ["compute.stop_if_not_learning=false", *SHORT]
    api.run(table, name=table.stem, overrides=settings, workspace=workspace, until="train_classifier")
    return harness.stage_seconds(workspace / "runs" / table.stem)["train_classifier"]


if __name__ == "__main__":
    main()
