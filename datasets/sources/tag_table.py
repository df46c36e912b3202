"""Reads tables of single-label or web images: image, one or several tags, and where the image comes from."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mcis.datasets.classes import normalized_name
from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.sources.class_names import ClassNames
from mcis.datasets.sources.lists import relative_name
from mcis.datasets.sources.tagged import split_tags, tag_cells
from mcis.datasets.sources.user_table import UserTable, in_existing_spellings, read_user_table
from mcis.datasets.tables.large_tables import repeated_texts

_ROLES = {name: name for name in ("image", "tags", "saliency", "url", "license")}


class TableImage(NamedTuple):
    """An image of a table.

    Attributes:
        name: Path relative to the table's folder; for other files, their path or URI without the slash at the start.
        uri: Absolute path or URI.
        tags: Class indices, ascending, at least one.
        saliency, url, license: Saliency map, address of the original and its license; None if not given.
    """

    name: str
    uri: str
    tags: tuple[int, ...]
    saliency: str | None
    url: str | None
    license: str | None


def read_tag_table(table: str, classes: ClassNames, *, trusted: bool) -> tuple[list[TableImage], list[str]]:
    """Reads a table with the columns image and tags and, optionally, saliency, url and license. No image is opened.

    Args:
        table: Path or URI of a .csv, .jsonl or .parquet table.
        classes: Names of the classes. Other tags are left out, and so are images without a class, with notes.
        trusted: See `read_user_table`.

    Returns:
        The images and notes.

    Raises:
        UserError: See `read_user_table`; or an image is listed twice, or no image has a class.
    """
    rows = read_user_table(table, _ROLES, ("saliency", "url", "license"), trusted=trusted, has_column_keys=False)
    uris = in_existing_spellings(rows.uris("image", rows.filled("image")))
    names = rows.names(uris)
    repeated = repeated_texts(names)
    if repeated:
        found = f"{rows.path}: {len(repeated)} image(s) are listed more than once: {join_shortened(repeated)}"
        raise UserError(found, "one row per image, with all its tags", "merge the rows")

    tags, other_tags = _class_indices(rows, classes)
    columns = [_optional_texts(rows, role) for role in ("saliency", "url", "license")]
    images = []
    for name, uri, classes_of_row, *optional in zip(names.to_pylist(), uris.to_pylist(), tags, *columns, strict=True):
        if classes_of_row:
            images.append(TableImage(relative_name(name) or name, uri, classes_of_row, *optional))
    if not images:
        raise UserError(
            f"{rows.path}: no image has a tag that is a class; there are {join_shortened(other_tags) or 'no tags'}",
            f"some of {', '.join(classes.names)}",
            "correct the tags",
        )

    notes = []
    if other_tags:
        notes.append(f"{rows.path}: left out tags that match no class: {join_shortened(other_tags)}")
    if len(images) < len(tags):
        notes.append(f"{rows.path}: left out {len(tags) - len(images)} of {len(tags)} images, which have no class")
    if rows.unread:
        notes.append(f"{rows.path}: columns that are not read: {join_shortened(rows.unread)}")
    return images, notes


def _class_indices(rows: UserTable, classes: ClassNames) -> tuple[list[tuple[int, ...]], list[str]]:
    """Returns the class indices of each row, ascending, and the tags that are no class."""
    indices = []
    others = set()
    for tags in _tags(rows):
        found = {tag: classes.find(tag) for tag in tags}
        others |= {tag for tag, index in found.items() if index is None}
        indices.append(tuple(sorted({index for index in found.values() if index is not None})))
    return indices, sorted(others)


def _tags(rows: UserTable) -> Iterator[list[str]]:
    """Yields the tags of each row, see `normalized_name`."""
    for cell in tag_cells(rows).to_pylist():
        tags = split_tags(cell) if isinstance(cell, str) else (cell or [])
        names = [normalized_name(tag) for tag in tags if tag]
        yield [name for name in names if name]


def _optional_texts(rows: UserTable, role: str) -> Sequence[str | None]:
    """Returns the texts of a column, null for empty ones and for a column that is absent."""
    if role not in rows.columns:
        return [None] * len(rows.content)
    texts = rows.texts(role)
    if role == "saliency":
        texts = in_existing_spellings(rows.uris(role, texts))
    values: list[str | None] = texts.to_pylist()
    return values
