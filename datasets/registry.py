"""Extension points: tables of what a name in a configuration stands for, which other packages add to by entry points.

A kind of extension is one table: the entries of the project, and behind them those that installed packages declare as
entry points of the group `mcis.<kind>`, as `birds = "my_package.birds:Birds"` under
`[project.entry-points."mcis.sources"]`. Choices of the configuration, the command line, checks and help derive from it.
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
    """What the names of a kind of extension stand for, those of the project first.

    Args:
        kind: in the plural, as `sources`: the entry points' group is `mcis.sources`.
        entries: the project's own; a text as `mcis.models.crf:dense_crf` is imported when it is first asked for.

    Raises:
        UserError: a package declares a name that is taken.
    """

    def __init__(self, kind: str, entries: Mapping[str, _T | str]):
        self.kind = kind
        group = f"mcis.{kind}"
        self.data: dict[str, Any] = {
            name: importlib.metadata.EntryPoint(name, entry, group) if isinstance(entry, str) else entry
            for name, entry in entries.items()
        }
        self._packages: dict[str, str] = {}
        for point in importlib.metadata.entry_points(group=group):
            # Made anew: where the package importlib_metadata was imported, points are of its class.
            made = importlib.metadata.EntryPoint(point.name, point.value, group)
            package = self._packages[point.name] = point.dist.name if point.dist else point.value
            if point.name in entries or self.data.setdefault(point.name, made) != made:
                raise UserError(
                    f"{package} adds {point.name!r} to the {kind} of mcis, which have one already",
                    "a name of its own for each",
                    "rename its entry point, or remove the package",
                )

    def __getitem__(self, name: str) -> _T:
        """What a name stands for; an entry of another package is imported when it is first asked for. KeyError for an
        unknown name, UserError where the entry's package cannot be imported."""
        entry = self.data[name]
        if isinstance(entry, importlib.metadata.EntryPoint):
            try:
                entry = self.data[name] = entry.load()
            except Exception as error:  # it is another's code, which may raise anything
                raise UserError(
                    f"{name} of the {self.kind} cannot be loaded from {entry.value} ({type(error).__name__}: {error})",
                    f"an entry point of mcis.{self.kind} that can be imported",
                    f"correct or remove the package {self._packages.get(name, entry.value)}",
                ) from error
        found: _T = entry
        return found

    def choice(self, *more: str) -> Callable[[str], str]:
        """A validator of pydantic for a key whose values are the names of this table, and `more`."""

        def check(name: str) -> str:
            if name in more or name in self:
                return name
            names = [*self, *more]
            near = difflib.get_close_matches(name, names, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            text = f"Input should be one of {', '.join(names)}{meant}"
            raise PydanticCustomError("unknown_name", "{text}", {"text": text})

        return check
