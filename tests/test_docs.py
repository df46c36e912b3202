"""Tests of the documentation: links, files, commands, configuration keys and code blocks are valid."""

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mcis.datasets.formats.detections import draw_detections, read_detections
from mcis.models.pseudo_masks import TaggedMaps
from mcis.platform.cli import app
from mcis.platform.config.keys import leaves
from mcis.platform.config.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
LEFT = ("docs/explanation/paper-vs-code.md",)
"""Pages that describe other programs."""


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


def commands_in_blocks(page: Path) -> list[str]:
    """Returns the commands of mcis in the code blocks of a page, one line each."""
    text = page.read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("mcis ")]


def commands_in_text(page: Path) -> list[str]:
    """Returns the commands of mcis that the sentences and tables of a page name, which may lack arguments."""
    return re.findall(r"`(mcis [^`]+)`", page.read_text())


def parse(words: list[str]) -> None:
    """Parses the words after `mcis` as the command line does, without running anything.

    Raises:
        TyperException: There is no such command or option, an argument is missing, or a value has the wrong type.
    """
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        _, command, words = command.resolve_command(typer.Context(command), words)
    with contextlib.suppress(typer.Exit):  # --help and --version
        command.make_context("mcis", list(words))


INCOMPLETE = re.compile("^Missing |requires an argument")
"""Message about a command without a required argument or value. Sentences of the docs name commands like this."""


@pages
def test_commands_parse(page: Path) -> None:
    in_blocks = commands_in_blocks(page)
    wrong = []
    for command in in_blocks + commands_in_text(page):
        words = [word for word in shlex.split(command, comments=True)[1:] if word != "..."]
        try:
            parse(words)
        except TyperException as error:
            message = error.format_message()
            if command in in_blocks or not INCOMPLETE.search(message):
                wrong.append(f"{command}: {message}")
    assert not wrong


def test_pages_have_commands() -> None:
    assert sum(len(commands_in_blocks(page)) for page in PAGES) > 30


@pytest.mark.parametrize("words", ["predicted", "run --name mine --no-such-option", "run", "study run --seeds many"])
def test_a_wrong_command_does_not_parse(words: str) -> None:
    with pytest.raises(TyperException):
        parse(words.split())


def program_texts() -> list[str]:
    """Returns the strings of the program, with … instead of the values in f-strings."""
    texts = [(ROOT / "Makefile").read_text()]
    for folder in ("datasets", "models", "platform", "tuning"):
        for module in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def test_messages_of_the_troubleshooting_page_exist() -> None:
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", (ROOT / "docs/howto/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall("`([^`]+)`", row)]
    texts = program_texts()
    assert len(messages) > 50

    absent = []
    for message in messages:
        fragments = [re.escape(fragment.strip(" .")) for fragment in message.split("…")]
        pattern = re.compile(".*".join(fragments), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            absent.append(message)
    assert not absent


FILES = (".py", ".md", ".pt", ".toml", ".json", ".yaml", ".html")


def test_configuration_keys_exist() -> None:
    keys = {key for make in RECIPES.values() for key, _ in leaves(make())}
    sections = {".".join(key.split(".")[:n]) for key in keys for n in range(1, key.count(".") + 1)}
    for page in PAGES:
        if page.relative_to(ROOT).as_posix() in LEFT:
            continue
        in_commands = [
            re.match(r"([a-z_]+\.[a-z_.]+)=", word) for command in commands_in_blocks(page) for word in command.split()
        ]
        names = [match[1] for match in in_commands if match]
        names += re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text())
        for name in names:
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
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    scores = np.array([[[0.5, 0.2, 0.05, 0.3]], [[0.4, 0.1, 0.10, 0.31]]], np.float32)
    maps = TaggedMaps(scores, np.array([4, 9]), lambda: np.zeros((1, 4, 3), np.uint8))
    labels, mask = namespace["THRESHOLDS"](maps, {"threshold": 0.3, "background_threshold": 0.1, "score_floor": 0.3})

    assert labels.tolist() == [[5, 0, 0, 10]]
    assert mask.tolist() == [[5, 255, 0, 10]]


class PromptedModel:
    """Stands for SAM 3 and its processor, which cannot run here: finds the left half of each image."""

    device = "cpu"

    @classmethod
    def from_pretrained(cls, name: str) -> "PromptedModel":
        return cls()

    def to(self, device: str) -> "PromptedModel":
        return self

    def eval(self) -> "PromptedModel":
        return self

    def __call__(self, **inputs: Any) -> Any:
        return SimpleNamespace(to=lambda device: {"prompt": inputs["text"]}) if "text" in inputs else inputs

    def post_process_instance_segmentation(self, outputs: Any, **options: Any) -> list[dict[str, Any]]:
        ((height, width),) = options["target_sizes"]
        mask = torch.arange(width).expand(height, width) < width // 2
        return [{"masks": mask[None], "scores": torch.tensor([0.75])}]


def test_the_script_for_sam_3_writes_detections_that_the_rule_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg")
    (tmp_path / "photos.csv").write_text("image,tags\na.jpg,cat;dog\na.jpg,none\n")
    monkeypatch.chdir(tmp_path)
    models = SimpleNamespace(Sam3Model=PromptedModel, Sam3Processor=PromptedModel)
    monkeypatch.setitem(sys.modules, "transformers", models)
    script, _ = [block for name, block in blocks("python") if name == "foundation-models.md"]
    exec(script, {})

    detections = read_detections(tmp_path / "detections.json", ("cat", "dog")).by_image["a.jpg"]
    assert [(detection.label, detection.score) for detection in detections] == [(0, 0.75), (1, 0.75)]
    labels, _ = draw_detections(detections[:1], 4, 6)
    assert labels.tolist() == [[1, 1, 1, 0, 0, 0]] * 4


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    reference = (tmp_path / "reference" / "configuration.html").read_text()
    assert "classifier.optimizer.learning_rate" in reference
    assert "ImageSets/Segmentation/&lt;list&gt;.txt" in reference
    assert "mcis study search [OPTIONS]" in (tmp_path / "reference" / "commands.html").read_text()
