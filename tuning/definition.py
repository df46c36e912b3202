"""Definitions of studies: cases with values of their own, their baselines, and the paper's results.

Definitions are TOML files, see docs/howto/studies.md.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcis.datasets.errors import UserError, unquoted
from mcis.datasets.sources import SOURCES
from mcis.platform import pipeline
from mcis.platform.config.keys import Values, value_of
from mcis.platform.config.resolve import Resolved, resolve, with_table
from mcis.platform.config.sections import Config, sources_of
from mcis.platform.runs.files import fingerprint

LIBRARY = Path(__file__).parent / "library"
LAST_STAGES = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
"""Stages that may be the last stage of a trial: each has a score."""
_PARTNER_TEXTS = {
    "partner": "",
    "itself": ", trained with itself as the partner",
    "wrong_class": ", trained with partners of wrong classes",
}
"""Description of the images that attend to each other in training, by `classifier.attention_partner`."""
_PAPER_DATA = {"voc": "VOC 2012", "lid": "LID"}
"""Data sets on which the paper reports mIoU, by the source that reads them."""
_IMAGE_KEYS = ("classes", "train_list", "val_list")
"""Values of the section `data` that select the images and classes of these data sets."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MAX_NAME_LENGTH = 64
_DIGEST_LENGTH = 8
"""Number of digits that tell cases of axes apart whose names are too long."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CaseDefinition(_StrictModel):
    """A case of a study as the file defines it; a row of the study's table.

    Attributes:
        name: Part of the names of its trials and metrics.
        group: Name of a group of cases, for example cases with the same training. The plot has a color for each group.
        sources: Image sources, a subset of the study's; None: all of them. With `adapts_to_sources`, `first` is
            the source that defines the classes.
        recipe: Recipe; None: that of the study.
        method, data_set: Names of its method and data set, if the case is one of a grid of methods and data sets.
        values: Configuration values of the case, by dotted key; `set` in the file.
        until: Last stage, if it comes before the last stage of the study; None: the last stage of the study.
        paper: The paper's mIoU of the segmentation network on val of `StudyDefinition.paper_data`, in percent.
        paper_test: The same on test.
        baseline: Name of the case that it is compared with.
        description: What the difference to the baseline shows.
    """

    name: str = Field(pattern=_NAME)
    group: str = ""
    sources: str | None = None
    recipe: str | None = None
    method: str = ""
    data_set: str = ""
    values: dict[str, Any] = Field(default_factory=dict, alias="set")
    until: str | None = None
    paper: float | None = None
    paper_test: float | None = None
    baseline: str | None = None
    description: str = ""


class StudyCase(CaseDefinition):
    """A case of a study of one configuration.

    Attributes:
        sources: Image sources.
        recipe: Recipe.
        until: Last stage.
        paper: As above; None if the trials of the case do not score the segmentation network on that data set's val.
        paper_test: As above; None where `paper` is.
        inference: Description of how its maps are inferred.
        related: Number of related images R; None for maps of another program.
    """

    sources: str
    recipe: str
    until: str
    inference: str
    related: int | None


class DataSet(_StrictModel):
    """A data set of a study, on which all of its methods run.

    Attributes:
        name: Part of the names of its cases, if the study has several data sets.
        source: Table of images and tags, or names of image sources, like SOURCE of `mcis run`.
        values: Configuration values of all its cases, by dotted key; `set` in the file.
    """

    name: str = Field(pattern=_NAME)
    source: str
    values: dict[str, Any] = Field(default_factory=dict, alias="set")

    def located(self) -> tuple[str, Values]:
        """The image sources, and all values of its cases, with the location of a table."""
        sources, location = with_table(self.source, {})
        assert sources is not None
        return sources, location | self.values


class Method(_StrictModel):
    """A method of a study: a recipe with values of its own, or maps, masks or predictions of another program.

    Attributes:
        name: Part of the names of its cases.
        recipe: Recipe; None: that of the study.
        values: Configuration values, by dotted key; `set` in the file.
        values_on: Further values on each data set, by the name of the data set; `on` in the file. If it is not empty,
            the method only runs on these.
    """

    name: str = Field(pattern=_NAME)
    recipe: str | None = None
    values: dict[str, Any] = Field(default_factory=dict, alias="set")
    values_on: dict[str, dict[str, Any]] = Field(default_factory=dict, alias="on")


class StudyDefinition(_StrictModel):
    """A study as the file defines it.

    Attributes:
        about: The question that the study answers.
        paper_data: Source of the data set of the paper's results, see `_PAPER_DATA`.
        adapts_to_sources: Whether the study leaves out cases with sources that it is not run with.
        cases: Cases; `case` in the file.
        axes: Lists of values by dotted key. Each combination of values is a case.
        methods: Methods; `method` in the file. Each one on each data set is a case, compared with the first method.
        data_sets: Data sets; `data` in the file. Empty: the methods run on the sources of the command.
    """

    about: str
    paper_data: Literal["voc", "lid"] = "voc"
    adapts_to_sources: bool = False
    cases: tuple[CaseDefinition, ...] = Field(default=(), alias="case")
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    methods: tuple[Method, ...] = Field(default=(), alias="method")
    data_sets: tuple[DataSet, ...] = Field(default=(), alias="data")

    @property
    def paper_column(self) -> str | None:
        """Heading of the column with the paper's results; None if the paper has none for these cases."""
        if all(case.paper is None for case in self.cases):
            return None
        return f"paper ({_PAPER_DATA[self.paper_data]} val, network)"

    @property
    def paper_test_column(self) -> str:
        """Heading of the column with the paper's results on test."""
        return f"paper ({_PAPER_DATA[self.paper_data]} test, network)"

    @property
    def first_source(self) -> str | None:
        """Source of the first data set, for commands without SOURCE. None: the study has no data sets."""
        return self.data_sets[0].source if self.data_sets else None

    @property
    def data_keys(self) -> set[str]:
        """Keys that the data sets set, except the location of a table."""
        return set(itertools.chain.from_iterable(data_set.values for data_set in self.data_sets))

    def refuse_source(self, source: str | None) -> None:
        """Raises UserError if a command names a source, but the study has data sets of its own."""
        if source is not None and self.data_sets:
            raise UserError(
                f"{source}, for a study with data sets of its own: {', '.join(data.name for data in self.data_sets)}",
                "no source in the command",
                "leave it out, or add it to the study as [[data]]",
            )

    def all_cases(self) -> Iterator[CaseDefinition]:
        """Yields the cases, the combinations of the axes, then the methods on each data set."""
        yield from self.cases
        if self.axes:
            for combination in itertools.product(*self.axes.values()):
                values = dict(zip(self.axes, combination, strict=True))
                yield CaseDefinition(name=_case_name(values), set=values)
        if self.data_sets:
            for data_set in self.data_sets:
                yield from self._cases_of_methods(data_set)
        else:
            yield from self._cases_of_methods(None)

    def _cases_of_methods(self, data_set: DataSet | None) -> Iterator[CaseDefinition]:
        """Yields a case for each method that runs on a data set; None: the sources of the command."""
        first = None
        for method in self.methods:
            if data_set and method.values_on and data_set.name not in method.values_on:
                continue
            name = method.name if len(self.data_sets) < 2 or not data_set else f"{data_set.name}-{method.name}"
            values = dict(method.values)
            sources = None
            if data_set:
                sources, located = data_set.located()
                values = located | values | method.values_on.get(data_set.name, {})
            yield CaseDefinition(
                name=name,
                group=data_set.name if data_set else "",
                sources=sources,
                recipe=method.recipe,
                method=method.name,
                data_set=data_set.name if data_set else "",
                set=values,
                baseline=first,
            )
            first = first or name


