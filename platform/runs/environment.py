"""Versions of the software that a run's results depend on."""

import importlib.metadata
import os
import platform

_PACKAGES = ("torch", "torchvision", "ray", "mlflow", "numpy", "pyarrow", "pillow", "pydensecrf2")


def environment() -> dict[str, str]:
    """Versions of Python, the machine and the packages that results depend on."""
    versions = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    versions["cores"] = str(os.cpu_count())
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions
