"""Checks that the Ray cluster of RAY_ADDRESS answers. Ray itself would wait for an absent cluster for minutes."""

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError

_SECONDS = 10.0
"""Time in which a cluster must answer."""
_HOST_AND_PORT = re.compile(r"(?:ray://)?(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>\d{1,5})(?:/.*)?")


class _Address(NamedTuple):
    """The address of a cluster and where it is written.

    Attributes:
        text: The address, such as 10.0.0.1:6379.
        origin: The variable or file that contains it, used in messages.
        remedy: What to do if no cluster answers there.
    """

    text: str
    origin: str
    remedy: str


def check_cluster() -> None:
    """Checks that the cluster of RAY_ADDRESS answers, if the variable is set.

    Raises:
        UserError: The address is invalid, or no Ray answers there within 10 s.
    """
    address = _cluster_address()
    if address is None:
        return

    parsed = _HOST_AND_PORT.fullmatch(address.text)
    if parsed is None or int(parsed["port"]) > 65535:
        raise UserError(
            f"{address.origin} has the address {address.text}",
            "host:port of the head of a Ray cluster, such as 10.0.0.1:6379, or auto; the address of a dashboard "
            "(http://...) is for `mcis submit --address`",
            address.remedy,
        )

    problem = _problem_at(parsed["host"].strip("[]"), int(parsed["port"]))
    if problem:
        raise UserError(
            f"no Ray cluster answers at {address.text}, the address in {address.origin}: {problem}",
            f"a running cluster whose head answers within {_SECONDS:g} s",
            address.remedy,
        )


def _cluster_address() -> _Address | None:
    """Returns the address of the cluster that Ray would connect to; None if there is no address to check."""
    value = os.environ.get("RAY_ADDRESS", "")
    if value in ("", "local"):
        return None
    if value != "auto":
        return _Address(
            value,
            "RAY_ADDRESS",
            "correct RAY_ADDRESS; or unset it, so that each run starts a Ray of its own; if the cluster crashed, run "
            "`ray stop` on its nodes and start it again",
        )

    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray does
    file = Path(folder) / "ray" / "ray_current_cluster"
    if not file.exists():
        return None  # Ray looks for a cluster on this machine, which takes no time
    return _Address(
        file.read_text(encoding="utf-8").strip(),
        f"{file}, a file that `ray start` wrote",
        "run `ray stop`, which removes the file, and start the cluster again; or unset RAY_ADDRESS, so that each "
        "run starts a Ray of its own",
    )


def _problem_at(host: str, port: int) -> str | None:
    """Returns why no Ray server answers at a port, or None if one does."""
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        return str(error)
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return None  # an answer needs Ray's certificates

    import grpc

    # Another program may use the port, or the head may be stopped: both accept connections.
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_SECONDS)
        except grpc.FutureTimeoutError:
            return "a program accepts connections there, but it does not answer as Ray does"
    return None
