"""Tests of the documentation: links, files, commands, configuration keys and code blocks are valid."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from mcis.models.pseudo_masks import TaggedMaps
from mcis.platform.cli import app
from mcis.platform.config.keys import leaves
from mcis.platform.config.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
LEFT = ("docs/notes/experiments.md", "docs/explanation/paper-vs-code.md")
"""Pages that describe earlier versions or other programs."""


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_links_are_valid(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_named_files_exist(page: Path) -> None:
    if page.relative_to(ROOT).as_posix() not in LEFT:
        named = re.findall(r"`((?:datasets|models|platform|tuning|tests|benchmarks|docs)/[\w/.-]+)`", page.read_text())
        absent = [name for name in named if not any((ROOT / base / name).exists() for base in ("", "tests"))]
        assert not absent


def commands() -> dict[str, set[str]]:
    """Returns the options of each command by its path, for example `index tags`."""
    found: dict[str, set[str]] = {}

    def add(command: object, path: str) -> None:
        for name, subcommand in getattr(command, "commands", {}).items():
            add(subcommand, f"{path} {name}".strip())
        found[path] = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}

    add(typer.main.get_command(app), "")
    return found


def test_commands_and_options_exist() -> None:
    options = commands()
    checked = 0
    for page in PAGES:
        text = re.sub(r"\\\n\s+", " ", page.read_text())
        for words in re.findall(r"(?:^    |`)mcis ((?:[a-z-]+ ?)+)(.*?)(?:`|  +#|$)", text, re.MULTILINE):
            path = words[0].split()
            while path and " ".join(path) not in options:
                path.pop()
            assert path, f"{page.name}: mcis {words[0]}"
            if path == ["submit"]:
                continue
            for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", words[1]):
                assert option in options[" ".join(path)] | {"--help", "--install-completion"}, f"{page.name}: {words}"
            checked += 1

    assert checked > 40


FILES = (".py", ".md", ".pt", ".toml", ".json", ".yaml", ".html")


def test_configuration_keys_exist() -> None:
    keys = {key for make in RECIPES.values() for key, _ in leaves(make())}
    sections = {".".join(key.split(".")[:n]) for key in keys for n in range(1, key.count(".") + 1)}
    for page in PAGES:
        if page.relative_to(ROOT).as_posix() in LEFT:
            continue
        for key in re.findall(r"--set ['\"]?([a-z_.]+)=|`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text()):
            name = key[0] or key[1]
            if name.split(".")[0] in sections and not name.endswith(FILES):
                assert name in keys | sections, f"{page.name}: {name}"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
            yield page.name, block


def test_code_blocks_are_valid() -> None:
    for name, block in blocks("python"):
        compile(block, name, "exec")
    for _, block in blocks("toml"):
        tomllib.loads(block)


def test_the_example_rule_of_the_extension_page_works() -> None:
    (block,) = [block for name, block in blocks("python") if name == "extend.md"]
    made: dict[str, Any] = {}
    exec(block, made)
    scores = np.array([[[0.5, 0.2, 0.05, 0.3]], [[0.4, 0.1, 0.10, 0.31]]], np.float32)
    maps = TaggedMaps(scores, np.array([4, 9]), lambda: np.zeros((1, 4, 3), np.uint8))
    labels, mask = made["THRESHOLDS"](maps, {"threshold": 0.3, "background_threshold": 0.1, "score_floor": 0.3})

    assert labels.tolist() == [[5, 0, 0, 10]]
    assert mask.tolist() == [[5, 255, 0, 10]]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    reference = (tmp_path / "reference" / "configuration.html").read_text()
    assert "classifier.optimizer.learning_rate" in reference
    assert "mcis study search" in (tmp_path / "reference" / "commands.html").read_text()
