"""Reads data sets of the library `datasets` of Hugging Face."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mcis.datasets.errors import UserError
from mcis.datasets.formats.data_set import AnnotatedObject, DataSet, Format, ImportRequest, Photos
from mcis.datasets.formats.libraries import require_module
from mcis.datasets.storage.folders import atomic_write


def read_hugging_face(request: ImportRequest) -> DataSet:
    """Reads the columns image and label or labels of a data set, and copies its images."""
    source = request.source
    features = require_module("datasets.features")
    data = _load_split(source, request.split)
    column = "labels" if "labels" in data.features else "label"
    label_type = getattr(data.features[column], "feature", data.features[column])  # of a list: type of its items
    if not _has_names(label_type):
        _refuse_vectors(source, column, data.select_columns([column]))
    photos: Photos = {}

    # Without the other columns: the library would decode them, and download images that they name by URLs.
    rows = data.select_columns(["image", column]).cast_column("image", features.Image(decode=False))
    for number, row in enumerate(rows):
        path = Path(row["image"]["path"] or "")
        content = row["image"]["bytes"]
        if content is None and not path.resolve().is_relative_to(source):
            raise ValueError(f"image {number} is outside of the data set")

        name = f"{number:08}{path.suffix}"
        photos[name] = [AnnotatedObject(tag) for tag in _tags(row[column], label_type)]
        with atomic_write(request.copies / name, durable=False) as temporary:
            temporary.write_bytes(path.read_bytes() if content is None else content)

    return DataSet(request.copies, photos, _type_notes(column, label_type))


def _type_notes(column: str, label_type: Any) -> list[str]:
    """Returns a note if the labels are numbers or truth values without names."""
    if _has_names(label_type):
        return []
    return [
        f"note: column {column} holds {label_type.dtype} without names: the classes are named after its values; to "
        "name them, cast the column to ClassLabel and save the data set again"
    ]


def _has_names(label_type: Any) -> bool:
    """Returns whether labels are texts, or numbers with names."""
    return hasattr(label_type, "int2str") or "string" in getattr(label_type, "dtype", "")


def _refuse_vectors(source: Path, column: str, rows: Iterable[Any]) -> None:
    """Raises a UserError if the labels of each image are a vector with 0 or 1 for each class.

    Lists of class numbers differ in length, or hold each number at most once.
    """
    lengths: set[int] = set()
    has_repeated_value = False
    for row in rows:
        labels = row[column]
        if labels is None:
            continue
        if not isinstance(labels, list) or not all(label in (0, 1) for label in labels):
            return
        lengths.add(len(labels))
        has_repeated_value = has_repeated_value or len(set(labels)) < len(labels)

    if len(lengths) == 1 and has_repeated_value:
        raise UserError(
            f"column {column} of {source} holds a vector of {lengths.pop()} values 0 or 1 for each image",
            "a list of the numbers or names of the classes that an image shows",
            f"replace the vectors: data.map(lambda row: {{'{column}': [NAMES[k] for k, value in "
            f"enumerate(row['{column}']) if value]}}), and save the data set again",
        )


def _load_split(source: Path, split: str) -> Any:
    load = require_module("datasets.load")
    is_saved_to_disk = (source / "state.json").exists() or (source / "dataset_dict.json").exists()
    if is_saved_to_disk:
        data = load.load_from_disk(str(source))
    else:
        _refuse_other_places(source)
        data = load.load_dataset(str(source))

    if not isinstance(data, dict):  # a single split
        return data
    return data["validation" if split == "val" and "validation" in data else split]


def _refuse_other_places(source: Path) -> None:
    """Raises ValueError if the description of a data set names files outside of its folder, which would be loaded."""
    for description in _descriptions(source):
        for place in _places(description):
            if place.startswith(("/", "~")) or "://" in place or "::" in place or ".." in Path(place).parts:
                raise ValueError(f"its description names {place!r}, which is outside of the data set")


def _descriptions(source: Path) -> list[Any]:
    """Returns the content of the files that may describe a data set, as YAML.

    Raises:
        ValueError: A file is not valid YAML.
    """
    yaml = require_module("yaml")
    descriptions: list[Any] = []
    for name in ("README.md", ".huggingface.yaml"):
        text = (source / name).read_text(encoding="utf-8") if (source / name).exists() else ""
        if name == "README.md":  # YAML between two lines of dashes, then text
            text = text.split("---", 2)[1] if text.startswith("---") else ""
        try:
            descriptions.append(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(f"{name} is not valid YAML: {error}") from None
    return descriptions


def _places(description: Any) -> Iterator[str]:
    """Yields the paths and URLs of files and folders that a description names. Its content may be of any type."""
    configs = description.get("configs") if isinstance(description, dict) else None
    if not isinstance(configs, list):
        return
    for config in configs:
        if isinstance(config, dict):
            yield from _texts([config.get("data_files"), config.get("data_dir")], set())


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yields the texts in nested lists and dictionaries, which may contain each other several times."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item, seen)


def _tags(cell: Any, label_type: Any) -> list[str | None]:
    """Returns the class names of a cell: a label or a list of labels, which are numbers or texts.

    The name of a label None or -1, which is unknown, is None. An empty list means that there is none.

    Raises:
        ValueError: A label is neither a text, a number nor a truth value.
    """
    labels = cell if isinstance(cell, list) else [cell]
    return [None if label in (None, -1) else _name(label, label_type) for label in labels]


def _name(label: Any, label_type: Any) -> str:
    """Returns the name of a label. Numbers and truth values without names are their own names."""
    if isinstance(label, str):
        return label.strip()
    if hasattr(label_type, "int2str"):
        name: str = label_type.int2str(label)
        return name.strip()
    if isinstance(label, int):
        return str(label)
    raise ValueError(f"a label of type {type(label).__name__}, which is not the name or number of a class")


HUGGING_FACE = Format(
    read_hugging_face,
    "a folder that `load_from_disk` or `load_dataset` of the library `datasets` reads, with columns image and label or "
    "labels; the split val may be called validation",
)
