"""Versions of the software that a run's results depend on."""

import importlib.metadata
import os
import platform

from mcis.platform.runs.version import code_digest, project_version

_PACKAGES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pyarrow", "pillow", "pydensecrf2")


def environment(device: str) -> dict[str, str]:
    """Versions of Python, the machine, the packages and the project's own code, and the class of device."""
    versions = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    versions["cores"] = str(os.cpu_count())
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions | {"mcis": project_version(), "code": code_digest(), "device": device}
