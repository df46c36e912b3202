"""Loads MLflow models that earlier versions of mcis logged: their files name this module as their loader."""

from mcis.platform.networks.mlflow_model import _load_pyfunc

__all__ = ["_load_pyfunc"]
