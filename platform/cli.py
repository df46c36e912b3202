"""The command line: `mcis demo`, `run`, `index`, `study`, `config show`, `doctor`, `ui`; Ray and torch come late."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="From image tags to segmentation masks, on any number of machines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Start with `mcis demo`, then `mcis doctor`, then `mcis run voc --voc VOCdevkit/VOC2012 --name first`.",
)
config_app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)
study_app = typer.Typer(help="The paper's ablations as sweeps.", no_args_is_help=True)
index_app = typer.Typer(
    help="Index image sources: verify every image, list what was rejected and why, look at what there is.",
    no_args_is_help=True,
)
app.add_typer(config_app, name="config")
app.add_typer(study_app, name="study")
app.add_typer(index_app, name="index")

Setting = Annotated[
    str, typer.Argument(help="Image sources: voc, voc+single, voc+web, lid, tags, or others of them joined by +.")
]
Name = Annotated[str, typer.Option(help="Name of the run; the same name goes on where it stopped.")]
Voc = Annotated[Path | None, typer.Option(help="Folder VOC2012 of a PASCAL VOC 2012 devkit.")]
Single = Annotated[Path | None, typer.Option(help="Folder of single-label images: ImageNet CLS-LOC or Caltech-256.")]
Web = Annotated[Path | None, typer.Option(help="Folder of crawled images, <class>/<file>.")]
Lid = Annotated[Path | None, typer.Option(help="Folder of the LID challenge, or of any data set with list files.")]
Tags = Annotated[str | None, typer.Option(help="Your own images and tags: path or URI of a .csv, .jsonl or .parquet.")]
Recipe = Annotated[
    str, typer.Option(help="Preset: paper, released (both need ImageNet weights and a GPU) or small (CPU).")
]
WorkspaceFolder = Annotated[
    Path, typer.Option("--workspace", envvar="MCIS_WORKSPACE", help="Folder of runs, shared stages and MLflow's store.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value; see `mcis config show`.")
]
Until = Annotated[str | None, typer.Option(help="Last stage to compute.")]
From = Annotated[str | None, typer.Option("--from", help="Compute this stage and all after it again.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the workers' output and whole tracebacks.")]

_DEFAULT_WORKSPACE = Path("mcis-workspace")


@contextlib.contextmanager
def _plain_errors(verbose: bool = False) -> Iterator[None]:
    """Ends the command with one clear message and a non-zero status where its owner can mend the matter."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        _end(interruption)
    except Exception as error:
        from mcis.platform.runtime import user_error_in

        known = user_error_in(error)
        if known is None or verbose:
            raise
        _end(known)


