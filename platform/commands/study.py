"""The commands of `mcis study`: the paper's ablations as studies of many runs, and hyperparameter search."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import typer

from mcis.platform.commands.errors import plain_errors
from mcis.platform.commands.options import (
    Configuration,
    Name,
    Overrides,
    Verbose,
    WorkspaceFolder,
    grouped,
    parse_stage,
)
from mcis.platform.config.keys import STAGE_NAMES
from mcis.platform.runs.workspace import DEFAULT_WORKSPACE, Workspace

study_app = typer.Typer(help="Ablations as studies of many runs, and hyperparameter search.", no_args_is_help=True)

Parallel = Annotated[
    int, typer.Option(min=1, help="Maximum number of trials that run at a time; each reserves its CPUs and GPUs.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the content of study.json to stdout, and everything else to stderr.")
]
TableFormat = Literal["markdown", "latex", "csv"]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print all scores as CSV to stdout, and everything else to stderr.")]


@study_app.command(
    name="run",
    epilog="Examples: `mcis study run table5 voc --voc VOCdevkit/VOC2012 --name table5 --recipe scratch` · "
    "`mcis study run effect photos.csv --name effect --until localize --seeds 3`",
)
@grouped
def run_study(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="The paper's tables: table1 (1a to 1c), table2, table3, table4, table5, fully-supervised; further "
            "studies: effect, domains, hops, lid, segmenter; or a TOML file of your own.",
        ),
    ],
    configuration: Configuration,
    overrides: Overrides,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    until: Annotated[
        str,
        typer.Option(
            parser=parse_stage,
            autocompletion=lambda: STAGE_NAMES,
            metavar="STAGE",
            help="Last stage of the trials; pseudo_masks trains no segmentation network. Some cases end earlier.",
        ),
    ] = "evaluate",
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="CASE", help="Run only this case of the study. Repeatable.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs of each case. Their seeds start with the configuration's seed.")
    ] = 1,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Also predict VOC's test images (data.test_list, by default its list test), and write an archive for "
            "VOC's evaluation server for each case and seed. Give it in the first call: the index contains the images.",
        ),
    ] = False,
    parallel: Parallel = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    verbose: Verbose = False,
) -> None:
    """Run the cases of a study with several seeds, and compare them with each other and with the paper's results.

    The same command continues a study that was interrupted.
    """
    with plain_errors(verbose), _stdout_for_data(as_json=as_json, as_csv=as_csv) as write:
        from mcis.tuning.definition import read_definition, select_cases
        from mcis.tuning.studies import Study
        from mcis.tuning.studies import run_study as run
        from mcis.tuning.tables import cases_csv

        definition = read_definition(study)
        definition.refuse_source(configuration.named_source)
        resolved = configuration.resolve(overrides, default_source=definition.first_source)
        if cases:
            definition = select_cases(definition, cases)
        result = run(
            Study(
                kind=study,
                name=name,
                resolved=resolved,
                workspace=Workspace(workspace),
                num_seeds=seeds,
                until=until,
                predicts_test=test,
                parallel=parallel,
                verbose=verbose,
            ),
            definition,
        )

        if as_json:
            write(json.dumps(result.as_json(), indent=2) + "\n")
        if as_csv:
            write(cases_csv(result.cases, result.paper_column))


@study_app.command(
    epilog="Example: `mcis study search photos.csv --name wide --axis 'localize.related=integer(0,32)' "
    "--axis 'classifier.optimizer.learning_rate=loguniform(1e-4,1e-2)' --trials 30`"
)
@grouped
def search(
    configuration: Configuration,
    overrides: Overrides,
    name: Name,
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="KEY=FORM(...)",
            help="A key and its range: uniform(low,high), loguniform, integer, logint or choice(a,b,...). Repeatable.",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="Score to maximize: val_map, maps, masks, or, of another split than the reported one, segmentation or "
            "segmentation-crf."
        ),
    ] = "maps",
    trials: Annotated[int, typer.Option(min=1, help="Number of trials, including those of earlier calls.")] = 30,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time limit, after which all trials end.", show_default="none")
    ] = None,
    halving: Annotated[
        int,
        typer.Option(
            min=0,
            help="Reduction factor N of successive halving: at validations 1, N, N^2, ... of the classifier, the best "
            "1/N of the trials continue; 0 = all trials continue.",
        ),
    ] = 3,
    parallel: Parallel = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    verbose: Verbose = False,
) -> None:
    """Search the values that maximize a score: Optuna proposes them, successive halving stops bad trials early.

    The same command continues a search that was interrupted, or, with more --trials, one that finished.
    """
    with plain_errors(verbose), _stdout_for_data(as_json=as_json, as_csv=as_csv) as write:
        from mcis.datasets.errors import UserError
        from mcis.tuning.search import run_search, search_csv, search_json
        from mcis.tuning.search_space import Search, parse_axes

        if halving == 1:
            raise UserError("--halving 1", "2 or more, or 0 to continue all trials", "use the default, 3")
        requested_search = Search(
            name=name,
            resolved=configuration.resolve(overrides),
            workspace=Workspace(workspace),
            axes=parse_axes(axes or []),
            objective=objective,
            trials=trials,
            minutes=minutes,
            halving=halving,
            parallel=parallel,
            verbose=verbose,
        )
        result = run_search(requested_search)

        if as_json:
            write(json.dumps(search_json(requested_search, result), indent=2) + "\n")
        if as_csv:
            write(search_csv(requested_search, result))


@study_app.command(
    name="table", epilog="Examples: `mcis study table effect` · `mcis study table table5 --format latex > table5.tex`"
)
def write_table(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a study that has run.")],
    form: Annotated[
        TableFormat,
        typer.Option("--format", help="markdown and latex round numbers; csv has a row per case and all digits."),
    ] = "markdown",
    workspace: WorkspaceFolder = DEFAULT_WORKSPACE,
) -> None:
    """Print the tables of a study for a document: scores, the paper's results, differences with intervals, units."""
    with plain_errors(resumes=False):
        from mcis.tuning.case_scores import column_descriptions
        from mcis.tuning.studies import StudyResult
        from mcis.tuning.table_formats import latex, markdown
        from mcis.tuning.tables import summary_csv, written_tables

        result = StudyResult.read(Workspace(workspace, create=False).run(name, create=False))
        parts = (result.cases, result.differences, result.paper_column, column_descriptions(result.meanings))
        if form == "csv":
            text = summary_csv(*parts)
        elif form == "latex":
            text = latex(written_tables(*parts))
        else:
            text = markdown(written_tables(*parts))
        typer.echo(text, nl=False)


@contextlib.contextmanager
def _stdout_for_data(*, as_json: bool, as_csv: bool) -> Iterator[Callable[[str], None]]:
    """Sends everything that the block prints, also Ray's messages, to stderr if stdout is for data.

    Yields:
        A function that writes text to stdout.

    Raises:
        UserError: Both formats are asked for.
    """
    from mcis.datasets.errors import UserError
    from mcis.platform.runs.progress import console

    if as_json and as_csv:
        raise UserError("--json and --csv", "one of them", "leave one of them out")
    stdout = sys.stdout
    with contextlib.ExitStack() as redirected:
        if as_json or as_csv:
            console.stderr = True
            redirected.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield lambda text: typer.echo(text, file=stdout, nl=False)
