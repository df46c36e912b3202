"""An image source: the entry of the registry `SOURCES` that the project or another package defines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mcis.datasets.index import Listing
from mcis.datasets.section import Section


@dataclass(frozen=True, kw_only=True)
class Source:
    """An image source. The option `--<name>`, `mcis index <name>` and the section `data.<name>` derive from it.

    Attributes:
        lister: Function that reads lists and names and opens no image. Its arguments are the fields of `record` and the
            keys of `data_keys`. Unless the source defines classes, it also takes the class names as `names`.
        location: Name of the lister's first argument, the path of the images.
        location_kind: Whether the location is a folder of this machine, or a file, which may be a URI.
        several: Whether there may be several locations. The argument is then a tuple of them.
        help: Description of the location, for messages and the command line.
        example: Arguments of `mcis index` that index such a source.
        record: Section of the configuration, `data.<name>`. None: all arguments are in `data_keys`.
        data_keys: Arguments of the lister that are fields of the section `data` -> name of that field.
        domain: Domain of the images, as in INDEX_SCHEMA.
        defines_classes: Whether the source defines class names. A run has at most one such source.
        curated: Whether every file should be an image, and every class should have a training image.
        recipe: Recipe of runs whose classes this source defines, if none is set.
    """

    lister: Callable[..., Listing]
    location: str
    help: str
    example: str
    location_kind: Literal["DIR", "FILE"] = "DIR"
    several: bool = False
    record: type[Section] | None = None
    data_keys: Mapping[str, str] = field(default_factory=dict)
    domain: Literal["target", "source", "web"] = "target"
    defines_classes: bool = False
    curated: bool = False
    recipe: str = "paper"

    def keys(self, name: str) -> dict[str, str]:
        """Returns the lister's arguments, except `names` -> the configuration keys that set them.

        Args:
            name: Name of the source in the registry.
        """
        record_fields: Sequence[str] = tuple(self.record.model_fields) if self.record else ()
        keys = {argument: f"data.{key}" for argument, key in self.data_keys.items()}
        keys |= {argument: f"data.{name}.{argument}" for argument in record_fields}
        return keys
