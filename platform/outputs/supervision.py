"""States what the segmentation network of a run was trained on, for scores and model cards."""

from collections.abc import Mapping
from pathlib import Path

from mcis.platform.config.sections import Config
from mcis.platform.runs.results import MasksResult, read_result
from mcis.platform.runs.scores import REGIONS_SUPERVISION, SALIENCY_SUPERVISION


def used_saliency(config: Config, outputs: Mapping[str, Path]) -> bool:
    """Whether saliency maps were used for any pseudo mask of a run.

    Args:
        config: Configuration of the run.
        outputs: Folders of its finished outputs, by stage.
    """
    if config.supervision == "full" or "pseudo_masks" not in outputs:
        return False
    cue = read_result(outputs["pseudo_masks"], MasksResult).background_cue
    return config.pseudo_masks.may_use_saliency and cue != "crf"  # the rule auto, if no image has a saliency map


def used_regions(config: Config, outputs: Mapping[str, Path]) -> str | None:
    """What the pseudo masks of a run take from files of another program: segments, detections, or None.

    Args:
        config, outputs: See `used_saliency`.
    """
    if config.supervision == "full" or "pseudo_masks" not in outputs:
        return None
    return config.pseudo_masks.regions


def trained_on(config: Config, outputs: Mapping[str, Path]) -> str | None:
    """What the segmentation network of a run was trained on, as text (`Score.trained_on`).

    Args:
        config, outputs: See `used_saliency`.

    Returns:
        The text; None for pseudo masks that come from tags alone.
    """
    if config.supervision == "full":
        return "ground truth"

    origin = ""
    if config.pseudo_masks.is_imported:
        origin = " of another program"
    elif config.localize.is_imported:
        origin = " from maps of another program"

    used = []
    if used_saliency(config, outputs):
        used.append(f"saliency maps ({SALIENCY_SUPERVISION})")
    regions = used_regions(config, outputs)
    if regions:
        used.append(f"{regions} ({REGIONS_SUPERVISION})")
    if config.data.corrected_masks:
        used.append("corrected masks")
    if not origin and not used:
        return None
    return f"pseudo masks{origin}" + (f" with {' and '.join(used)}" if used else "")
