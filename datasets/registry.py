"""Registries: tables from names in the configuration to implementations, extensible by entry points.

A kind of extension is one registry. It holds the entries of this project and those that installed packages declare as
entry points of the group `mcis.<kind>`, for example `birds = "my_package.birds:Birds"` in the section
`[project.entry-points."mcis.sources"]` of their pyproject.toml. The choices of the configuration, the options of the
command line, checks and help texts are derived from it.
"""

import difflib
import importlib.metadata
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from mcis.datasets.errors import UserError

_T = TypeVar("_T")


class Registry(UserDict[str, _T]):
    """Maps names to the extensions of one kind, those of this project first.

    Args:
        kind: Plural name of the kind, for example `sources`. The group of entry points is then `mcis.sources`.
        entries: Entries of this project. A text like `mcis.models.crf:dense_crf` is imported on first access.

    Raises:
        UserError: An installed package declares a name that is taken.
    """

    def __init__(self, kind: str, entries: Mapping[str, _T | str]):
        self.kind = kind
        group = f"mcis.{kind}"
        self.data: dict[str, Any] = {}
        for name, entry in entries.items():
            if isinstance(entry, str):
                self.data[name] = importlib.metadata.EntryPoint(name, entry, group)
            else:
                self.data[name] = entry

        self._packages: dict[str, str] = {}
        for point in importlib.metadata.entry_points(group=group):
            # If the package importlib_metadata is imported, entry points are of its class. Convert them.
            entry_point = importlib.metadata.EntryPoint(point.name, point.value, group)
            package = point.dist.name if point.dist else point.value
            self._packages[point.name] = package
            # The same entry point may be listed twice, for example if a package is installed in two places.
            if point.name in entries or self.data.get(point.name, entry_point) != entry_point:
                raise UserError(
                    f"{package} adds {point.name!r} to the {kind} of mcis, but this name is taken",
                    "a unique name",
                    "rename its entry point, or remove the package",
                )
            self.data[point.name] = entry_point

    def __getitem__(self, name: str) -> _T:
        """Returns the extension of a name. Entry points are imported on first access.

        Raises:
            KeyError: The name is unknown.
            UserError: The package of the entry cannot be imported.
        """
        entry = self.data[name]
        if isinstance(entry, importlib.metadata.EntryPoint):
            try:
                entry = entry.load()
            except Exception as error:  # code of another package may raise anything
                raise UserError(
                    f"{name} of the {self.kind} cannot be loaded from {entry.value} ({type(error).__name__}: {error})",
                    f"an entry point of mcis.{self.kind} that can be imported",
                    f"correct or remove the package {self._packages.get(name, entry.value)}",
                ) from error
            self.data[name] = entry
        extension: _T = entry
        return extension

    def choice(self, *more: str) -> Callable[[str], str]:
        """Returns a pydantic validator for a key whose values are the names of this registry, and `more`."""

        def check(name: str) -> str:
            if name in more or name in self:
                return name
            names = [*self, *more]
            matches = difflib.get_close_matches(name, names, 1)
            suggestion = f"; did you mean {matches[0]}?" if matches else ""
            text = f"Input should be one of {', '.join(names)}{suggestion}"
            raise PydanticCustomError("unknown_name", "{text}", {"text": text})

        return check
