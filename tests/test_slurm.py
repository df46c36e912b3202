"""Tests of docs/cluster/slurm.sh with stand-ins for Slurm, Ray and mcis, which record how they are called."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import typer.main

from mcis.platform.cli import app

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "cluster" / "slurm.sh"
STAND_INS = {
    "scontrol": "printf 'n1\\nn2\\nn3\\n'",
    "srun": 'while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && node=${1#*=}; shift; done\nexec "$@" "on $node"',
    "python": "echo 10.0.0.1",
    "ray": 'echo "ray $*, mode $RAY_AUTH_MODE" >> "$CALLS"',
    "mcis": 'sleep 1\necho "mcis $*, cluster $RAY_ADDRESS" >> "$CALLS"',
}


def start_script(folder: Path, **stand_ins: str) -> "subprocess.Popen[bytes]":
    """Starts the script with its placeholder filled in. The programs append their calls to the file `calls`."""
    programs = folder / "mcis" / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
    for name, code in (STAND_INS | stand_ins).items():
        (programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (programs / name).chmod(0o755)

    script = folder / "slurm.sh"
    script.write_text(SCRIPT.read_text().replace("/FILL-ME-IN", str(folder)))
    slurm = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "16", "SLURM_JOB_ID": "7"}
    environment = os.environ | slurm | {"CALLS": str(folder / "calls")}
    return subprocess.Popen(["bash", str(script)], env=environment)


def run_script(folder: Path) -> list[str]:
    """Runs the script. Returns the calls of ray and mcis."""
    assert start_script(folder).wait(60) == 0
    return (folder / "calls").read_text().splitlines()


def test_ray_starts_on_every_node_and_mcis_on_its_cluster(tmp_path: Path) -> None:
    calls = run_script(tmp_path)
    heads = [call for call in calls if "--head" in call]
    workers = sorted(call for call in calls if "ray start --address" in call)

    assert len(heads) == 1
    assert heads[0].endswith("on n1, mode token")
    options = "ray start --address=10.0.0.1:6379 --num-cpus=16 --block on"
    assert workers == [f"{options} n2, mode token", f"{options} n3, mode token"]
    assert calls[-1].endswith("cluster 10.0.0.1:6379")


def test_the_script_runs_a_command_of_mcis(tmp_path: Path) -> None:
    (call,) = [call for call in run_script(tmp_path) if call.startswith("mcis ")]
    words = shlex.split(call.partition(",")[0])[1:]
    command: Any = typer.main.get_command(app)
    name, subcommand, rest = command.resolve_command(typer.Context(command), words)
    assert subcommand.make_context(name, rest).params["workspace"] == tmp_path / "workspace"


def test_a_signal_ends_the_run_before_the_script(tmp_path: Path) -> None:
    """The run takes a moment to end, and its exit status is that of the script."""
    mcis = (
        'trap \'sleep 1; echo ended >> "$CALLS"; exit 130\' TERM\necho started >> "$CALLS"\nwhile :; do sleep 0.1; done'
    )
    script = start_script(tmp_path, mcis=mcis)
    calls = tmp_path / "calls"
    deadline = time.monotonic() + 60
    while not calls.exists() or "started" not in calls.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    script.send_signal(signal.SIGTERM)

    assert script.wait(30) == 130
    assert calls.read_text().splitlines()[-1] == "ended"
