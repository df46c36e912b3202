"""Tests of registries: entries of the project and of installed packages, and unknown names."""

import collections
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import AfterValidator, ValidationError

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry
from mcis.datasets.section import Section, with_records


def install(folder: Path, declared: str) -> None:
    """Writes a package `birds` with a module and entry points, as pip would install it."""
    (folder / "birds.py").write_text("class Birds:\n    legs = 2\n")
    about = folder / "birds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[mcis.animals]\n{declared}\n")


@pytest.mark.parametrize("finder", ["importlib.metadata", "importlib_metadata"])
def test_entries_of_packages_follow_those_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: str
) -> None:
    """Works with Python's finder of entry points and with that of the package importlib_metadata."""
    importlib.import_module(finder)
    monkeypatch.delitem(sys.modules, "birds", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "birds = birds:Birds\nbroken = birds:Absent")
    animals = Registry[Any]("animals", {"late": "collections:Counter", "cat": 4})

    assert list(animals) == ["late", "cat", "birds", "broken"]
    assert len(animals) == 4
    assert animals["late"] is collections.Counter, "a text is imported on first access"
    assert animals["cat"] == 4
    assert animals["birds"].legs == 2
    with pytest.raises(UserError, match="broken of the animals cannot be loaded") as caught:
        animals["broken"]
    assert caught.value.remedy == "correct or remove the package birds"


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "cat = birds:Birds")
    with pytest.raises(UserError, match="birds adds 'cat' to the animals"):
        Registry("animals", {"cat": 4})


def test_a_choice_accepts_only_registered_names() -> None:
    class Choices(Section):
        animal: Annotated[str, AfterValidator(Registry("animals", {"cat": 4, "sheep": 4}).choice("none"))] = "none"

    assert Choices(animal="cat").animal == "cat"
    with pytest.raises(ValidationError, match=r"one of cat, sheep, none; did you mean sheep\?"):
        Choices(animal="sheeep")


def test_a_section_gets_the_records_of_extensions() -> None:
    class Fur(Section):
        """Fur of an animal."""

        length: int = 3

    class Animal(NamedTuple):
        record: type[Section] | None = None

    @with_records({"cat": Animal(Fur), "snake": Animal()})
    class Animals(Section):
        number: int = 1

    assert Animals.model_validate({"cat": {"length": 5}}).model_dump() == {"number": 1, "cat": {"length": 5}}
    with pytest.raises(ValidationError, match="snake"):
        Animals.model_validate({"snake": {}})
