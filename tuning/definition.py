"""A study as a file: its cases, what makes each, what it is compared with, and the paper's figures beside it.

docs/howto/studies.md shows one.
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
from mcis.platform.config.resolve import Resolved
from mcis.platform.config.settings import sources_of
from mcis.tuning.cases import Case, Contrast, case_of

LIBRARY = Path(__file__).parent / "library"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_PAPER_SETTINGS = {
    ("voc", "VGG-16"): 63.5,
    ("voc", "ResNet-101"): 66.2,
    ("voc+single", "VGG-16"): 64.6,
    ("voc+single", "ResNet-101"): 67.1,
    ("voc+web", "VGG-16"): 65.0,
    ("voc+web", "ResNet-101"): 67.7,
}
"""mIoU in percent on VOC 2012 val by setting and backbone of the segmentation network (tables 1 to 3)."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CaseDefinition(_Strict):
    """A case of a study.

    Attributes:
        name: in the names of its trials.
        group: of cases that stand together in the table.
        setting: the data setting, of sources that the study's setting has; None = the study's.
        values: by dotted key, `set` in the file.
        until: its last stage; None = the study's.
        paper: mIoU in percent of the segmentation network.
        against: name of the case that it is compared with.
        shows: what the difference shows.
    """

    name: str = Field(pattern=_NAME)
    group: str = ""
    setting: str | None = None
    values: dict[str, Any] = Field(default_factory=dict, alias="set")
    until: str | None = None
    paper: float | None = None
    against: str | None = None
    shows: str = ""


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
    """Reads a study of the library by its name, or a file.

    Raises:
        UserError: there is none, or it is no study.
    """
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
        raise UserError(
            f"{path} has {found}", "cases of different names, and `against` one of them", "correct the file"
        )
    return definition


def cases_of(definition: Definition, resolved: Resolved, until: str) -> list[Case]:
    """The cases of a study of this configuration.

    Raises:
        UserError: values that the configuration does not take, or that are not a case's; an unknown last stage, or a
            setting of sources that it does not have.
    """
    stages = pipeline.STAGE_NAMES[pipeline.STAGE_NAMES.index("localize") : -1]
    for case in definition.all_cases():
        if shared := sorted({"setting", "recipe", "seed"} & set(case.values)):
            raise UserError(
                f"case {case.name} sets {' and '.join(shared)}",
                "values of other keys",
                "give a case its `setting` beside `set`; run a study for each recipe; choose seeds by --seeds",
            )
        if case.until not in (None, *stages):
            raise UserError(f"case {case.name}: until = {case.until}", f"one of {', '.join(stages)}", "correct it")
        whole = resolved.config.setting
        if missing := sorted(set(sources_of(case.setting or whole)) - set(sources_of(whole))):
            raise UserError(
                f"case {case.name} is of setting {case.setting}, the study of {whole}",
                "a setting that has all sources of its cases",
                f"run the study of {'+'.join([whole, *missing])}, and name the folders of these sources",
            )
    return [
        case_of(
            resolved,
            name=case.name,
            group=case.group,
            setting=case.setting,
            values=case.values,
            until=case.until or until,
            paper=case.paper,
        )
        for case in definition.all_cases()
    ]


def differences_of(definition: Definition) -> list[Contrast]:
    """The cases that are compared with one another."""
    return [
        Contrast(case=case.name, control=case.against, shows=case.shows) for case in definition.cases if case.against
    ]


def settings_definition(setting: str, recipe: str) -> Definition:
    """The data settings (tables 1 to 3): the first source alone, with each of the others, and with all of them."""
    first, *others = sources_of(setting)
    settings = [first, *(f"{first}+{other}" for other in others), *([setting] if len(others) > 1 else [])]
    network = "VGG-16" if recipe.endswith("_vgg16") else "ResNet-101"
    cases = [
        CaseDefinition(
            name=each.replace("+", "-"),
            setting=each,
            paper=_PAPER_SETTINGS.get((each, network)),
            against=None if each == first else first,
            shows="" if each == first else f"the images of {each.removeprefix(f'{first}+')}",
        )
        for each in settings
    ]
    return Definition(about="What further sources of images bring (tables 1 to 3)", case=tuple(cases))
