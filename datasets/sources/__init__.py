"""The image sources: one table of what each lists and what the platform has to know of it."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from mcis.datasets.index import Listing
from mcis.datasets.sources.lid import list_lid
from mcis.datasets.sources.single_label import list_single_label
from mcis.datasets.sources.tagged import list_tagged
from mcis.datasets.sources.voc import list_voc
from mcis.datasets.sources.web import list_web


class Source(NamedTuple):
    """A source of images.

    Attributes:
        lister: reads lists and names, opens no image. Its first argument is where the images are; a lister of a source
            that does not name its classes takes their `names` as well.
        location: name of the lister's first argument.
        about: what that argument has to be, for messages.
        domain: of its images, as in INDEX_SCHEMA.
        names_classes: it brings class names of its own, so a run has at most one such source.
        curated: every file is expected to be an image, and every class to have a training image.
    """

    lister: Callable[..., Listing]
    location: str
    about: str
    domain: Literal["target", "source", "web"]
    names_classes: bool = False
    curated: bool = False


SOURCES = {
    "voc": Source(list_voc, "root", "the folder VOC2012 of a devkit", "target", names_classes=True, curated=True),
    "lid": Source(list_lid, "root", "the folder of the LID challenge", "target", names_classes=True),
    "tags": Source(list_tagged, "table", "a table of images and tags", "target", names_classes=True),
    "single": Source(list_single_label, "root", "a folder of single-label images", "source"),
    "web": Source(list_web, "root", "a folder of crawled images, <class>/<file>", "web"),
}
"""By the name of the source; the sources that name their classes come first."""
