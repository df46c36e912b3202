"""The command line `mcis`: its commands are the functions of `commands`, which load torch and Ray when they run."""

from typing import Annotated

import typer

from mcis.platform.commands.compare import compare
from mcis.platform.commands.doctor import doctor
from mcis.platform.commands.evaluate import evaluate
from mcis.platform.commands.export import export, import_data_set, import_weights
from mcis.platform.commands.index import index_app
from mcis.platform.commands.predict import predict, suggest
from mcis.platform.commands.run import config_app, demo, run
from mcis.platform.commands.runs import gc, relocate, runs, tag, ui
from mcis.platform.commands.saliency import saliency_app
from mcis.platform.commands.streams import prepare_streams
from mcis.platform.commands.study import study_app
from mcis.platform.commands.submit import submit

app = typer.Typer(
    help="From image tags to segmentation masks, on any number of machines.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `mcis demo`, then `mcis doctor`, then `mcis run photos.csv --name mine`.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mcis.platform.runs.version import project_version

        typer.echo(f"mcis {project_version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """From image tags to segmentation masks, on any number of machines."""


app.command(
    epilog="Examples: `mcis run photos.csv --name mine` · `mcis run photos.csv --name r5 localize.related=5 seed=1` · "
    "`mcis run voc --voc VOCdevkit/VOC2012 --name first --recipe scratch data.sbd=DIR` · "
    "`mcis run voc+web --voc DIR --web DIR --name web` · `mcis run voc --voc DIR --name first --until pseudo_masks` · "
    "`mcis run --config mcis-workspace/runs/first/config.toml --name again seed=2`"
)(run)
app.command(epilog="Example: `mcis demo`, then open the report that it names, or `mcis ui`.")(demo)
app.command(epilog="Examples: `mcis runs` · `mcis runs --tag paper=yes` · `mcis runs --json`")(runs)
app.command(epilog="Examples: `mcis tag mine note='with flips' paper=yes` · `mcis tag mine paper=`")(tag)
app.command(epilog="Example: `mcis relocate --name mine /old/photos /new/photos`")(relocate)
app.command(epilog="Examples: `mcis gc` · `mcis gc --run first --run table5 --delete`")(gc)
app.command(
    epilog="Examples: `mcis compare first second third` · `mcis compare first other/runs/second` · "
    "`mcis compare a-s0,a-s1,a-s2 b-s0,b-s1,b-s2 --html seeds.html`"
)(compare)
app.command(
    epilog="Examples: `mcis evaluate predicted photos.csv --name theirs` · "
    "`mcis evaluate cams photos.csv --name theirs-maps --as maps --maps-format irn`"
)(evaluate)
app.command(
    epilog="Examples: `mcis predict photos --name mine --out predicted` · "
    "`mcis predict a.jpg b.png table.csv --name mine --out predicted predict.crf.iterations=0`"
)(predict)
app.command(epilog="Example: `mcis suggest --name mine --count 50 --out corrected`")(suggest)
app.command(
    "import",
    epilog="Examples: `mcis import coco instances_val.json --images val --out mine --split val` · "
    "`mcis import yolo dataset --out mine` · `mcis import folders photos --out mine --classes cat,dog`",
)(import_data_set)
app.command("import-weights", epilog="Example: `mcis import-weights model_cam.pth --out classifier.pt`")(import_weights)
app.command(
    epilog="Examples: `mcis export predictions --name mine --out masks` · `mcis export masks --name mine --out voc` · "
    "`mcis export masks --name mine --out coco --format coco` · "
    "`mcis export maps --name mine --out cams --format irn` · "
    "`mcis export onnx --name mine --out network.onnx`"
)(export)
app.command(epilog="Examples: `mcis doctor` · `mcis doctor --bench`")(doctor)
app.command(epilog="Example: `mcis ui`")(ui)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Examples: `mcis submit voc --voc /mnt/mcis/data/VOC2012 --workspace /mnt/mcis/workspace --name first "
    "--address http://127.0.0.1:8265` · `mcis submit study run table5 voc --voc DIR --workspace DIR --name table5 "
    "--address URL`",
)(submit)
app.add_typer(config_app, name="config")
app.add_typer(study_app, name="study")
app.add_typer(index_app, name="index")
app.add_typer(saliency_app, name="saliency")


def main() -> None:
    """Runs the command line; the entry point of the console script."""
    prepare_streams()
    app()


if __name__ == "__main__":
    main()
