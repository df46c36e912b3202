"""Converts the errors of MLflow, its database and its server to a UserError with a text for each cause."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from mcis.datasets.errors import UserError
from mcis.datasets.storage.uris import SECRET
from mcis.platform.runs.files import full_disk

_CREDENTIALS = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; for PostgreSQL set "
    "PGPASSWORD or write a ~/.pgpass"
)


class _Cause(NamedTuple):
    """A cause of errors, and the texts of its UserError.

    Attributes:
        pattern: Matches a part of the message of MLflow, SQLAlchemy or the system.
        found: The cause; `{0}` is replaced by the first group of the pattern.
    """

    pattern: str
    found: str
    expected: str
    remedy: str


_CAUSES = (
    _Cause(
        r"out-of-date database schema|Can't locate revision",
        "another version of MLflow created it",
        "a store of the installed MLflow (`mcis doctor` prints its version)",
        "if that version is older: copy the store, then run `mlflow db upgrade` with its address; if it is newer: "
        "install that version, or set MLFLOW_TRACKING_URI to another store",
    ),
    _Cause(
        r"readonly database|read-only|[Rr]ead-only file system|unable to open database file|Errno 13|Errno 30",
        "it cannot be written",
        "a file and a folder that this user may write to",
        "give this user the permission, or set MLFLOW_TRACKING_URI to another store",
    ),
    _Cause(
        r"error code 401|UNAUTHENTICATED|password authentication failed|no password supplied|Access denied for user",
        "it asks for a user name and password, or refuses those of the environment",
        "credentials that the server accepts",
        _CREDENTIALS,
    ),
    _Cause(
        r"error code 403|PERMISSION_DENIED|permission denied for",
        "it does not permit this user to write runs",
        "a user with the permission to edit experiments",
        f"ask the administrator of the server for it, or {_CREDENTIALS}",
    ),
    _Cause(
        r"too many (5\d\d) error responses",
        "the server answers with the error {0}",
        "a server whose database and disk work",
        "read the log of the server, and repeat the command later",
    ),
    _Cause(
        r"\[SSL: (\w+)\]",
        "no secure connection to it: {0}",
        "a server with https and a trusted certificate",
        "correct http or https in MLFLOW_TRACKING_URI, or set MLFLOW_TRACKING_SERVER_CERT_PATH to the certificates "
        "of its authority",
    ),
    _Cause(
        r"Max retries exceeded|onnection refused|could not translate host|Name or service not known|timeout expired",
        "no server answers there",
        "a running MLflow server or database",
        "start the server, correct MLFLOW_TRACKING_URI, or unset it to use the workspace's own store",
    ),
    _Cause(
        r"error code (?:30\d|404)|valid JSON format",
        "the server there is not an MLflow server, or has another version",
        "the address of an MLflow tracking server",
        "correct MLFLOW_TRACKING_URI, or unset it to use the workspace's own store",
    ),
    _Cause(
        r"database is locked",
        "another program keeps it locked",
        "a database that is locked for seconds only",
        "end that program; if the workspace is on a network disk, set MLFLOW_TRACKING_URI to a server",
    ),
    _Cause(
        r"file is not a database|database disk image is malformed",
        "the file is damaged or not a SQLite database",
        "a SQLite database that MLflow created",
        "restore a copy of it, or move it away: the next run creates a new store",
    ),
    _Cause(
        r"No module named '([\w.]+)'",
        "its database needs the package {0}, which is not installed",
        "the client package of the database",
        "install it (for PostgreSQL: pip install psycopg2-binary), or correct MLFLOW_TRACKING_URI",
    ),
)


@contextlib.contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Converts every error of the block to a UserError that names the store and hides passwords and tokens.

    It catches all errors, because those of MLflow's stores have no common class.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _store_error(error, uri) from None


def _store_error(error: Exception, uri: str) -> UserError:
    full = full_disk(error, f"the disk of MLflow's store {uri}")
    if full:
        return full

    text = str(error)
    for name, value in os.environ.items():
        if value and SECRET.search(name):
            text = text.replace(value, "***")

    for cause in _CAUSES:
        match = re.search(cause.pattern, text)
        if match:
            found = cause.found.format(*match.groups())
            return UserError(f"MLflow's store {uri} cannot be used: {found}", cause.expected, cause.remedy)
    return UserError(
        f"MLflow's store {uri} cannot be used: {type(error).__name__}: {text[:300]}",
        "a reachable MLflow tracking store",
        "correct MLFLOW_TRACKING_URI, or unset it to use the workspace's own store",
    )
