"""What a source of images is: an entry of the table `SOURCES`, as its own file or another package writes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mcis.datasets.index import Listing
from mcis.datasets.section import Section


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of images; `--<name>`, `mcis index <name>` and the section `data.<name>` come of it.

    Attributes:
        lister: reads lists and names, opens no image. Its arguments are the fields of `record` and of `data_keys`; that
            of a source that does not name its classes takes their `names` as well.
        location: the lister's first argument, where the images are.
        location_kind: what the location is: a folder of this machine, or a file, which may be a URI.
        help: what that argument has to be, for messages and the command line.
        example: of a command that indexes it, without `mcis index`.
        record: its section of the configuration, `data.<name>`; None = all its values are those of `data` itself.
        data_keys: arguments that are fields of the section `data` itself, and these.
        domain: of its images, as in INDEX_SCHEMA.
        defines_classes: it brings class names of its own, so a run has at most one such source.
        curated: every file is expected to be an image, and every class to have a training image.
        recipe: of a setting that names its classes by it, where none is given.
    """

    lister: Callable[..., Listing]
    location: str
    help: str
    example: str
    location_kind: Literal["DIR", "FILE"] = "DIR"
    record: type[Section] | None = None
    data_keys: Mapping[str, str] = field(default_factory=dict)
    domain: Literal["target", "source", "web"] = "target"
    defines_classes: bool = False
    curated: bool = False
    recipe: str = "paper"

    def keys(self, name: str) -> dict[str, str]:
        """The lister's arguments, `names` aside, and the keys of the configuration that give them."""
        fields: Sequence[str] = tuple(self.record.model_fields) if self.record else ()
        data_keys = {argument: f"data.{key}" for argument, key in self.data_keys.items()}
        return data_keys | {argument: f"data.{name}.{argument}" for argument in fields}
