"""Presets as functions, and the layers from which a run's configuration is put together, each value with its source.

Later layers win: defaults < recipe < setting < command line options < `--set key=value`.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from mcis.datasets.errors import UserError
from mcis.datasets.sources import SOURCES
from mcis.platform.config.sections import Config

Values = dict[str, Any]


def paper() -> Values:
    """The paper's text (section 4.1): VGG-16 classifier, DeepLab-LargeFOV on ResNet-101.

    `mcis run voc --voc DIR --recipe paper --set weights.backbone=download`. Needs ImageNet weights and a GPU. The
    paper reports 66.2 mIoU on VOC 2012 val with VOC images only; this project has not measured it.
    """
    return {
        "weights.backbone": "download",
        "classifier.optimizer.step_epochs": [6, 12],
        "classifier.optimizer.weight_decay": 2e-4,
        "classifier.optimizer.new_layer_rate": 1.0,
    }


def released() -> Values:
    """The figures of the authors' released code, where they differ from the text (RECIPE).

    `mcis run voc --voc DIR --recipe released`. Needs ImageNet weights and a GPU. The paper's tables came from it: 66.2
    mIoU on VOC 2012 val with VOC images only; this project has not measured it.
    """
    return {
        "weights.backbone": "download",
        "classifier.head": "own",
        "classifier.loss_reduction": "released",
        "classifier.self_pairs": ["flip", "x0.75", "x2"],
        "classifier.partner_may_be_itself": True,
        "classifier.contrastive_from_epoch": 2,
        "classifier.contrastive_needs_unshared": True,
        "classifier.keep_epoch": 10,
        "classifier.color_jitter": [0.3, 0.3, 0.3, 0.1],
        "classifier.optimizer.nesterov": True,
        "classifier.optimizer.step_epochs": [5, 10],
        "classifier.optimizer.new_layer_rate": 10.0,
        "classifier.optimizer.bias_rate": 2.0,
        "localize.aggregation": "released",
        "localize.related_may_repeat": True,
    }


def small() -> Values:
    """Trains from scratch on a CPU in minutes; the cosine affinity is the better one without pretrained weights.

    Its maps are not the paper's: related images add shared evidence to the single-round map, which on drawn data is
    better with and without saliency. The paper's form is `localize.aggregation=paper localize.evidence=0`.

    `mcis run voc --voc DIR --recipe small`, for images of about 160 pixels such as the embedded data's.
    """
    return {
        "data.min_side": 16,
        "classifier.backbone": "small",
        "classifier.input_size": 96,
        "classifier.head": "own",
        "classifier.affinity": "cosine",
        "classifier.affinity_scale": 15.0,
        "classifier.affinity_init": 1.0,
        "classifier.common_top": 0.2,
        "classifier.batch": 16,
        "classifier.epochs": 10,
        "classifier.flip": True,
        "classifier.shift": 8,
        "classifier.optimizer.name": "adamw",
        "classifier.optimizer.learning_rate": 0.001,
        "classifier.optimizer.weight_decay": 0.01,
        "classifier.optimizer.schedule": "cosine",
        "classifier.optimizer.warm_up": 0.05,
        "localize.aggregation": "evidence",
        "localize.evidence": 6.0,
        "localize.extra_scales": [0.5, 0.75, 1.25, 1.5],
        "localize.mirror": True,
        "segmenter.backbone": "small",
        "segmenter.stride": 4,
        "segmenter.init": "classifier",
        "segmenter.width": 96,
        "segmenter.dilation": 6,
        "segmenter.crop": 128,
        "segmenter.color_jitter": [0.3, 0.3, 0.3, 0.0],
        "segmenter.batch": 16,
        "segmenter.steps": 2000,
        "segmenter.optimizer.name": "adamw",
        "segmenter.optimizer.learning_rate": 0.002,
        "segmenter.optimizer.weight_decay": 0.01,
        "segmenter.optimizer.new_layer_rate": 1.0,
        "segmenter.optimizer.bias_rate": 1.0,
        "segmenter.optimizer.schedule": "cosine",
        "segmenter.optimizer.warm_up": 0.05,
        "maps.scale": "logarithm",
        "pseudo_masks.saliency_level": 128,
        "pseudo_masks.floor": 0.0,
        "pseudo_masks.threshold": 0.66,
        "pseudo_masks.background_threshold": 0.55,
        "predict.scales": [1.0],
        "predict.crop": None,
        "predict.crf.bilateral_std": 30.0,
        "predict.crf.color_std": 8.0,
        "pseudo_masks.crf.bilateral_std": 30.0,
        "pseudo_masks.crf.color_std": 8.0,
    }


RECIPES = {"paper": paper, "released": released, "small": small}
SETTINGS = ("voc", "voc+single", "voc+web", "lid", "tags")


def setting_values(setting: str) -> Values:
    """What a setting changes: single-label images beside others are another domain, with affinities of its own."""
    sources = sources_of(setting)
    several_domains = len(sources) > 1 and any(SOURCES[source].domain == "source" for source in sources)
    return {"classifier.kinds": 3} if several_domains else {}


def sources_of(setting: str) -> tuple[str, ...]:
    """The image sources of a setting: its parts between +, the one that names the classes first.

    Raises:
        UserError: an unknown source, one twice, or two that each have classes of their own.
    """
    names = tuple(setting.split("+"))
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        near = difflib.get_close_matches(setting, SETTINGS, 1) or difflib.get_close_matches(unknown[0], SOURCES, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of them"
        raise UserError(
            f"unknown setting {setting!r}", f"{', '.join(SETTINGS)}, or other sources ({', '.join(SOURCES)}) by +", hint
        )
    with_classes = [name for name, source in SOURCES.items() if source.names_classes]
    if len(set(names)) < len(names) or len(set(names).intersection(with_classes)) > 1:
        raise UserError(
            f"setting {setting!r}",
            f"each source once, and one of {', '.join(with_classes)} at most, since each has classes of its own",
            "run them one by one, or write one table for the source tags",
        )
    return tuple(source for source in SOURCES if source in names)


class Resolved(NamedTuple):
    """A configuration, and for each dotted key the layer that its value comes from."""

    config: Config
    sources: dict[str, str]


def leaves(section: BaseModel | type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a section and their values (or, of a class, their types)."""
    fields = type(section).model_fields if isinstance(section, BaseModel) else section.model_fields
    for name, field in fields.items():
        value: Any = getattr(section, name) if isinstance(section, BaseModel) else field.annotation
        if isinstance(value, BaseModel) or (isinstance(value, type) and issubclass(value, BaseModel)):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parse_assignments(assignments: Sequence[str]) -> Values:
    """`--set key=value` texts -> values; a value is JSON where it parses as such, else text.

    Raises:
        UserError: an assignment without `=` or a key.
    """
    values: Values = {}
    for text in assignments:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {text}", "--set key=value", "write for example --set localize.related=3")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:  # also a whole number of more digits than Python reads
            values[key.strip()] = value.strip()
    return values


