"""URIs of files and folders: detects credentials in them and removes credentials for display."""

import re
from urllib.parse import parse_qsl

from mcis.datasets.errors import UserError

SECRET = re.compile(r"(?i)pass(?!file)|pwd|token|secret|(api|access|account|shared)_?key|credential|signature|^sig$")
"""Matches names of parameters and variables that hold passwords, keys and tokens."""
_URI = re.compile(
    r"(?P<scheme>.*?)://"
    r"(?:(?P<user>[^@/?]*|[^@/?]*:(?!\d*/)[^?]*)@)?"  # a password may hold a slash; digits and a slash are a port
    r"(?P<place>[^?]*)(\?(?P<query>.*))?",
    re.DOTALL,
)


def is_remote(uri: str) -> bool:
    """Returns whether a text is a URI rather than a path."""
    return "://" in uri


def holds_credentials(uri: str) -> bool:
    """Returns whether a URI has a password before its host, or a parameter named like a password, key or signature."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        return False
    if ":" in (parts["user"] or ""):
        return True
    return any(SECRET.search(name) for name, _ in parse_qsl(parts["query"] or ""))


def credentials_refused(found: str) -> UserError:
    """Returns an error that names the place where credentials were found, without repeating them."""
    return UserError(
        f"a password, key, token or signature in {found}",
        "URIs without credentials, since URIs are written to files, tables and messages",
        "remove them and set environment variables instead, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    )


def without_credentials(uri: str) -> str:
    """Returns a URI without user, password and query, which may hold credentials. Paths are returned unchanged."""
    parts = _URI.fullmatch(uri)
    return f"{parts['scheme']}://{parts['place']}" if parts else uri
