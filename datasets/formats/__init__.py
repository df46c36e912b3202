"""Reads data sets of other tools as a table for the source `tags`, and writes label masks for these tools."""

from mcis.datasets.formats.exporting import EXPORT_FORMATS, export_data_set
from mcis.datasets.formats.importing import FORMATS, import_data_set

__all__ = ["EXPORT_FORMATS", "FORMATS", "export_data_set", "import_data_set"]