def _nested(flat: Values) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def resolve(setting: str, recipe: str, options: Values | None = None, assignments: Sequence[str] = ()) -> Resolved:
    """Puts the layers together and validates the result once.

    Args:
        options: dotted keys set by command line options such as `--voc`.
        assignments: `key=value` texts of `--set`.

    Raises:
        UserError: every unknown key, wrong type and contradiction, in one message.
    """
    setting = "+".join(sources_of(setting))
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of them"
        raise UserError(f"unknown recipe {recipe!r}", f"one of {', '.join(RECIPES)}", hint)
    layers: list[tuple[str, Values]] = [
        (f"recipe {recipe}", RECIPES[recipe]()),
        (f"setting {setting}", setting_values(setting)),
        ("command line", {"setting": setting, "recipe": recipe, **(options or {})}),
        ("--set", parse_assignments(assignments)),
    ]
    known_keys = [key for key, _ in leaves(Config)]
    flat: Values = {}
    sources = dict.fromkeys(known_keys, "default")
    problems: list[str] = []
    for source, values in layers:
        for key, value in values.items():
            if key not in sources:
                near = difflib.get_close_matches(key, known_keys, 3, 0.5)
                problems.append(f"unknown key {key!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
                continue
            if source == "--set" and key in ("setting", "recipe"):
                problems.append(f"{key} by --set would only change its name; choose it on the command line")
                continue
            flat[key], sources[key] = value, source
    try:
        config = Config.model_validate(_nested(flat))
    except ValidationError as error:
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            given = "" if item["type"] == "value_error" else f" (found {item['input']!r})"
            problems.append(f"{where}: {item['msg']}{given}".lstrip(": "))
    if problems:
        raise UserError(
            "the configuration has " + f"{len(problems)} problem(s):\n  - " + "\n  - ".join(problems),
            "known keys with values of their type",
            "see `mcis config show` for every key, its value and where it comes from",
        )
    return Resolved(config, sources)
