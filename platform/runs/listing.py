"""What the configured image sources hold, before any image is opened: sections of the configuration -> one listing."""

import functools
from collections.abc import Iterable
from typing import Any

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, merge
from mcis.datasets.sources import SOURCES
from mcis.platform.config.data import LidConfig, SingleConfig, TagsConfig, WebConfig
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import sources_of
from mcis.platform.runs.arguments import errors_name_keys, name_keys


def _keys(section: str, fields: Iterable[str]) -> dict[str, str]:
    return {field: f"{section}.{field}" for field in fields}


_VOC_FIELDS = (
    "classes", "train_list", "val_list", "test_list", "saliency", "masks", "sbd", "tags_from", "difficult",
)  # fmt: skip

ARGUMENTS = {
    "voc": {"root": "data.voc", **_keys("data", _VOC_FIELDS)},
    "lid": _keys("data.lid", LidConfig.model_fields),
    "tags": {"classes": "data.classes", **_keys("data.tags", TagsConfig.model_fields)},
    "single": _keys("data.single", SingleConfig.model_fields),
    "web": _keys("data.web", WebConfig.model_fields),
}
"""By source: argument of its lister -> the configuration key that gives it."""


class Sources:
    """What the sources of a configuration hold, listed once; of millions of images it takes as much memory as all else,
    so that whoever makes the index of it takes it away."""

    def __init__(self, config: Config):
        self._config = config
        self._listing: Listing | None = listing(config)

    def look(self) -> Listing:
        """What they hold."""
        self._listing = self._listing or listing(self._config)
        return self._listing

    def take(self) -> Listing:
        """As `look`, for the last time."""
        found = self.look()
        self.forget()
        return found

    def forget(self) -> None:
        """Gives its memory back; it would be listed again."""
        self._listing = None


def listing(config: Config) -> Listing:
    """What the configured sources hold, one after the other. The first source that names its classes names them all.

    Raises:
        UserError: a source is not named, or its lists are contradictory; it names configuration keys and flags.
    """
    listings: list[Listing] = []
    names = read_classes(config.data.classes) if config.data.classes else VOC_CLASSES
    for source in sources_of(config.setting):
        listings.append(_list(source, config, names))
        names = listings[0].classes
    return merge(*listings)


def _list(source: str, config: Config, names: tuple[str, ...]) -> Listing:
    """The listing of one source; `names` are the K class names for a source that names none itself."""
    lister, location, about, *_ = SOURCES[source]
    arguments = {argument: _value(config, key) for argument, key in ARGUMENTS[source].items()}
    if arguments[location] is None:
        raise UserError(f"setting {config.setting} without the images of {source}", about, f"add --{source} PATH")
    if not SOURCES[source].names_classes:
        arguments["names"] = names
    keys = ARGUMENTS[source] | {location: f"--{source}"}
    with errors_name_keys(keys):
        listed = lister(**arguments)
    return listed._replace(notes=tuple(name_keys(note, keys) for note in listed.notes))


def _value(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)
