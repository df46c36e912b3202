"""The image sources: one record and one line of a registry each."""

from mcis.datasets.registry import Registry
from mcis.datasets.sources.lid import LID
from mcis.datasets.sources.single_label import SINGLE
from mcis.datasets.sources.source import Source
from mcis.datasets.sources.tagged import TAGS
from mcis.datasets.sources.voc import VOC
from mcis.datasets.sources.web import WEB

SOURCES = Registry[Source]("sources", {"voc": VOC, "lid": LID, "tags": TAGS, "single": SINGLE, "web": WEB})
"""Image sources by name. Packages add sources by entry points of the group `mcis.sources`."""
