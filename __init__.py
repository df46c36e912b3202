"""Weakly supervised segmentation from Python: what the command `mcis` does, as functions.

    import mcis

    result = mcis.run("photos.csv", name="mine", overrides={"seed": 1})
    for score in result.scores:
        print(score.title, score.name, score.miou)

    predictor = mcis.Predictor.load("mcis-workspace/runs/mine")
    labels = predictor("photo.jpg")  # (H, W) uint8, 0 = background

Importing this module is cheap: torch and Ray are loaded when a function is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcis.platform.api import Predictor, UserError, compare, evaluate, index, panel, run, scores
    from mcis.tuning.api import study

    __version__: str

__all__ = ["Predictor", "UserError", "__version__", "compare", "evaluate", "index", "panel", "run", "scores", "study"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from mcis.platform.runs.version import project_version

        return project_version()
    if name == "study":
        from mcis.tuning.api import study

        return study
    if name in __all__:
        from mcis.platform import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
