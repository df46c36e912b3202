"""MLflow's store: its address contains no passwords or tokens, and messages repeat none."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.platform.cli import app
from mcis.platform.runs.tracking_errors import store_errors
from mcis.platform.runs.tracking_store import store_environment, tracking_uri
from mcis.platform.runs.workspace import Workspace

SECRET = "hunter2%2Fcorrect"


@pytest.mark.parametrize(
    "uri",
    [
        f"http://me:{SECRET}@127.0.0.1:5000",
        f"https://{SECRET}@example.com",
        f"https://example.com/?token={SECRET}",
        f"postgresql://me:a/b@{SECRET}@127.0.0.1/mlflow",
        f"postgresql://127.0.0.1/mlflow?user=me&password={SECRET}",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(
    uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(UserError, match="contains a password or token") as caught:
        tracking_uri(workspace)
    assert "hunter2" not in str(caught.value)
    assert "MLFLOW_TRACKING_TOKEN" in caught.value.remedy

    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    shown = CliRunner().invoke(app, ["ui", "--workspace", str(workspace.root)])
    assert shown.exit_code == 1
    assert "hunter2" not in shown.output
    assert not started


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:5000",
        "postgresql+psycopg2://me@127.0.0.1/mlflow?sslmode=require&passfile=/etc/pgpass",
        "sqlite:////data/a:b@c/mlflow.db",
    ],
)
def test_other_addresses_are_used_unchanged(uri: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking_uri(workspace) == uri


def test_errors_repeat_no_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    monkeypatch.setenv("PGPASSWORD", "swordfish")
    with pytest.raises(UserError, match=r"Bearer \*\*\* refused by \*\*\*"), store_errors("http://127.0.0.1:1"):
        raise ConnectionError("Bearer hunter2 refused by swordfish")


def test_trials_get_the_environment_variables_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")
    for name in (*names, "OTHER"):
        monkeypatch.setenv(name, "x")
    assert set(names) <= set(store_environment())
    assert "OTHER" not in store_environment()


@pytest.mark.slow
def test_runs_that_start_together_in_an_empty_workspace_share_its_store(tmp_path: Path) -> None:
    code = "import pathlib, sys; from mcis.platform.runs import tracking, workspace; "
    code += "tracking.Tracker(workspace.Workspace(pathlib.Path(sys.argv[1])), sys.argv[2], identity='')"
    started = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "abc"]
    assert [process.wait() for process in started] == [0, 0, 0]
