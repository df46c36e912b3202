"""A study: its cases, what makes each, what it is compared with, and the paper's figures beside it.

Most are files; docs/howto/studies.md shows one. `tuning.paper` has the one that depends on the configuration.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcis.datasets.errors import UserError, unquoted
from mcis.platform import pipeline
from mcis.platform.config.keys import Values
from mcis.platform.config.resolve import Resolved, resolve
from mcis.platform.config.sections import sources_of

LIBRARY = Path(__file__).parent / "library"
_ATTENDED = {"partner": "", "itself": ", trained alone", "wrong_class": ", trained with partners of wrong classes"}
"""What a case's inference says of what images attended to in training."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CaseDefinition(_Strict):
    """A case of a study, a row of its table.

    Attributes:
        name: in the names of its trials and metrics.
        group: of cases that stand together in the table, such as those of one training.
        sources: image sources, a subset of the study's; None = the study's.
        values: what makes the case, by dotted key, beside what all cases of the study share; `set` in the file.
        until: its last stage, where the study's own is no earlier one; None = the study's.
        paper: mIoU in percent of the segmentation network in the paper's tables.
        against: name of the case that it is compared with.
        shows: what the difference shows.
    """

    name: str = Field(pattern=_NAME)
    group: str = ""
    sources: str | None = None
    values: dict[str, Any] = Field(default_factory=dict, alias="set")
    until: str | None = None
    paper: float | None = None
    against: str | None = None
    shows: str = ""


class Case(CaseDefinition):
    """A case of a study of some configuration.

    Attributes:
        inference: how its maps are made, in words.
        related: number of related images R.
    """

    sources: str
    until: str
    inference: str
    related: int


class Definition(_Strict):
    """A study.

    Attributes:
        about: what is asked, in words.
        cases: `case` in the file.
        axes: values by dotted key; of each combination a case.
    """

    about: str
    cases: tuple[CaseDefinition, ...] = Field(default=(), alias="case")
    axes: dict[str, list[Any]] = Field(default_factory=dict)

    def all_cases(self) -> Iterator[CaseDefinition]:
        """The cases, those of the axes last."""
        yield from self.cases
        if self.axes:
            for values in itertools.product(*self.axes.values()):
                of_case = dict(zip(self.axes, values, strict=True))
                yield CaseDefinition(name=_name_of(of_case), set=of_case)


def _name_of(values: dict[str, Any]) -> str:
    """A name of the values: `related-3-threshold-0.2`."""
    texts = [
        f"{key.rpartition('.')[2]}-{value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in values.items()
    ]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(texts)).strip("-.")[:64]


def library() -> list[str]:
    """The names of the studies that come with the project."""
    return sorted(path.stem for path in LIBRARY.glob("*.toml"))


def read_definition(study: str) -> Definition:
    """Reads a study of the library by its name, or a file; UserError where there is none, or it is no study."""
    path = LIBRARY / f"{study}.toml" if study in library() else Path(study)
    expected = f"one of {', '.join(library())}, or a TOML file with cases or axes"
    try:
        definition = Definition.model_validate(tomllib.loads(path.read_bytes().decode()))
        names = [case.name for case in definition.all_cases()]
    except OSError as error:
        raise UserError(f"study {study}: {error.strerror}", expected, "name one of them") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no TOML: {unquoted(error)}", expected, "correct that line") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'study'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path} is no study: {problems}", expected, "see docs/howto/studies.md") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    unknown = sorted({case.against for case in definition.cases if case.against} - set(names))
    if not names or twice or unknown:
        found = f"two cases {', '.join(twice)}" if twice else f"no case {', '.join(unknown)}" if names else "no case"
        raise UserError(f"{path} has {found}", "cases of different names, and `against` one of them", "correct it")
    return definition


def trial_values(resolved: Resolved, values: Values, sources: str | None = None) -> Values:
    """What a trial changes of its recipe: what the user changed, and `values` of its case.

    Where these take another method of localization, the values of the user's own have no place; nor has a contrast in
    a single round, or where its sources leave out some of the user's, their values.
    """
    method = resolved.config.localize.method.name
    without = set(sources_of(resolved.config.sources)) - set(sources_of(sources or resolved.config.sources))
    left_out = [f"data.{source}" for source in without]
    if values.get("localize.method.name", method) != method:
        left_out.append("localize.method.")
    if values.get("localize.related") == 0:
        left_out.append("localize.method.contrastive")
    return {key: value for key, value in resolved.changed().items() if not key.startswith(tuple(left_out))} | values


def configured(resolved: Resolved, values: Values, sources: str | None = None) -> Resolved:
    """The configuration of a trial; UserError where values contradict each other."""
    sources = sources or resolved.config.sources
    return resolve(sources, resolved.config.recipe, trial_values(resolved, values, sources))


def cases_of(definition: Definition, resolved: Resolved, until: str) -> list[Case]:
    """The cases of a study of this configuration; UserError for values that the configuration does not take, or that
    are not a case's; an unknown last stage, or image sources that the study does not have."""
    return [_case(case, resolved, until) for case in definition.all_cases()]


def _case(definition: CaseDefinition, resolved: Resolved, until: str) -> Case:
    if shared := sorted({"sources", "recipe", "seed"} & set(definition.values)):
        raise UserError(
            f"case {definition.name} sets {' and '.join(shared)}",
            "values of other keys",
            "give a case its `sources` beside `set`; run a study for each recipe; choose seeds by --seeds",
        )
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    if definition.until not in (None, *stages):
        raise UserError(f"{definition.name}: until = {definition.until}", f"one of {', '.join(stages)}", "correct it")
    whole = resolved.config.sources
    sources = definition.sources or whole
    if missing := sorted(set(sources_of(sources)) - set(sources_of(whole))):
        raise UserError(
            f"case {definition.name} is of sources {sources}, the study of {whole}",
            "sources that include those of all cases",
            f"run the study of {'+'.join([whole, *missing])}, and name the folders of these sources",
        )
    config = configured(resolved, definition.values, sources).config
    inference = config.localize.description() if config.localize.related else "single round"
    own = {
        "sources": config.sources,
        "until": min(definition.until or until, until, key=pipeline.STAGE_NAMES.index),
        "inference": inference + _ATTENDED[config.classifier.attention_partner],
        "related": config.localize.related,
    }
    return Case(**dict(definition) | own)
