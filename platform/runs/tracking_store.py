"""The MLflow store: its location, which never contains a password, its client and its experiment."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mcis.datasets.errors import UserError
from mcis.datasets.storage.uris import holds_credentials
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking_errors import store_errors
from mcis.platform.runs.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# Read by MLflow when it is imported or first used: no telemetry, no warning about a missing git, and no long retries,
# because the tracker retries uploads itself.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}.items():
    os.environ.setdefault(_name, _value)

EXPERIMENT = "mcis"
_STORE_PREFIXES = ("MLFLOW_", "PG", "AWS_")
"""Prefixes of environment variables that configure MLflow's store, database and artifacts, and access to them."""


def tracking_uri(workspace: Workspace) -> str:
    """MLFLOW_TRACKING_URI if it is set, else the SQLite store of the workspace. For errors see `server_uri`."""
    return server_uri() or f"sqlite:///{workspace.tracking_store}"


def server_uri() -> str | None:
    """The value of MLFLOW_TRACKING_URI, or None if it is not set.

    Raises:
        UserError: It contains a password or token, which would be written to files, messages and command lines.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or None
    if uri and _holds_credentials(uri):
        raise UserError(
            f"MLFLOW_TRACKING_URI contains a password or token for a store {uri.partition('://')[0]}://",
            "a URI without credentials, because it is written to files, messages and command lines",
            "remove them from the URI; for servers set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN; for PostgreSQL set PGPASSWORD or write a ~/.pgpass",
        )
    if uri and uri.startswith("sqlite:///"):  # absolute, because trials run in other folders
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def _holds_credentials(uri: str) -> bool:
    scheme, _, rest = uri.partition("://")
    before_host = "" if scheme.startswith("sqlite") else rest.rpartition("@")[0]  # a password may hold any character
    if scheme in ("http", "https"):
        return bool(before_host) or "?" in rest
    return ":" in before_host or holds_credentials(uri)


def client_of(uri: str) -> "MlflowClient":
    """MLflow client for a store. Log messages below warnings are turned off.

    Raises:
        Exception: Any error of MLflow or of the store's file; see `tracking_errors.store_errors`.
    """
    from mlflow.tracking import MlflowClient

    if uri.startswith("sqlite:///"):
        _create_file(Path(uri.removeprefix("sqlite:///")))
    for logger in ("alembic", "mlflow"):  # after the import, which sets the levels
        logging.getLogger(logger).setLevel(logging.WARNING)
    for logger in ("mlflow.store.db", "mlflow.system_metrics"):  # their errors are also raised, or printed as notes
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def _create_file(store: Path) -> None:
    """Creates the file of a SQLite store if it is absent. MLflow would retry for 100 seconds where it cannot."""
    store.parent.mkdir(parents=True, exist_ok=True)
    if not store.exists():
        store.touch()


def experiment_of(client: "MlflowClient", workspace: Workspace) -> str:
    """Id of the experiment that holds all runs. It is created if it does not exist, and restored if it was deleted."""
    from mlflow.entities import LifecycleStage
    from mlflow.exceptions import MlflowException

    # The SQLite store keeps artifacts in the workspace; a server decides their location itself.
    is_sqlite = tracking_uri(workspace).startswith("sqlite:")
    location = workspace.tracking_artifacts.as_uri() if is_sqlite else None
    try:
        return str(client.create_experiment(EXPERIMENT, artifact_location=location))
    except MlflowException:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:  # it was not created for another reason than that it exists
            raise

    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        client.restore_experiment(experiment.experiment_id)
        console.print(f"note: the experiment {EXPERIMENT} had been deleted in MLflow; it is restored with its runs")
    return str(experiment.experiment_id)


def store_environment() -> dict[str, str]:
    """Environment variables that MLflow needs to find its store and its credentials."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_STORE_PREFIXES)}
    uri = server_uri()
    if uri:
        variables["MLFLOW_TRACKING_URI"] = uri
    return variables


def experiment_page(workspace: Workspace) -> str | None:
    """Path of the page of all runs in MLflow's UI; None if there is none. For errors see `tracking_errors`."""
    uri = tracking_uri(workspace)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return None  # a query would create the database
    with store_errors(uri):
        experiment = client_of(uri).get_experiment_by_name(EXPERIMENT)
    return f"#/experiments/{experiment.experiment_id}/runs" if experiment else None
