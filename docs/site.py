"""The reference of the site that `make docs` makes: pages of all commands and configuration keys, from the code."""

import inspect
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from mcis.platform.cli import app
from mcis.platform.config.keys import leaves, meanings
from mcis.platform.config.recipes import RECIPES
from mcis.platform.config.sections import Config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to those of docs/."""
    for name, text in (("commands", commands()), ("configuration", configuration())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


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
