"""Tests of docs/cluster: the Dockerfile passes the linter, and the manifest is valid for Kubernetes."""

import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import mlflow.cli
import pytest
import typer.main
import yaml

from mcis.platform.cli import app

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "cluster"


@pytest.fixture
def manifest() -> dict[str, dict[str, Any]]:
    """Returns the documents of the manifest by kind and name."""
    documents = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())
    return {f"{each['kind']} {each['metadata']['name']}": each for each in documents if each}


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.32", strict=True)


def check_pod(template: dict[str, Any]) -> None:
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})


def test_documents_are_valid_for_kubernetes(manifest: dict[str, dict[str, Any]]) -> None:
    assert len(manifest) == 7
    for document in manifest.values():
        if document["kind"] != "RayJob":
            check(document)


def test_the_job_is_valid_for_kuberay(manifest: dict[str, dict[str, Any]]) -> None:
    job = manifest["RayJob first"]
    assert job["apiVersion"] == "ray.io/v1"

    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    workers = cluster["workerGroupSpecs"]
    for group in (head, *workers):
        check_pod(group["template"])  # no package contains KubeRay's schema of a RayJob
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in workers:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]

    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_job_runs_a_command_of_mcis(manifest: dict[str, dict[str, Any]]) -> None:
    entrypoint = shlex.split(manifest["RayJob first"]["spec"]["entrypoint"])
    assert "data.sbd=/mnt/mcis/data/benchmark_RELEASE" in entrypoint, "without SBD, VOC has no list train_aug"
    program, command, *arguments = entrypoint
    assert program == "mcis"
    group: Any = typer.main.get_command(app)
    with group.make_context(program, [command], resilient_parsing=True) as outer:
        group.get_command(outer, command).make_context(command, arguments, parent=outer).close()


def test_the_mlflow_store_is_on_its_own_disk(manifest: dict[str, dict[str, Any]]) -> None:
    (container,) = manifest["Deployment mlflow"]["spec"]["template"]["spec"]["containers"]
    with mlflow.cli.server.make_context("server", container["args"][2:]) as context:
        assert context.params["backend_store_uri"].startswith(f"sqlite:///{container['volumeMounts'][0]['mountPath']}/")
        hosts = set(context.params["allowed_hosts"].split(","))
    assert hosts == {"mlflow:5000", "localhost:5000", "127.0.0.1:5000"}, "for jobs and for kubectl port-forward"
    assert manifest["PersistentVolumeClaim mlflow"]["spec"]["accessModes"] == ["ReadWriteOncePod"]


def test_the_dockerfile_passes_the_linter() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed on this kind of machine")
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_contains_the_sources_of_the_wheel() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    packages = {"__init__.py", "py.typed", "datasets", "models", "platform", "tuning"}

    assert sources == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", *packages}

    kept = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == sources
    assert kept[0] == "*"
