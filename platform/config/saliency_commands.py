"""The commands that make the saliency maps of a run's image sources, for messages."""

import json
import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mcis.datasets.sources import SOURCES
from mcis.datasets.sources.source import Source
from mcis.platform.config.keys import leaves, value_of
from mcis.platform.config.sections import Config, sources_of


def saliency_commands(config: Config, domains: Collection[str]) -> list[str]:
    """Returns the command for each source of a run that reads saliency maps and has images of the domains."""
    commands = []
    for name in sources_of(config.sources):
        source = SOURCES[name]
        if "saliency" in source.keys(name) and source.domain in domains:
            commands.append(_command(config, name, source))
    return commands


def _command(config: Config, name: str, source: Source) -> str:
    keys = source.keys(name)
    value = value_of(config, keys[source.location])
    locations = list(value) if isinstance(value, tuple) else [str(value)]
    words = ["mcis", "saliency", *([] if source.location_kind == "FILE" else [name]), locations[0]]
    words += ["--out", _folder_of_maps(config, name, source, locations[0])]
    if len(locations) > 1:
        words.append(f"{keys[source.location]}={json.dumps(locations)}")

    defaults = dict(leaves(Config()))
    for argument, key in keys.items():
        value = value_of(config, key)
        if argument not in (source.location, "saliency") and value != defaults[key]:
            words.append(f"{key}={_text(value)}")
    return shlex.join(words)


def _folder_of_maps(config: Config, name: str, source: Source, location: str) -> str:
    """Returns where a run looks for the maps, or a folder that a run can be given."""
    if name == "voc":
        return os.path.join(location, config.data.saliency or "SaliencyMaps")
    if source.location_kind == "FILE":
        return os.path.join(os.path.dirname(location), "saliency")
    return f"{name}-saliency"


def _text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value)
