"""Extension points: the project's own entries, those of installed packages, and names that are none."""

from pathlib import Path
from typing import Any

import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.registry import Registry


def install(folder: Path, declared: str) -> None:
    """A package `birds` with a module and entry points, laid out as pip leaves it."""
    (folder / "birds.py").write_text("class Birds:\n    legs = 2\n")
    about = folder / "birds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[mcis.animals]\n{declared}\n")


def test_entries_of_packages_stand_behind_the_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "birds = birds:Birds\nbroken = birds:Absent")
    animals = Registry[Any]("animals", {"cat": 4})
    assert list(animals) == ["cat", "birds", "broken"]
    assert len(animals) == 3
    assert animals.find("cat", "animal") == 4
    assert animals.find("birds", "animal").legs == 2
    with pytest.raises(UserError, match="broken of the animals cannot be loaded") as caught:
        animals.find("broken", "animal")
    assert caught.value.remedy == "correct or remove the package birds"


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(UserError) as caught:
        Registry("animals", {"cat": 4, "sheep": 4}).find("sheeep", "animal")
    assert caught.value.found == "animal is 'sheeep'"
    assert caught.value.expected == "one of cat, sheep"
    assert caught.value.remedy == "set animal=sheep"


def test_a_package_may_not_take_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "cat = birds:Birds")
    with pytest.raises(UserError, match="birds adds 'cat' to the animals"):
        Registry("animals", {"cat": 4})