def _end(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        typer.echo("\ninterrupted: what is finished is kept; the same command goes on from there", err=True)
        raise typer.Exit(130)
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def _options(**given: Path | str | None) -> dict[str, Any]:
    """Dotted keys of the options that were given; local paths become absolute, as workers have folders of their own."""
    options = {}
    for name, value in given.items():
        if value is not None:
            text = str(value)
            options[f"data.{name}"] = text if "://" in text else str(Path(text).expanduser().resolve())
    return {_KEYS.get(key, key): value for key, value in options.items()}


_KEYS = {
    "data.single": "data.single.root",
    "data.web": "data.web.root",
    "data.lid": "data.lid.root",
    "data.tags": "data.tags.table",
    "data.class_file": "data.single.classes",
    "data.subset": "data.single.subset",
}


@app.command(
    epilog="Examples: `mcis run voc --voc VOCdevkit/VOC2012 --name first --recipe small` · "
    "`mcis run voc+web --voc DIR --web DIR --name web` · `mcis run tags --tags photos.csv --name mine` · "
    "`mcis run voc --voc DIR --name first --until pseudo_masks` · "
    "`mcis run voc --voc DIR --name r5 --set localize.related=5 --set seed=1`"
)
def run(
    setting: Setting,
    name: Name,
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Until = None,
    start: From = None,
    verbose: Verbose = False,
) -> None:
    """Walk from tags to masks: index, classifier, localization maps, pseudo masks, segmenter, predictions, scores.

    A second call with the same name computes only what is missing or changed.
    """
    with _plain_errors(verbose):
        from mcis.platform.settings import resolve

        options = _options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        resolved = resolve(setting, recipe, options, assignments or [])
        _journey(resolved, workspace, name, until=until, start=start, verbose=verbose)


@app.command(epilog="Example: `mcis demo`, then open the report that it names, or `mcis ui`.")
def demo(
    name: Name = "demo",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """The whole journey on an embedded data set, drawn on the spot: masks that no one drew, in a few minutes."""
    with _plain_errors(verbose):
        from mcis.platform.demo import demo_settings

        _journey(demo_settings(workspace, assignments or []), workspace, name, verbose=verbose)


def _journey(resolved: Any, workspace: Path, name: str, *, verbose: bool, **options: Any) -> None:
    from mcis.platform import pipeline
    from mcis.platform.runtime import ray_session
    from mcis.platform.terminal import show_result
    from mcis.platform.workspace import Workspace

    place = Workspace(workspace)
    pipeline.check(resolved.config, place)
    with ray_session(resolved.config.compute, verbose=verbose):
        result = pipeline.run(resolved, place, name, **options)
    show_result(result)


@config_app.command("show", epilog="Example: `mcis config show voc --recipe released --set localize.related=5`")
def config_show(
    setting: Setting,
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    assignments: Assignments = None,
) -> None:
    """Every key with its value, where the value comes from, and what it means."""
    with _plain_errors():
        from mcis.platform.settings import resolve
        from mcis.platform.terminal import show_config

        options = _options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        show_config(resolve(setting, recipe, options, assignments or []))


@study_app.command(
    "references", epilog="Example: `mcis study references --voc VOCdevkit/VOC2012 --name table5 --recipe small`"
)
def study_references(
    name: Name,
    setting: Setting = "voc",
    voc: Voc = None,
    single: Single = None,
    web: Web = None,
    lid: Lid = None,
    tags: Tags = None,
    recipe: Recipe = "paper",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    until: Annotated[
        str, typer.Option(help="Last stage of each trial; pseudo_masks leaves the segmenter out.")
    ] = "evaluate",
    parallel: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    verbose: Verbose = False,
) -> None:
    """The number of related images, 0 to 5, over one trained classifier, as Ray Tune trials (table 7 of the paper)."""
    with _plain_errors(verbose):
        from mcis.platform.settings import resolve
        from mcis.tuning.studies import references

        options = _options(voc=voc, single=single, web=web, lid=lid, tags=tags)
        resolved = resolve(setting, recipe, options, assignments or [])
        references(resolved, workspace, name, until=until, parallel=parallel, verbose=verbose)


@app.command("import-weights", epilog="Example: `mcis import-weights model_cam.pth --out classifier.pt`")
def import_weights(
    file: Annotated[Path, typer.Argument(help="Checkpoint of the authors' released code.")],
    out: Annotated[Path, typer.Option(help="Where the converted weights go.")] = Path("classifier.pt"),
) -> None:
    """Convert a released classifier; use it by --recipe released --set weights.classifier=FILE."""
    with _plain_errors():
        from mcis.models.released import read_released
        from mcis.platform.training import save

        state = read_released(file)
        save(state, out)
        classes = len(state["phi.bias"])
        typer.echo(f"{len(state)} tensors, {classes} classes: {out}")
        typer.echo(
            f"use: mcis run voc --voc DIR --name NAME --recipe released --set weights.classifier={out.resolve()}"
        )


@app.command(epilog="Example: `mcis export predictions --name mine --out masks`")
def export(
    what: Annotated[str, typer.Argument(help="maps, masks (pseudo masks) or predictions.")],
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
) -> None:
    """PNG files of a run: localization maps with colour overlays, pseudo masks, or predictions, by image id."""
    with _plain_errors():
        from mcis.platform.export import export as write
        from mcis.platform.workspace import Workspace

        typer.echo(f"{write(Workspace(workspace), name, what, out)} pictures below {out}")


Index = Annotated[str, typer.Option("--name", help="Name of the run that the index belongs to.")]
Classes = Annotated[Path | None, typer.Option("--classes", help="File with one class name a line.")]


def _index(
    setting: str, name: str, workspace: Path, assignments: list[str] | None, verbose: bool, **options: Any
) -> None:
    """Builds an index as the first stage of a run and shows it; a run of the same configuration finds it there."""
    with _plain_errors(verbose):
        from mcis.platform import pipeline
        from mcis.platform.runtime import ray_session
        from mcis.platform.settings import resolve
        from mcis.platform.workspace import Workspace

        resolved = resolve(setting, "paper", _options(**options), assignments or [])
        place = Workspace(workspace)
        with ray_session(resolved.config.compute, verbose=verbose):
            pipeline.run(resolved, place, name, until="index")
        _show_index(place, name)


def _show_index(place: Any, name: str) -> None:
    from mcis.platform.stages.index import open_index
    from mcis.platform.terminal import show_index

    found = open_index(place, name)
    show_index(found.index, found.rejects, found.classes, found.notes)


@index_app.command(
    "voc", epilog="Example: `mcis index voc --download data` · `mcis index voc --voc data/VOCdevkit/VOC2012`"
)
def index_voc(
    voc: Voc = None,
    sbd: Annotated[Path | None, typer.Option(help="Folder benchmark_RELEASE of SBD, the augmentation.")] = None,
    download: Annotated[Path | None, typer.Option(help="Fetch VOC 2012 and SBD into this folder first.")] = None,
    classes: Classes = None,
    name: Index = "index-voc",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """PASCAL VOC 2012 with the SBD augmentation: 10,582 train_aug, 1,449 val, 1,456 test."""
    with _plain_errors(verbose):
        if download:
            from mcis.datasets.download import fetch_voc
            from mcis.platform.progress import transfer_bars

            with transfer_bars() as on_progress:
                voc, sbd = fetch_voc(download, on_progress=on_progress)
    _index("voc", name, workspace, assignments, verbose, voc=voc, sbd=sbd, classes=classes)


@index_app.command("single", epilog="Example: `mcis index single --single ILSVRC/Data/CLS-LOC/train`")
def index_single(
    single: Single = None,
    class_file: Annotated[
        Path | None, typer.Option("--classes", help="File of <wnid or folder> -> class name.")
    ] = None,
    subset: Annotated[
        Path | None, typer.Option("--list", help="File with one relative path a line: use these.")
    ] = None,
    name: Index = "index-single",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Single-label images: ImageNet CLS-LOC (by synset) or Caltech-256, mapped to VOC's classes."""
    _index("single", name, workspace, assignments, verbose, single=single, class_file=class_file, subset=subset)


@index_app.command("web", epilog="Example: `mcis index web --web bing`")
def index_web(
    web: Web = None,
    classes: Classes = None,
    name: Index = "index-web",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Crawled images, <class>/<file>; the folder is the tag."""
    _index("web", name, workspace, assignments, verbose, web=web, classes=classes)


@index_app.command("lid", epilog="Example: `mcis index lid --lid LID --set data.lid.masks=val_masks`")
def index_lid(
    lid: Lid = None,
    name: Index = "index-lid",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """List files with class indices: the LID challenge (200 classes)."""
    _index("lid", name, workspace, assignments, verbose, lid=lid)


@index_app.command("tags", epilog="Example: `mcis index tags --tags photos.csv`")
def index_tags(
    tags: Tags = None,
    classes: Classes = None,
    name: Index = "index-tags",
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    assignments: Assignments = None,
    verbose: Verbose = False,
) -> None:
    """Your own images and tags, from a CSV, JSONL or Parquet table; paths or URIs such as s3://."""
    _index("tags", name, workspace, assignments, verbose, tags=tags, classes=classes)


@index_app.command("show")
def index_show(
    name: Index,
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    check_masks: Annotated[bool, typer.Option(help="Compare the tags with the ground-truth masks too.")] = False,
) -> None:
    """Counts of an index: per split, domain and class, rejects by reason, content that is in more than one split."""
    with _plain_errors():
        from mcis.platform.workspace import Workspace

        place = Workspace(workspace)
        _show_index(place, name)
        if check_masks:
            from mcis.platform.stages.index import open_index
            from mcis.platform.terminal import show_disagreements

            found = open_index(place, name)
            show_disagreements(found.index, found.classes)


@index_app.command("browse", epilog="Example: `mcis index browse --name index-voc`, then open the page that it names.")
def index_browse(
    name: Index,
    out: Annotated[Path | None, typer.Option(help="Name of the page; by default in the run's folder.")] = None,
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
) -> None:
    """One HTML page of an index: counts, co-occurrence, pair mix, thumbnails with tags, rejects with reasons."""
    with _plain_errors():
        from mcis.platform.browse import browse_page
        from mcis.platform.stages.index import open_index, pair_kind_shares
        from mcis.platform.workspace import Workspace, written_aside

        place = Workspace(workspace)
        found = open_index(place, name)
        page = browse_page(
            found.index,
            found.rejects,
            found.classes,
            notes=found.notes,
            kinds=pair_kind_shares(found),
            title=f"Index of {name}",
        )
        target = out or place.run(name) / "index.html"
        with written_aside(target) as aside:
            aside.write_text(page, encoding="utf-8")
        typer.echo(f"page: {target}")


@app.command()
def doctor(workspace: WorkspaceFolder = _DEFAULT_WORKSPACE) -> None:
    """Whether torch, GPU, dense CRF, Ray, MLflow, disk and cores are fit for the job, and what to do where not."""
    from mcis.platform.doctor import checks
    from mcis.platform.terminal import show_checks

    found = checks(workspace.expanduser())
    show_checks(found)
    if any(check.state == "bad" for check in found):
        raise typer.Exit(1)


@app.command()
def ui(
    workspace: WorkspaceFolder = _DEFAULT_WORKSPACE,
    port: Annotated[int, typer.Option(help="Port on loopback.")] = 5000,
) -> None:
    """The MLflow UI on the workspace's store, on loopback."""
    with _plain_errors():
        from mcis.platform.tracking import tracking_uri
        from mcis.platform.workspace import Workspace

        place = Workspace(workspace)
        uri = tracking_uri(place)
        typer.echo(f"MLflow UI on http://127.0.0.1:{port} (store {uri}); it takes some seconds to start")
        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
        command += [
            "--default-artifact-root",
            (place.root / "mlflow").as_uri(),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        os.execv(command[0], command)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
