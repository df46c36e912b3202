"""A cluster that is gone: one message within seconds that names the variable or file, the address and the remedy."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from mcis.datasets.errors import UserError
from mcis.platform.commands.doctor import check_machine
from mcis.platform.engine.cluster_probe import check_cluster


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def listening_port() -> Iterator[int]:
    """A port at which a program accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refusal() -> UserError:
    """Returns the error of an address. It may take 10 s; the bound is larger, for busy machines."""
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        check_cluster()
    assert time.monotonic() - start < 60
    return caught.value


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_gone_is_named_with_its_variable(
    scheme: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{free_port}")
    error = refusal()
    assert f"{scheme}127.0.0.1:{free_port}, the address in RAY_ADDRESS" in error.found
    assert "refused" in error.found
    assert "`ray stop`" in error.remedy


def test_the_file_of_a_cluster_that_is_gone_is_named(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(f"127.0.0.1:{free_port}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    error = refusal()
    assert f"127.0.0.1:{free_port}" in error.found
    assert str(file) in error.found
    assert "`ray stop`" in error.remedy


def test_a_program_that_does_not_answer_is_no_cluster(listening_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening_port}")
    assert "does not answer as Ray does" in refusal().found


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "head", "head:", "head:99999"])
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = refusal()
    assert error.found == f"RAY_ADDRESS has the address {address}"
    assert "host:port" in error.expected


@pytest.mark.parametrize("address", ["", "local", "auto"])
def test_values_without_an_address_are_left_to_ray(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # without the file of `ray start`
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_cluster()


def test_a_server_that_answers_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's head is a gRPC server; `tests/platform/test_several_nodes.py` connects to real ones."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    check_cluster()
    server.stop(None).wait()


SESSION = """
from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session

with ray_session(ComputeConfig()):
    pass
"""


def test_a_session_ends_with_the_message(free_port: int) -> None:
    """In a process of its own, because the tests' Ray may be connected in this one."""
    environment = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{free_port}"}
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert f"UserError: no Ray cluster answers at 127.0.0.1:{free_port}" in done.stderr


def test_doctor_reports_a_cluster_that_is_gone(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    (check,) = [check for check in check_machine(tmp_path) if check.part == "ray"]
    assert check.state == "bad"
    assert "no Ray cluster answers" in check.finding
