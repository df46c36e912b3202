"""Tests of cluster.yaml: Ray's cluster launcher accepts it, and setup stops until all values are filled in."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import mlflow.cli
import pytest
import ray.autoscaler
import ray.scripts.scripts
import yaml
from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.consts import DASHBOARD_METRIC_PORT

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def commands_of(config: Config) -> list[str]:
    """Returns all shell commands of the file."""
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def test_ray_accepts_the_file(config: Config) -> None:
    """Runs both of Ray's checks. The second fills in defaults first, which hides some errors and reveals others."""
    jsonschema.validate(config, SCHEMA)
    validate_config(prepare_config(config))


def test_setup_stops_until_the_file_system_is_filled_in(config: Config, tmp_path: Path) -> None:
    nothing_else = {"PATH": str(tmp_path)}  # no sudo, no apt-get: the command must stop before it
    stopped = subprocess.run(["/bin/bash", "-c", config["setup_commands"][0]], capture_output=True, env=nothing_else)
    assert stopped.returncode == 1
    assert stopped.stderr.decode().startswith("cluster.yaml: SHARE is fs-FILL-ME-IN")


def test_commands_are_valid_shell(config: Config) -> None:
    commands = commands_of(config)
    assert len(commands) >= 8
    for command in commands:
        parsed = subprocess.run(["/bin/bash", "-n", "-c", command], capture_output=True, text=True)
        assert parsed.returncode == 0, f"{command}\n{parsed.stderr}"


def test_every_node_requires_the_token(config: Config) -> None:
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command and ".bashrc" in command for command in config["setup_commands"])
    (head,) = [command for command in config["head_start_ray_commands"] if "--head" in command]
    assert "--dashboard-host=127.0.0.1" in head


def arguments_of(config: Config, program: str) -> list[str]:
    """Returns the arguments of a program in the commands."""
    (rest,) = [part for command in commands_of(config) for part in command.split(program)[1:]]
    return shlex.split(re.split(r"[;)]", rest)[0])


def test_mlflow_options_are_valid_and_its_store_is_on_the_head(config: Config) -> None:
    arguments = arguments_of(config, 'mlflow" server')
    with mlflow.cli.server.make_context("server", arguments) as context:
        store = context.params["backend_store_uri"]
        host = context.params["host"]

    assert store.startswith("sqlite:///$HOME/")
    assert host == "127.0.0.1"

    uri = f"http://{host}:{context.params['port']}"
    assert any(f"export MLFLOW_TRACKING_URI={uri}" in command for command in config["head_setup_commands"])


def test_options_of_ray_start_are_valid(config: Config) -> None:
    starts = [command.split("ray start")[1] for command in commands_of(config) if "ray start" in command]
    assert len(starts) == 2

    for start in starts:
        with ray.scripts.scripts.start.make_context("start", shlex.split(start)) as context:
            assert context.params["metrics_export_port"] == 8090
    closed = "--dports 8090,44217,44227 -j DROP"

    assert any(closed in command for command in config["setup_commands"])
    assert {AUTOSCALER_METRIC_PORT, DASHBOARD_METRIC_PORT} == {44217, 44227}