def _case_name(values: dict[str, Any]) -> str:
    """A name made of values: `related-3-threshold-0.2`."""
    texts = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        texts.append(f"{key.rpartition('.')[2]}-{text}")

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(texts)).strip("-.")
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = fingerprint(values)[:_DIGEST_LENGTH]
    return f"{name[: _MAX_NAME_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"


def library() -> list[str]:
    """Names of the studies in the library."""
    return sorted(path.stem for path in LIBRARY.glob("*.toml"))


def select_cases(definition: StudyDefinition, names: Sequence[str]) -> StudyDefinition:
    """The study with some of its cases only.

    Raises:
        UserError: It has no case of one of the names.
    """
    cases = {case.name: case for case in definition.all_cases()}
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise UserError(
            f"--case {' and '.join(unknown)}", f"one of {', '.join(cases)}", "name cases of the study, or leave it out"
        )
    chosen = tuple(case for name, case in cases.items() if name in names)
    return definition.model_copy(update={"cases": chosen, "axes": {}, "methods": ()})


def read_definition(study: str) -> StudyDefinition:
    """Reads the definition of a study.

    Args:
        study: Name of a study in the library, or path of a TOML file.

    Raises:
        UserError: There is no such file, or it does not define a study.
    """
    path = LIBRARY / f"{study}.toml" if study in library() else Path(study)
    expected = f"one of {', '.join(library())}, or a TOML file with cases, axes or methods"

    try:
        definition = StudyDefinition.model_validate(tomllib.loads(path.read_bytes().decode()))
        names = [case.name for case in definition.all_cases()]
    except OSError as error:
        raise UserError(f"study {study}: {error.strerror}", expected, "choose one of them") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {unquoted(error)}", expected, "correct that line") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, part['loc'])) or 'study'}: {part['msg']}" for part in error.errors()]
        raise UserError(
            f"{path} does not define a study: {'; '.join(problems)}", expected, "see docs/howto/studies.md"
        ) from None

    _check_names(path, definition, names)
    return definition


