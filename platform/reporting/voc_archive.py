"""Writes predictions as the evaluation server of PASCAL VOC takes them."""

import io
import tarfile
from pathlib import Path

from mcis.platform.reporting.files import file_names, stage_table, table_rows
from mcis.platform.runs.files import atomic_write
from mcis.platform.runs.workspace import Workspace

_FOLDER = "results/VOC2012/Segmentation/comp6_test_cls"
"""Folder of the label masks in the archive (paper-vs-code, "Counts")."""


def write_voc_archive(workspace: Workspace, name: str, file: Path) -> int:
    """Writes the predictions of a run to a tar.gz, refined by the CRF if the run uses one; overwrites an existing file.

    Args:
        workspace: Workspace of the run.
        name: Name of the run.
        file: File to write.

    Returns:
        Number of predictions.

    Raises:
        UserError: The run has no predictions, or an image id cannot be a file name.
    """
    table = stage_table(workspace, name, "predict", "predictions")
    names = file_names((row["image_id"] for row in table_rows(table, ["image_id"])), file.parent)
    with atomic_write(file) as aside, tarfile.open(aside, "w:gz") as archive:
        for row in table_rows(table):
            content = row["crf"] or row["plain"]
            entry = tarfile.TarInfo(f"{_FOLDER}/{names[row['image_id']]}.png")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return len(names)
