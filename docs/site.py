"""Pages of the site that are no files of docs/: all commands, all configuration keys, and the architecture."""

import inspect
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
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
_PAPER_VS_CODE = "docs/explanation/paper-vs-code.md"
"""Page that docstrings name without its folder."""


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
    """Renders a section per command: description, usage, arguments, options and examples."""
    out = [
        "# Commands\n",
        "Every command of `mcis`. `mcis COMMAND --help` prints the same on the terminal. `KEY=VALUE` sets a value of "
        "the [configuration](configuration.md).\n",
    ]
    for path, command in _commands(typer.main.get_command(app), "mcis"):
        out.append(_command_section(path, command))
    return "\n".join(out)


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the commands of a group and of its groups, each with the words that call it."""
    subcommands = getattr(command, "commands", None)
    if not subcommands:
        yield path, command
        return
    for name, subcommand in subcommands.items():
        yield from _commands(subcommand, f"{path} {name}")


def _command_section(path: str, command: Any) -> str:
    """Renders the section of a command."""
    usage = command.get_usage(typer.Context(command, info_name=path)).removeprefix("Usage:").strip()
    parts = [f"## {path}", _escape(command.help or ""), f"```text\n{usage}\n```"]

    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if arguments:
        rows = [(f"`{_argument_name(argument)}`", _cell(argument.help or "")) for argument in arguments]
        parts.append(_table(("argument", "meaning"), rows))

    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    if options:
        rows = [(_option_names(option), _default(option), _cell(option.help or "")) for option in options]
        parts.append(_table(("option", "default", "meaning"), rows))

    examples = re.findall(r"`([^`]+)`", command.epilog or "")
    if examples:
        parts.append("\n".join(["```sh", *(_with_program(example) for example in examples), "```"]))
    return "\n\n".join(parts) + "\n"


def _argument_name(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _option_names(option: Any) -> str:
    """The spellings of an option, with the name of its value if it has one."""
    names = ", ".join(f"`{name}`" for name in option.opts)
    return f"{names} `{option.metavar}`" if option.metavar else names


def _default(option: Any) -> str:
    """The default of an option in the table, or `required`."""
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return _cell(option.show_default)
    if option.default is None or isinstance(option.default, bool):
        return ""
    environment = f" or `${option.envvar}`" if option.envvar else ""
    return f"`{option.default}`{environment}"


def _with_program(example: str) -> str:
    return example if example.startswith("mcis") else f"mcis {example}"


def configuration() -> str:
    """Renders the recipes and, per section, each key with its default and its meaning."""
    out = [
        "# Configuration\n",
        "Set any of these keys with `KEY=VALUE` on the command line, or in a file for `--config`. A recipe replaces "
        "some of the defaults: `mcis config show` prints the value of each key in a run and where it comes from. "
        "[Recipes](recipes.md) compares the recipes.\n",
    ]
    config = Config()
    about = meanings(config)
    section = None
    for key, value in leaves(config):
        name = key.split(".")[0] if "." in key else "run"
        if name != section:
            section = name
            purpose = inspect.getdoc(type(getattr(config, name))) if name != "run" else "Keys of the whole run."
            out.append(f"\n## {name}\n\n{_escape(purpose or '')}\n")
            out.append("| key | default | meaning |\n| --- | --- | --- |")
        out.append(f"| `{key}` | {_value(value)} | {_cell(about[key])} |")

    out.append("\n## Recipes\n")
    out += [f"### {name}\n\n{_escape(inspect.getdoc(make) or '')}\n" for name, make in RECIPES.items()]
    return "\n".join(out)


def _value(value: object) -> str:
    """A default in the table, written as on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """A text as the cell of a table."""
    return _escape(" ".join(text.split()))


def _escape(text: str) -> str:
    """Escapes `<`, `*` and `|` outside of code spans, and links the pages that docstrings name."""
    spans = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(spans), 2):
        span = spans[i].replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")
        span = re.sub(r"docs/(?:\w+/)*([\w-]+)\.md", lambda page: _link(page[1], page[0]), span)
        spans[i] = re.sub(r"(?<![\w/\[])paper-vs-code", _link("paper-vs-code", _PAPER_VS_CODE), span)
    return "".join(spans)


def _link(text: str, file: str) -> str:
    """A link from a page of the reference to a page in docs/."""
    return f"[{text}](../{file.removeprefix('docs/')})"
