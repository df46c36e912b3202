"""The image sources: one record and one line of a registry each."""

from mcis.datasets.registry import Registry
from mcis.datasets.sources.class_folders import SINGLE, WEB
from mcis.datasets.sources.lid import LID
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.tagged import TAGS
from mcis.datasets.sources.voc import VOC

SOURCES = Registry[Source]("sources", {"voc": VOC, "lid": LID, "tags": TAGS, "single": SINGLE, "web": WEB})
"""Image sources by name. Packages add sources by entry points of the group `mcis.sources`."""
