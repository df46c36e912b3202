"""Messages of functions -> messages of a run: arguments that a text names in backquotes become configuration keys.

`datasets` and `models` know their arguments and no configuration: their errors and notes say "name it by `classes`" or
"`tags=COLUMN`". Whoever calls them for a run knows which key or flag an argument was taken from.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

from mcis.datasets.errors import UserError

_ARGUMENT = re.compile(r"`(\w+)(=[^`]*)?`")


def name_keys(text: str, keys: Mapping[str, str]) -> str:
    """Replaces the arguments in a text: `classes` by its key, `classes=FILE` by `--set KEY=FILE`.

    Args:
        keys: argument -> dotted key or flag; an argument without one stays as it is.
    """

    def named(match: re.Match[str]) -> str:
        argument, value = match.groups()
        if argument not in keys:
            return match[0]
        return f"--set {keys[argument]}{value}" if value else keys[argument]

    return _ARGUMENT.sub(named, text)


def error_with_keys(error: UserError, keys: Mapping[str, str]) -> UserError:
    """The same error with `name_keys` applied to its texts."""
    return UserError(*(name_keys(text, keys) for text in (error.found, error.expected, error.remedy)))


@contextlib.contextmanager
def errors_name_keys(keys: Mapping[str, str]) -> Iterator[None]:
    """Inside, a UserError names configuration keys or flags in place of the arguments of the function that raised it.

    Raises:
        UserError: as raised inside, with `name_keys` applied to its texts.
    """
    try:
        yield
    except UserError as error:
        raise error_with_keys(error, keys) from None
