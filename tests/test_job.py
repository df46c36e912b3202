"""A cluster with token authentication, the built wheel, and `mcis run` through `ray job submit`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcis.datasets.synthetic import devkit as synthetic

PORT, DASHBOARD = 26379, 28265  # outside the range that Ray takes for its workers


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A head node of its own on loopback; yields the environment of its clients."""
    folder = tempfile.mkdtemp(prefix="mcis-", dir="/tmp")  # Ray's sockets need a short path
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    ray = str(Path(sys.executable).parent / "ray")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # The nodes have what the wheel needs; Ray's pip would install all of it again beside the wheel.
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PIP_NO_DEPS": "1"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    start = [ray, "start", "--head", f"--port={PORT}", "--dashboard-host=127.0.0.1", f"--dashboard-port={DASHBOARD}"]
    start += ["--num-cpus=4", f"--temp-dir={folder}", "--object-store-memory=500000000", "--block"]
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(start, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        listing = [ray, "job", "list", "--address", f"http://127.0.0.1:{DASHBOARD}"]
        for _ in range(60):
            if subprocess.run(listing, env=env, capture_output=True).returncode == 0:
                break
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            time.sleep(2)
        yield env
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, 9)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_run_by_job_submit_ends_with_scores(cluster: dict[str, str], wheel: Path, tmp_path: Path) -> None:
    root, workspace = tmp_path / "VOC2012", tmp_path / "workspace"
    synthetic.draw(root, train=16, val=4, size=64, classes=2)
    address = f"http://127.0.0.1:{DASHBOARD}"
    ray = str(Path(sys.executable).parent / "ray")
    refused = {k: v for k, v in cluster.items() if not k.startswith("RAY_AUTH")}
    without = subprocess.run([ray, "job", "list", "--address", address], env=refused, capture_output=True, text=True)
    assert without.returncode != 0, "a client without the token was let in"

    script = tmp_path / "job.py"
    script.write_text("import mcis.platform.cli as cli\n\nprint(cli.__file__)\ncli.main()\n")
    command = [sys.executable, str(script), "run", "voc", "--name", "job", "--voc", str(root)]
    command += ["--recipe", "small", "--workspace", str(workspace)]
    for value in (
        f"data.classes={root / 'classes.txt'}",
        "classifier.epochs=1",
        "classifier.channels=24",
        "classifier.input_size=64",
        "classifier.batch=8",
        "segmenter.channels=24",
        "segmenter.steps=2",
        "segmenter.batch=4",
        "segmenter.width=16",
        "segmenter.crop=64",
        "pseudo_masks.smallest=0",
    ):
        command += ["--set", value]
    submit = [
        ray,
        "job",
        "submit",
        "--address",
        address,
        "--runtime-env-json",
        json.dumps({"py_modules": [str(wheel)]}),
    ]
    for _ in range(30):
        done = subprocess.run(
            [*submit, "--", *command], env=cluster, capture_output=True, text=True, timeout=500, cwd=tmp_path
        )
        if "No available agent" not in done.stderr:  # the head answers some seconds before it can start a job
            break
        time.sleep(2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    scores = json.loads((workspace / "runs" / "job" / "scores.json").read_text())["scores"]
    assert {s["what"] for s in scores} == {"localization_maps", "pseudo_masks", "baseline", "segmentation"}
    assert "mIoU" in done.stdout
    assert "py_modules_files" in done.stdout, "the job ran the code of an install on the node, not the wheel's"
