"""Where MLflow keeps runs, never with a password in its name, and its errors as ones that a user can act on."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mcis.datasets.errors import UserError
from mcis.datasets.storage.uris import SECRET, holds_credentials
from mcis.platform.runs.files import full_disk
from mcis.platform.runs.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# Read when MLflow is imported or first used: it is to tell nobody what runs here, nor to ask for git; and a server that
# is away is asked again by the tracker, which goes on meanwhile.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}.items():
    os.environ.setdefault(_name, _value)

EXPERIMENT = "mcis"
_OF_STORES = ("MLFLOW_", "PG", "AWS_")
"""How the variables begin that say where MLflow's store, its database and its artifacts are, and who may use them."""


def tracking_uri(workspace: Workspace) -> str:
    """MLFLOW_TRACKING_URI where it is set, else the SQLite store of the workspace; errors as of `server_uri`."""
    return server_uri() or f"sqlite:///{workspace.tracking_store}"


def server_uri() -> str | None:
    """The value of MLFLOW_TRACKING_URI, None where it is not set; UserError where it holds a password or token, which
    would be written into files, messages and command lines."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or None
    if uri and _holds_credentials(uri):
        raise UserError(
            f"MLFLOW_TRACKING_URI names a store of {uri.partition('://')[0]}:// together with a password or token",
            "an address without credentials, as it is written into files, messages and command lines",
            "leave them out of it; servers are given MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN; PostgreSQL is given PGPASSWORD or a ~/.pgpass",
        )
    if uri and uri.startswith("sqlite:///"):  # trials have other folders
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def _holds_credentials(uri: str) -> bool:
    scheme, _, rest = uri.partition("://")
    before_host = "" if scheme.startswith("sqlite") else rest.rpartition("@")[0]  # a password may hold any character
    if scheme in ("http", "https"):
        return bool(before_host) or "?" in rest
    return ":" in before_host or holds_credentials(uri)


def client_of(uri: str) -> "MlflowClient":
    """MLflow's client of a store, which logs no more than warnings."""
    from mlflow.tracking import MlflowClient

    for logger in ("alembic", "mlflow"):  # after the import, which sets the levels
        logging.getLogger(logger).setLevel(logging.WARNING)
    for logger in ("mlflow.store.db", "mlflow.system_metrics"):  # what they log is raised, or said in a note
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def experiment_of(client: "MlflowClient", workspace: Workspace) -> str:
    """The id of the experiment of all runs, which is made where there is none."""
    from mlflow.exceptions import MlflowException

    # The workspace's own store keeps its artifacts beside it; a server has a location of its own.
    own = tracking_uri(workspace).startswith("sqlite:")
    location = workspace.tracking_artifacts.as_uri() if own else None
    with contextlib.suppress(MlflowException):  # there is one; another error is raised by the next call too
        return str(client.create_experiment(EXPERIMENT, artifact_location=location))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return str(experiment.experiment_id)


def store_environment() -> dict[str, str]:
    """The variables of this process that MLflow finds its store and its credentials by."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_OF_STORES)}
    return found | ({"MLFLOW_TRACKING_URI": uri} if (uri := server_uri()) else {})


@contextlib.contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turns errors of MLflow and its database into a UserError that names the store, and no password or token."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if full := full_disk(error, f"the disk of MLflow's store {uri}"):
            raise full from None
        text = str(error)
        for secret in {value for name, value in os.environ.items() if value and SECRET.search(name)}:
            text = text.replace(secret, "***")
        raise UserError(
            f"MLflow's store {uri} cannot be used: {text[:300]}",
            "a reachable MLflow tracking store with space on its disk",
            "free some space, unset MLFLOW_TRACKING_URI to use the workspace's own store, or start the server it names",
        ) from None


def experiment_page(workspace: Workspace) -> str | None:
    """The runs' page in MLflow's UI, relative to its address; None if it has none. Errors as of `store_errors`."""
    uri = tracking_uri(workspace)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return None  # to ask for it would make it
    with store_errors(uri):
        experiment = client_of(uri).get_experiment_by_name(EXPERIMENT)
    return f"#/experiments/{experiment.experiment_id}/runs" if experiment else None
