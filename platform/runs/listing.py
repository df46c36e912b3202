"""What the configured image sources hold, before any image is opened: sections of the configuration -> one listing."""

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, merge
from mcis.datasets.sources import SOURCES
from mcis.platform.config.keys import value_of
from mcis.platform.config.sections import Config, sources_of


class Sources:
    """What the sources of a configuration hold, listed once; of millions of images it takes as much memory as all else,
    so that whoever makes the index of it has it forgotten."""

    def __init__(self, config: Config):
        self._config = config
        self._listing: Listing | None = listing(config)

    def listing(self) -> Listing:
        """What they hold."""
        self._listing = self._listing or listing(self._config)
        return self._listing

    def release(self) -> None:
        """Gives its memory back; it would be listed again."""
        self._listing = None


def listing(config: Config) -> Listing:
    """What the configured sources hold, one after the other. The first source that names its classes names them all.
    UserError where a source is not named, or its lists are contradictory; it names configuration keys and flags."""
    listings: list[Listing] = []
    names = read_classes(config.data.classes) if config.data.classes else VOC_CLASSES
    for source in sources_of(config.sources):
        listings.append(_list(source, config, names))
        names = listings[0].classes
    return merge(*listings)


def _list(name: str, config: Config, names: tuple[str, ...]) -> Listing:
    """The listing of one source; `names` are the K class names for a source that names none itself."""
    source = SOURCES[name]
    keys = source.keys(name)
    arguments = {argument: value_of(config, key) for argument, key in keys.items()}
    if arguments[source.location] is None:
        raise UserError(f"sources {config.sources} without the images of {name}", source.help, f"add --{name} PATH")
    if not source.defines_classes:
        arguments["names"] = names
    return source.lister(**arguments)
