"""Stores of MLflow that cannot be used: each has a message of its own, no run stops, and nothing is lost."""

import http.server
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.tracking_store import experiment_page
from mcis.platform.runs.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path) -> Workspace:
    workspace = Workspace(tmp_path / "workspace")
    shutil.copy(mlflow_store, workspace.tracking_store)
    return workspace


def run(workspace: Workspace) -> Tracker:
    """Tracks a whole run."""
    tracker = Tracker(workspace, "mine", identity="same")
    with tracker.running():
        tracker.describe({"seed": 3, "scales": (0.5, 1.0)}, {"recipe": "photos"})
        tracker.metrics({"miou": 50.0})
    return tracker


def check_upload(tracker: Tracker) -> None:
    """Checks that MLflow has one run with everything that was logged."""
    (found,) = tracker.client.search_runs([tracker.experiment_id])
    assert found.info.run_id == tracker.run_id
    assert found.info.status == "FINISHED"
    assert found.data.params == {"seed": "3", "scales": "0.5, 1.0"}
    assert found.data.metrics["miou"] == 50.0
    assert found.data.tags["recipe"] == "photos"
    assert "mcis.version" in found.data.tags


def test_a_deleted_experiment_is_restored(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(workspace)
    first.client.delete_experiment(first.experiment_id)

    second = run(workspace)
    assert "note: the experiment mcis had been deleted in MLflow; it is restored" in capsys.readouterr().out
    check_upload(second)
    assert experiment_page(workspace) == f"#/experiments/{first.experiment_id}/runs"


def test_an_experiment_deleted_during_a_run_is_restored_at_its_end(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(workspace, "mine", identity="same")
    tracker.client.delete_experiment(tracker.experiment_id)
    tracker.describe({"seed": 3, "scales": (0.5, 1.0)}, {"recipe": "photos"})
    tracker.metrics({"miou": 50.0})
    tracker.finish("FINISHED")
    assert "it is restored" in capsys.readouterr().out
    check_upload(tracker)


def another_version(store: Path) -> None:
    with sqlite3.connect(store) as database:
        database.execute("UPDATE alembic_version SET version_num = 'abcdef123456'")


def another_version_without_a_table(store: Path) -> None:
    another_version(store)
    with sqlite3.connect(store) as database:
        database.execute("DROP TABLE trace_info")


def damaged(store: Path) -> None:
    store.write_text("no database" * 500)


def absent_driver(store: Path) -> str:
    return "mysql://127.0.0.1/mlflow"


def unknown_scheme(store: Path) -> str:
    return "htp://127.0.0.1"


FAULTS: dict[Callable[[Path], str | None], tuple[str, str]] = {
    another_version: ("another version of MLflow created it", "mlflow db upgrade"),
    another_version_without_a_table: ("another version of MLflow created it", "mlflow db upgrade"),
    damaged: ("the file is damaged", "move it away"),
    absent_driver: ("its database needs the package MySQLdb, which is not installed", "install it"),
    unknown_scheme: ("unsupported URI 'htp://127.0.0.1'", "correct MLFLOW_TRACKING_URI"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_store_stops_no_run_and_the_next_call_uploads_it(
    fault: Callable[[Path], str | None],
    workspace: Workspace,
    mlflow_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, remedy = FAULTS[fault]
    uri = fault(workspace.tracking_store)
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = run(workspace)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"note: MLflow's store {tracker.uri} cannot be used: " in printed
    assert found in printed
    assert remedy in printed
    assert "disk" not in printed
    if not uri:
        shutil.copy(mlflow_store, workspace.tracking_store)
        check_upload(run(workspace))


def test_a_read_only_store_stops_no_run_and_the_next_call_uploads_it(
    workspace: Workspace,
    mlflow_store: Path,
    small_disk: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = small_disk("20m")
    shutil.copy(mlflow_store, disk / "mlflow.db")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for name in ("mlflow.db", "absent.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{disk / name}")
        run(workspace)
        assert "cannot be used: it cannot be written. The run continues" in capsys.readouterr().out

    uri = f"sqlite:///{disk / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run(workspace)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    # A process of its own, as a call has: in this one, SQLite keeps the file open for reading only.
    subprocess.run([sys.executable, "-c", NEXT_CALL, str(workspace.root)], check=True)
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert found.info.status == "FINISHED"
    assert found.data.params == {"seed": "3", "scales": "0.5, 1.0"}
    assert found.data.metrics["miou"] == 50.0


NEXT_CALL = """
import sys
from pathlib import Path
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import Workspace

Tracker(Workspace(Path(sys.argv[1])), "mine", identity="same").finish("FINISHED")
"""


@pytest.fixture
def answering_server() -> Iterator[Callable[[int], str]]:
    """Starts servers that answer each request with a status, as a proxy in front of MLflow may do."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(status: int) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"You are not authenticated.")

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_certificate_is_named(
    answering_server: Callable[[int], str],
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", answering_server(200).replace("http:", "https:"))
    run(workspace)
    printed = " ".join(capsys.readouterr().out.split())
    assert "no secure connection to it: " in printed
    assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in printed


@pytest.mark.parametrize(
    ("status", "found", "remedy"),
    [
        (401, "it asks for a user name and password", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        (403, "it does not permit this user to write runs", "ask the administrator"),
        (404, "not an MLflow server", "correct MLFLOW_TRACKING_URI"),
        (200, "not an MLflow server", "correct MLFLOW_TRACKING_URI"),
        (503, "the server answers with the error 503", "read the log of the server"),
    ],
)
def test_a_server_that_refuses_stops_no_run(
    status: int,
    found: str,
    remedy: str,
    answering_server: Callable[[int], str],
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", answering_server(status))
    run(workspace)
    printed = " ".join(capsys.readouterr().out.split())
    assert found in printed
    assert remedy in printed
