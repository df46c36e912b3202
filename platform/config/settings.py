"""Data settings: the image sources of a run, joined by +, such as voc+single."""

import difflib

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.platform.config.sections import Config
from mcis.platform.config.training import ClassifierConfig

_WITH_CLASSES = tuple(name for name, source in SOURCES.items() if source.names_classes)
SETTINGS = (*_WITH_CLASSES, *(f"{_WITH_CLASSES[0]}+{name}" for name in SOURCES if name not in _WITH_CLASSES))
"""The usual ones; any sources that go together make one."""


def sources_of(setting: str) -> tuple[str, ...]:
    """The image sources of a setting: its parts between +, the one that names the classes first.

    Raises:
        UserError: an unknown source, one twice, or two that each have classes of their own.
    """
    names = tuple(setting.split("+"))
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        nearest = difflib.get_close_matches(setting, SETTINGS, 1) or difflib.get_close_matches(unknown[0], SOURCES, 1)
        hint = f"did you mean {nearest[0]}?" if nearest else "choose one of them"
        raise UserError(
            f"unknown setting {setting!r}", f"{', '.join(SETTINGS)}, or other sources ({', '.join(SOURCES)}) by +", hint
        )
    if len(set(names)) < len(names) or len(set(names).intersection(_WITH_CLASSES)) > 1:
        raise UserError(
            f"setting {setting!r}",
            f"each source once, and one of {', '.join(_WITH_CLASSES)} at most, since each has classes of its own",
            "run them one by one, or write one table for the source tags",
        )
    return tuple(sorted(names, key=[*_WITH_CLASSES, *SOURCES].index))


def setting_values(setting: str) -> Config:
    """What a setting changes: single-label images beside others are another domain, with affinities of its own."""
    sources = sources_of(setting)
    several_domains = len(sources) > 1 and any(SOURCES[source].domain == "source" for source in sources)
    return Config(classifier=ClassifierConfig(kinds=3)) if several_domains else Config()


def default_recipe(setting: str) -> str:
    """The recipe of a setting that is given none, by the source that names its classes."""
    return SOURCES[sources_of(setting)[0]].recipe
