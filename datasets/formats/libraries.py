"""Optional libraries: those of the formats of other tools, and others that an extra installs."""

import importlib
from typing import Any

from mcis.datasets.errors import UserError


def require_module(name: str, extra: str = "formats") -> Any:
    """Imports a module of an optional library.

    Args:
        name: Name of the module.
        extra: The extra that installs the library.

    Raises:
        UserError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        expected = f"`{library}`, which the extra `{extra}` installs"
        raise UserError(
            f"no library {library}", expected, f"pip install -c constraints.txt -e '.[{extra}]' in the clone of mcis"
        ) from None
