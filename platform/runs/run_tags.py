"""Tags that users give to runs: notes and labels by key, kept in the run's record and in its MLflow run."""

import re
from collections.abc import Mapping, Sequence

from mcis.datasets.errors import UserError
from mcis.platform.runs.locks import hold_run
from mcis.platform.runs.tracking import set_tags
from mcis.platform.runs.workspace import Workspace

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_RESERVED = ("code", "recipe", "seed", "sources", "stopped", "study")
"""Keys of tags that runs have in MLflow by themselves."""


def parse_tags(texts: Sequence[str]) -> dict[str, str]:
    """Parses texts KEY=VALUE.

    Raises:
        UserError: A text has no `=`, its key is not valid, or two texts give different values to a key.
    """
    tags: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not _KEY.fullmatch(key) or key in _RESERVED:
            raise UserError(
                f"the tag {text}",
                f"KEY=VALUE, whose key has at most 64 letters, digits, - and _, and is none of {', '.join(_RESERVED)}",
                "correct it, for example note='with flips'",
            )
        if tags.setdefault(key, value) != value:
            raise UserError(
                f"two values of the tag {key}: {tags[key]} and {value}", "one value for each tag", "leave one out"
            )
    return tags


def tag_run(workspace: Workspace, name: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Sets tags of a run or study. A tag with an empty value is removed.

    Args:
        workspace: The workspace.
        name: Name of the run or study.
        tags: Tags to set. Without any, nothing is changed.

    Returns:
        All tags of the run.

    Raises:
        UserError: There is no such run; or, if there are tags to set, the run is in progress, or MLflow's store does
            not answer.
    """
    present = _tags_of(workspace, name)
    if not tags:
        return present
    with hold_run(workspace, name):
        kept = {key: value for key, value in (_tags_of(workspace, name) | dict(tags)).items() if value}
        workspace.update_record(name, tags=kept)
        set_tags(workspace, name, tags)
    return kept


def _tags_of(workspace: Workspace, name: str) -> dict[str, str]:
    """Returns the tags of a run or study, or raises a UserError if there is none of this name."""
    workspace.run(name, create=False)  # raises an error for a name that cannot be one
    record = workspace.record(name)
    if record is None:
        raise UserError(f"no run {name} in {workspace.root}", "the name of a run", "list them with `mcis runs`")
    return record.tags
