"""cluster.yaml is what Ray's cluster launcher accepts, and refuses to go on while a value is not filled in."""

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def commands_of(config: Config) -> list[str]:
    """Every shell command of the file."""
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def check(config: Config) -> None:
    """Both of Ray's checks: the second fills in defaults first, which hides some faults and shows others."""
    jsonschema.validate(config, SCHEMA)
    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_accepts_it(config: Config) -> None:
    check(config)


def test_ray_refuses_an_unknown_key(config: Config) -> None:
    config["max_worker"] = config.pop("max_workers")
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        check(config)


def test_ray_refuses_an_unknown_key_of_a_node_type(config: Config) -> None:
    config["available_node_types"]["gpu_worker"]["maximum"] = 16
    with pytest.raises(jsonschema.ValidationError, match="maximum"):
        check(config)


def test_ray_refuses_a_head_of_no_known_type(config: Config) -> None:
    config["head_node_type"] = "heads"
    with pytest.raises(ValueError, match="head_node_type"):
        check(config)


def test_two_values_are_left_to_the_owner(config: Config) -> None:
    values = set(re.findall(r"[\w.:/-]*FILL-ME-IN[\w.:/-]*", json.dumps(config)))
    assert values == {"ami-FILL-ME-IN", "fs-FILL-ME-IN.efs.us-west-2.amazonaws.com:/"}


def test_setup_stops_with_a_message_while_the_file_system_is_not_filled_in(config: Config, tmp_path: Path) -> None:
    nothing_else = {"PATH": str(tmp_path)}  # no sudo, no apt-get: the command must stop before it
    stopped = subprocess.run(["/bin/bash", "-c", config["setup_commands"][0]], capture_output=True, env=nothing_else)
    assert stopped.returncode == 1
    assert stopped.stderr.decode().startswith("cluster.yaml: SHARE is fs-FILL-ME-IN")


def test_setup_goes_on_once_the_file_system_is_filled_in(config: Config, tmp_path: Path) -> None:
    command = config["setup_commands"][0].replace("FILL-ME-IN", "0123456789abcdef0")
    went_on = subprocess.run(["/bin/bash", "-c", command], capture_output=True, env={"PATH": str(tmp_path)})
    assert went_on.returncode == 127
    assert "sudo: command not found" in went_on.stderr.decode()


def test_commands_are_shell(config: Config) -> None:
    commands = commands_of(config)
    assert len(commands) >= 8
    for command in commands:
        parsed = subprocess.run(["/bin/bash", "-n", "-c", command], capture_output=True, text=True)
        assert parsed.returncode == 0, f"{command}\n{parsed.stderr}"


def test_every_node_asks_for_the_token(config: Config) -> None:
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command and ".bashrc" in command for command in config["setup_commands"])
    (head,) = [command for command in config["head_start_ray_commands"] if "--head" in command]
    assert "--dashboard-host=127.0.0.1" in head
