"""Lists the images of the configured sources before any image is opened: configuration -> listing."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.index import LISTING_SCHEMA, Listing, merge
from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.lists import read_lines
from mcis.platform.config.keys import value_of
from mcis.platform.config.sections import Config, sources_of


class Sources:
    """The sources of a configuration with their listing, which is computed once.

    The listing of millions of images takes as much memory as everything else, so the stage `index` releases it.
    """

    def __init__(self, config: Config):
        self._config = config
        self._listing: Listing | None = list_images(config)

    def listing(self) -> Listing:
        """The listing; it is computed again after `release`."""
        if self._listing is None:
            self._listing = list_images(self._config)
        return self._listing

    def release(self) -> None:
        """Frees the memory of the listing."""
        self._listing = None


def list_images(config: Config) -> Listing:
    """Lists all configured sources, one after the other. The first source defines the classes of all.

    Raises:
        UserError: The location of a source is missing, or its lists are contradictory.
    """
    listings: list[Listing] = []
    names = given_classes(config)
    for source in sources_of(config.sources):
        listings.append(list_source(source, config, names))
        names = listings[0].classes
    merged = merge(*listings)
    return _without(merged, config.data.leave_out) if config.data.leave_out else merged


def _without(listed: Listing, path: Path) -> Listing:
    """Removes the training images that a file names.

    Raises:
        UserError: See `read_lines`; or none of the images is in train.
    """
    expected = "one image id per line"
    remedy = "name a file that `mcis suggest --tags` wrote, or leave data.leave_out empty"
    names = {line for _, line in read_lines(path, expected, remedy)}
    table = listed.table
    is_named = pc.is_in(table["image_id"], pa.array(sorted(names), pa.string()))
    is_left_out = pc.and_(is_named, pc.equal(table["split"], "train"))
    count = pc.sum(is_left_out).as_py() or 0
    if not count:
        raise UserError(f"none of the {len(names)} ids in {path} is a training image", expected, remedy)

    absent = "" if count == len(names) else f"; {len(names) - count} further ids are no training images"
    note = f"left out {count} training images that {path} names{absent}"
    return listed._replace(table=table.filter(pc.invert(is_left_out)), notes=(*listed.notes, note))


def given_classes(config: Config) -> tuple[str, ...]:
    """The class names of the configuration: those of its file, or else VOC's."""
    return read_classes(config.data.classes) if config.data.classes else VOC_CLASSES


def list_source(name: str, config: Config, names: tuple[str, ...]) -> Listing:
    """Lists one source, in its own order.

    Args:
        name: Name of the source.
        names: The K class names, for sources that do not define classes.

    Raises:
        UserError: See `list_images`.
    """
    source = SOURCES[name]
    keys = source.keys(name)
    arguments = {argument: value_of(config, key) for argument, key in keys.items()}
    if arguments[source.location] is None:
        raise UserError(f"sources {config.sources} without the images of {name}", source.help, f"add --{name} PATH")
    if not source.defines_classes:
        arguments["names"] = names
    result = source.lister(**arguments)
    _check_columns(name, result)
    return result


def _check_columns(name: str, listed: Listing) -> None:
    """Raises a UserError if a source of another package built its table without a column, or with null in it."""
    table = listed.table
    wrong = []
    for field in LISTING_SCHEMA:
        if field.name not in table.column_names or (table[field.name].null_count and not field.nullable):
            wrong.append(field.name)
    if wrong:
        raise UserError(
            f"source {name} lists images without a value in column {join_shortened(wrong)}",
            f"a table with the columns {', '.join(LISTING_SCHEMA.names)}",
            "build the table by `mcis.datasets.sources.lists.listing_table`",
        )
