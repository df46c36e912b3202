"""Optional libraries that read and write the formats of other tools."""

import importlib
from typing import Any

from mcis.datasets.errors import UserError


def require_module(name: str) -> Any:
    """Imports a module of a library that the extra `formats` installs.

    Raises:
        UserError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        expected = f"`{library}` is required for this format"
        raise UserError(f"no library {library}", expected, "pip install '.[formats]' in the clone of mcis") from None
