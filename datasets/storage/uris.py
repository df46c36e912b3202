"""URIs of files and folders: which hold credentials, and what of them may be shown."""

import re
from urllib.parse import parse_qsl

from mcis.datasets.errors import UserError

SECRET = re.compile(r"(?i)pass(?!file)|pwd|token|secret|(api|access|account|shared)_?key|credential|signature|^sig$")
"""What is found in the names of parameters and variables that hold passwords, keys and tokens."""
_URI = re.compile(
    r"(?P<scheme>.*?)://"
    r"(?:(?P<user>[^@/?]*|[^@/?]*:(?!\d*/)[^?]*)@)?"  # a password may hold a slash; digits and one are a port
    r"(?P<place>[^?]*)(\?(?P<query>.*))?",
    re.DOTALL,
)


def is_remote(uri: str) -> bool:
    """Whether it is a URI rather than a path."""
    return "://" in uri


def holds_credentials(uri: str) -> bool:
    """Whether a URI has a password before its host, or a parameter that is called like a password, key or signature."""
    parts = _URI.fullmatch(uri)
    if parts is None:
        return False
    return ":" in (parts["user"] or "") or any(SECRET.search(name) for name, _ in parse_qsl(parts["query"] or ""))


def credentials_refused(found: str) -> UserError:
    """The error that says where credentials were found, and does not repeat them."""
    return UserError(
        f"a password, key, token or signature in {found}",
        "URIs without them, as they are written into files, tables and messages",
        "leave them out: file systems find them in the environment, such as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY",
    )


def without_credentials(uri: str) -> str:
    """A URI without user, password and query, which may hold them; a path as it is."""
    parts = _URI.fullmatch(uri)
    return f"{parts['scheme']}://{parts['place']}" if parts else uri
