"""What `mcis study run` does, as the function `mcis.study`."""

from collections.abc import Sequence
from pathlib import Path

from mcis.platform.config.resolve import Overrides, location_values, resolve
from mcis.platform.runs.workspace import open_workspace
from mcis.tuning.definition import read_definition, select_cases
from mcis.tuning.studies import Study, StudyResult, run_study


def study(
    study: str | Path,
    source: str | Path | None = None,
    *,
    name: str,
    overrides: Overrides = (),
    recipe: str | None = None,
    config: Path | str | None = None,
    workspace: Path | str | None = None,
    until: str = "evaluate",
    cases: Sequence[str] = (),
    seeds: int = 1,
    parallel: int = 1,
    verbose: bool = False,
    **locations: Path | str | Sequence[Path | str],
) -> StudyResult:
    """Runs the cases of a study with several seeds, and compares them.

    A second call with the same name continues an interrupted study. For the arguments that are not listed see
    `mcis.run`.

    Args:
        study: Name of a study of the library, or path of a TOML file.
        name: Name of the study. Its trials are the runs NAME-CASE-sSEED.
        until: Last stage of the trials.
        cases: Cases of the study to run. Empty: all.
        seeds: Number of runs of each case.
        parallel: Maximum number of trials that run at a time.

    Returns:
        The scores. `result.table()` has a row per case and seed; `result.table().to_pandas()` is a data frame.

    Raises:
        UserError: The study is not possible, or a trial failed.
    """
    definition = read_definition(str(study))
    sources = None if source is None else str(source)
    file = None if config is None else Path(config)
    definition.refuse_source(sources)
    if sources is None and file is None:
        sources = definition.first_source
    if cases:
        definition = select_cases(definition, cases)
    requested = Study(
        kind=str(study),
        name=name,
        resolved=resolve(sources, recipe, location_values(locations), overrides, file=file),
        workspace=open_workspace(workspace),
        num_seeds=seeds,
        until=until,
        parallel=parallel,
        verbose=verbose,
    )
    return run_study(requested, definition)
