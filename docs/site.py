"""Pages of the site that are no files of docs/: all commands, all configuration keys, and the architecture."""

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mcis.platform.cli import app
from mcis.platform.config.keys import leaves, meanings
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import Config

ARCHITECTURE = "explanation/architecture.md"
"""Path of the architecture's page in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to those of docs/."""
    pages = {
        "reference/commands.md": commands(),
        "reference/configuration.md": configuration(),
        ARCHITECTURE: architecture(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points links to ARCHITECTURE.md, which is outside of docs/, to its page of the site."""
    target = posixpath.relpath(ARCHITECTURE, posixpath.dirname(page.file.src_uri))
    return re.sub(r"\]\((\.\./)+ARCHITECTURE\.md", f"]({target}", markdown)


def architecture() -> str:
    """ARCHITECTURE.md, with links relative to the folder of its page."""
    file = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
    return file.read_text().replace("](docs/", "](../")


def commands() -> str:
    """Each command's help, arguments and options."""
    out = ["# Commands\n"]

    def add(command: Any, path: str) -> None:
        if subcommands := getattr(command, "commands", None):
            for name, each in subcommands.items():
                add(each, f"{path} {name}")
            return
        out.append(f"## {path}\n\n{command.help or ''}\n")
        rows = []
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            name = ", ".join(parameter.opts) if is_option else (parameter.metavar or parameter.name.upper())
            rows.append(f"| `{_cell(name)}` | {_cell(getattr(parameter, 'help', None) or '')} |")
        if rows:
            out.append("\n".join(["| option | |", "| --- | --- |", *rows]) + "\n")
        if command.epilog:
            out.append(f"{command.epilog}\n")

    add(typer.main.get_command(app), "mcis")
    return "\n".join(out)


def configuration() -> str:
    """Each key with its default and its meaning, and the recipes."""
    out = [
        "# Configuration\n",
        "`mcis config show SETTING --recipe RECIPE` shows each value of a run, and where it comes from.\n",
        "## Recipes\n",
    ]
    out += [f"### {name}\n\n{inspect.getdoc(make)}\n" for name, make in RECIPES.items()]
    config, section = Config(), None
    about = meanings(config)
    for key, value in leaves(config):
        name = key.split(".")[0] if "." in key else "run"
        if name != section:
            section = name
            out.append(f"\n## {name}\n\n| key | default | meaning |\n| --- | --- | --- |")
        out.append(f"| `{key}` | `{_cell(value)}` | {_cell(about[key])} |")
    return "\n".join(out)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