def _check_names(path: Path, definition: StudyDefinition, names: list[str]) -> None:
    """Raises a `UserError` if there are no cases, two of one name, or comparisons with cases that do not exist."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    unknown = sorted({case.baseline for case in definition.cases if case.baseline} - set(names))
    data_sets = {data_set.name for data_set in definition.data_sets}
    named_data = set(itertools.chain.from_iterable(method.values_on for method in definition.methods))
    unknown_data = sorted(named_data - data_sets)

    if data_sets and (definition.cases or definition.axes):
        raise UserError(
            f"{path} has data sets together with cases or axes",
            "data sets for methods only",
            "write the cases as [[method]], or leave out [[data]] and name the sources in the command",
        )
    unused_data = sorted(data_sets - {case.data_set for case in definition.all_cases()})
    if unused_data and definition.methods:
        raise UserError(
            f"no method of {path} runs on {', '.join(unused_data)}",
            "a method on each data set",
            "add it to `on` of a method, or leave it out",
        )
    if not names:
        raise UserError(f"{path} has no case", "cases, axes or methods", "add a [[case]]")
    if unknown_data:
        raise UserError(
            f"{path} has no data set {', '.join(unknown_data)}", "names of data sets after `on`", "correct the name"
        )
    if repeated:
        raise UserError(f"{path} has two cases {', '.join(repeated)}", "cases of different names", "rename one of them")
    if unknown:
        raise UserError(
            f"{path} has no case {', '.join(unknown)}", "names of cases after `baseline`", "correct the name"
        )


def adapted_to_sources(definition: StudyDefinition, config: Config) -> StudyDefinition:
    """Returns a study that adapts to its sources with the cases for the sources of a configuration; others unchanged.

    Raises:
        UserError: No case is left, or only the one without further sources.
    """
    if not definition.adapts_to_sources:
        return definition

    first, *others = sources_of(config.sources)
    cases = []
    absent: list[str] = []
    for case in definition.all_cases():
        names = (case.sources or config.sources).split("+")
        names = [first if name == "first" else name for name in names]
        missing = set(names) - {first, *others}
        absent += sorted(missing)
        if not missing:
            cases.append(case.model_copy(update={"sources": "+".join(names)}))
    if absent and not (cases and others):
        sources = list(dict.fromkeys(absent))
        raise UserError(
            f"a study of image sources with {config.sources} alone",
            f"{first} with further sources: {', '.join(f'{first}+{name}' for name in sources)}",
            f"run the study with {'+'.join([first, *sources])} and {', '.join(f'--{name} PATH' for name in sources)}",
        )
    return definition.model_copy(update={"cases": tuple(cases), "axes": {}, "methods": ()})


def check_sources(definition: StudyDefinition, config: Config) -> None:
    """Checks that the images of all sources are given that the cases of a study need.

    Raises:
        UserError: Images are not given; it names all of these sources.
    """
    cases = list(definition.all_cases())
    needed: dict[str, None] = {}
    absent: set[str] = set()
    missing_by_case: dict[str, list[str]] = {}
    for case in cases:
        needed |= dict.fromkeys(_sources_of_case(case, config))
        missing_by_case[case.name] = _missing_sources(case, config)
        absent.update(missing_by_case[case.name])
    missing = [name for name in needed if name in absent]
    if not missing:
        return

    incomplete = [case for case, names in missing_by_case.items() if names]
    complete = [case for case, names in missing_by_case.items() if not names]
    remedy = f"run the study with {'+'.join(needed)} and {', '.join(f'--{name} PATH' for name in missing)}"
    if complete:
        remedy += f"; or without these cases: {' '.join(f'--case {name}' for name in complete)}"
    raise UserError(
        f"no images of {' and '.join(missing)} are given, which the cases {', '.join(incomplete)} need",
        f"a study with the sources of all its cases: {'+'.join(needed)}",
        remedy,
    )


def _sources_of_case(case: CaseDefinition, config: Config) -> Sequence[str]:
    return sources_of(case.sources or config.sources)


def _missing_sources(case: CaseDefinition, config: Config) -> list[str]:
    """The sources of a case whose location neither the case nor the configuration sets."""
    missing = []
    for name in _sources_of_case(case, config):
        key = SOURCES[name].keys(name)[SOURCES[name].location]
        is_configured = name in sources_of(config.sources) and value_of(config, key) is not None
        if key not in case.values and not is_configured:
            missing.append(name)
    return missing


def trial_values(resolved: Resolved, values: Values, sources: str | None = None) -> Values:
    """The values in which a trial differs from its recipe: changes by the user, overridden by `values`.

    Changes by the user that do not apply to the trial are left out: options of another localization method, contrastive
    features without related images, and the locations of sources that the trial does not use.

    Args:
        resolved: Configuration of the study.
        values: Values of the trial's case.
        sources: Image sources of the trial; None: the study's.
    """
    config = resolved.config
    unused_sources = set(sources_of(config.sources)) - set(sources_of(sources or config.sources))

    left_out = [f"data.{source}" for source in unused_sources]
    method = config.localize.method.name
    if values.get("localize.method.name", method) != method:
        left_out.append("localize.method")
    if values.get("localize.related") == 0:
        left_out.append("localize.method.contrastive")

    def is_left_out(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in left_out)

    return {key: value for key, value in resolved.changed().items() if not is_left_out(key)} | values


def configured(resolved: Resolved, values: Values, sources: str | None = None, recipe: str | None = None) -> Resolved:
    """The configuration of a trial. For the arguments see `trial_values`.

    Args:
        recipe: Recipe of the trial; None: the study's.

    Raises:
        UserError: The configuration does not accept the values, or they contradict each other.
    """
    sources = sources or resolved.config.sources
    return resolve(sources, recipe or resolved.config.recipe, trial_values(resolved, values, sources))


def cases_of(definition: StudyDefinition, resolved: Resolved, until: str) -> list[StudyCase]:
    """The cases of a study of this configuration.

    Args:
        definition: The study.
        resolved: Configuration that the cases share.
        until: Last stage of the study.

    Raises:
        UserError: The configuration does not accept the values of a case; a case sets a key that it must not set; or
            its last stage is unknown.
    """
    return [_study_case(case, definition.paper_data, resolved, until) for case in definition.all_cases()]


def _study_case(definition: CaseDefinition, paper_data: str, resolved: Resolved, until: str) -> StudyCase:
    _check_case(definition)

    config = configured(resolved, definition.values, definition.sources, definition.recipe).config
    last_stage = min(definition.until or until, until, key=pipeline.STAGE_NAMES.index)
    is_comparable = _scores_network_on(paper_data, config, last_stage)
    derived = {
        "sources": config.sources,
        "recipe": config.recipe,
        "until": last_stage,
        "paper": definition.paper if is_comparable else None,
        "paper_test": definition.paper_test if is_comparable else None,
        "inference": _describe_inference(config),
        "related": config.localize.related_of_maps,
    }
    return StudyCase(**dict(definition) | derived)


def _scores_network_on(source: str, config: Config, last_stage: str) -> bool:
    """Whether a run scores the segmentation network on all val images of a source that defines classes."""
    has_predictions = pipeline.STAGE_NAMES.index(last_stage) >= pipeline.STAGE_NAMES.index("predict")
    is_val = config.predict.split in ("auto", "val")
    default = Config().data
    has_all_images = all(getattr(config.data, key) == getattr(default, key) for key in _IMAGE_KEYS)
    return has_predictions and is_val and has_all_images and sources_of(config.sources)[0] == source


def _describe_inference(config: Config) -> str:
    """Description of how the maps of a run are inferred."""
    if config.supervision == "full":
        return "none, ground-truth masks"
    if not config.trains_classifier:
        return "none, imported"
    inference = config.localize.description() if config.localize.related else "single round"
    if config.refines_maps and not config.localize.related:
        inference += ", pixel correlation"
    return inference + _PARTNER_TEXTS[config.classifier.attention_partner]


def _check_case(definition: CaseDefinition) -> None:
    """Raises a `UserError` if a case sets a key of the study, or ends at an unknown stage."""
    shared_keys = sorted({"sources", "recipe", "seed"} & set(definition.values))
    if shared_keys:
        raise UserError(
            f"case {definition.name} sets {' and '.join(shared_keys)}",
            "values of other keys",
            "write `sources` and `recipe` next to `set`, and choose seeds by --seeds",
        )

    if definition.until not in (None, *LAST_STAGES):
        raise UserError(
            f"{definition.name}: until = {definition.until}", f"one of {', '.join(LAST_STAGES)}", "choose one of them"
        )
