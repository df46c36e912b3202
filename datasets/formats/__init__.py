"""Imports data sets of other tools as a table for the source `tags`, with label masks."""

from mcis.datasets.formats.importing import FORMATS, import_data_set

__all__ = ["FORMATS", "import_data_set"]
