"""A trained network in a folder for others, and as MLflow's logged model, with a signature, registered on request."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import mlflow
import numpy as np
import pyarrow as pa
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import get_model_info
from mlflow.tracking import MlflowClient
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import fit_picture
from mcis.datasets.storage import folders
from mcis.platform.api import Predictor, scores
from mcis.platform.cli import app
from mcis.platform.networks.mlflow_model import log_segmenter
from mcis.platform.networks.predictor import PredictionInput
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.runs.results import MasksResult, write_result
from mcis.platform.runs.scores import SALIENCY_SUPERVISION
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder, Workspace

PREDICT = ("predict.scales=[1.0]", "predict.hflip=false", "predict.crf.iterations=1")


def test_a_logged_network_labels_as_the_run_does(
    trained: Callable[..., Path], tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(2, *PREDICT, sides=(64, 80, 96))
    workspace = Workspace(tmp_path / "workspace")
    written: list[Path] = []
    monkeypatch.setattr(folders, "upload_file", lambda _, path: written.append(path))
    shutil.copy(mlflow_store, workspace.tracking_store)

    def network(client: MlflowClient, experiment: str, run: str, _: RunFolder) -> None:
        log_segmenter(client, experiment, run, RunFolder(folder))

    for identity in ("one", "one", "two"):  # the second call finds the first one's
        tracker = Tracker(workspace, "drawn", identity=identity, log_model=network)
        tracker.model()
        tracker.finish("FINISHED")
        if identity == "one":
            run_id = tracker.run_id
    client = tracker.client
    models = client.search_logged_models([tracker.experiment_id])
    assert sorted(str(model.source_run_id) for model in models) == sorted([run_id, tracker.run_id])
    (logged,) = (model for model in models if model.source_run_id == run_id)
    outputs = client.get_run(run_id).outputs
    assert outputs is not None
    assert [output.model_id for output in outputs.model_outputs] == [logged.model_id]
    assert logged.params["classes"] == "2"
    weights = [path for path in written if path.name == "model.safetensors"]
    assert weights
    assert not any(path.is_relative_to(workspace.root) for path in weights), "would be uploaded and left in a bucket"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
    signature: Any = get_model_info(f"models:/{logged.model_id}").signature
    assert [(str(t.type), t.shape) for t in signature.inputs.inputs] == [("uint8", (-1, -1, 3))]
    assert [(str(t.type), t.shape) for t in signature.outputs.inputs] == [("uint8", (-1, -1))]
    requirements = Path(mlflow.artifacts.download_artifacts(f"models:/{logged.model_id}"), "requirements.txt")
    packages = {line.partition("==")[0] for line in requirements.read_text().splitlines()}
    assert packages >= {"mlflow", "torch"}
    assert "mcis" not in packages, "no package index has it"
    model = mlflow.pyfunc.load_model(f"models:/{logged.model_id}")
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    labels = model.predict(image)
    assert labels.shape == (60, 90)
    assert labels.max() > 0
    np.testing.assert_array_equal(labels, Predictor.load(folder)(image))
    with pytest.raises(MlflowException, match="shape"):
        model.predict(image[..., :1])


@pytest.fixture
def run(trained: Callable[..., Path], scored: Callable[..., Path], tmp_path: Path) -> Path:
    """A run with a trained network, of values that contradict those of other runs, and with scores."""
    init = ["classifier.backbone=small", "segmenter.init=classifier", "segmenter.trainable_stages=0"]
    folder = trained(3, *init, "predict.scales=[0.75,1.0]", "predict.crf.iterations=2", sides=(64, 80, 96))
    workspace = Workspace(folder.parent.parent)
    (tmp_path / "vgg.pth").touch()
    scored(workspace.root, "scored", f"weights.classifier_backbone={tmp_path / 'vgg.pth'}", data=tmp_path / "data")
    evaluated = {"evaluate": workspace.outputs("scored")["evaluate"]}
    workspace.record_outputs("drawn", workspace.outputs("drawn") | evaluated)
    return folder


def test_a_network_in_a_folder_predicts_as_its_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, before and after the CRF; by a folder or the hub's, written again, and by the command."""
    command, out = CliRunner(), tmp_path / "mine"
    named = ["--workspace", str(run.parent.parent), "--name", run.name]
    done = command.invoke(app, ["export", "pretrained", *named, "--out", str(out)])
    assert done.exit_code == 0, done.output
    fetched = {("user/mine", "abc"): str(out)}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, *, revision, **_: fetched[name, revision])
    Predictor.from_pretrained(out).save_pretrained(tmp_path / "again")
    predictors = [Predictor.load(run), Predictor.from_pretrained(tmp_path / "again")]
    predictors.append(Predictor.from_pretrained("user/mine", revision="abc"))
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    item = PredictionInput(None, fit_picture(image, predictors[0].max_side))
    first, *others = (next(each.map([item], lambda _, prediction: prediction)) for each in predictors)
    assert first.image.rgb.shape == (53, 80, 3)
    for other in others:
        np.testing.assert_array_equal(other.plain, first.plain)
        np.testing.assert_array_equal(other.refined, first.refined)
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    card, text = huggingface_hub.ModelCard.load(out / "README.md"), (out / "README.md").read_text()
    assert card.data.library_name == "mcis"
    assert "3 images with image-level tags only" in text
    assert "weights vgg.pth" in text
    assert str(tmp_path) not in text, "the card is published"
    for score in scores(run):
        assert f"| {score.title}, {score.name} | {score.miou:.1f} | split val, images 8, " in text
    Image.fromarray(image).save(tmp_path / "a.png")
    arguments = ["predict", str(tmp_path / "a.png"), "--out", str(tmp_path / "out"), "--model", str(out)]
    assert command.invoke(app, arguments).exit_code == 0
    np.testing.assert_array_equal(Image.open(tmp_path / "out/masks/a.png"), first.labels())
    assert "error: --name and --model" in command.invoke(app, [*arguments, *named]).output


@pytest.mark.parametrize(
    ("rule", "cue", "trained_on"),
    [
        ("auto", "saliency, crf for 2 of 3", f"pseudo masks with saliency maps ({SALIENCY_SUPERVISION})"),
        ("auto", "crf", "pseudo masks with corrected masks"),
        ("crf", "crf", None),
    ],
)
def test_the_card_names_the_saliency_maps_that_pseudo_masks_used(
    trained: Callable[..., Path], tmp_path: Path, rule: str, cue: str, trained_on: str | None
) -> None:
    """In each case an image has a saliency map. In the second one, this image has a corrected mask."""
    overrides = [f"pseudo_masks.rule={rule}"]
    if trained_on and "corrected" in trained_on:
        overrides.append(f"data.corrected_masks={tmp_path}")
    folder = trained(2, *overrides, sides=(64, 80, 96))
    workspace = Workspace(folder.parent.parent)
    outputs = workspace.outputs("drawn")
    index = read_table(outputs["index"] / "index.parquet")
    position = index.schema.get_field_index("saliency_uri")
    uris = pa.array(["a.png", None, None], pa.string())
    write_table(outputs["index"] / "index.parquet", index.set_column(position, "saliency_uri", uris))
    outputs["pseudo_masks"] = workspace.output("pseudo_masks", "drawn")
    outputs["pseudo_masks"].mkdir()
    write_result(outputs["pseudo_masks"], MasksResult(background_cue=cue), key="drawn")
    workspace.record_outputs("drawn", outputs)

    Predictor.load(folder).save_pretrained(tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    supervision = f"image-level tags and {trained_on}" if trained_on else "image-level tags only"
    assert f"Trained on 3 images with {supervision}.\n" in text


def changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        about = json.loads((folder / "config.json").read_text())
        for key, value in values.items():
            about["values"][key.replace("__", ".")] = value
        (folder / "config.json").write_text(json.dumps(about))

    return change


def unsafe(folder: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return shutil.copy, (__file__, str(folder / "ran"))

    (folder / "model.safetensors").write_bytes(pickle.dumps(Hostile()))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (unsafe, "no file of tensors only"),
    "weights by another name": (lambda f: (f / "model.safetensors").rename(f / "weights.pt"), "lacks config.json or"),
    "JSON without end": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is damaged"),
    "another section": (changed(data__tags__allow_absolute=True), "config.json is damaged"),
    "an unknown key": (changed(segmenter__widht=3), "did you mean segmenter.width"),
    "another shape": (changed(segmenter__width=17), "does not fit this configuration"),
    "a terabyte of weights": (changed(segmenter__width=10**6), "does not fit this configuration"),
    "more than fits an address": (changed(segmenter__width=10**15), "config.json: no network"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused(run: Path, tmp_path: Path, case: str) -> None:
    change, found = HOSTILE[case]
    Predictor.load(run).save_pretrained(tmp_path / "mine")
    change(tmp_path / "mine")
    with pytest.raises(UserError, match=found):
        Predictor.from_pretrained(tmp_path / "mine")
    assert not (tmp_path / "mine" / "ran").exists()


def test_what_is_no_folder_and_no_repository_is_an_error() -> None:
    with pytest.raises(UserError, match="is no folder, and cannot be fetched from the hub"):
        Predictor.from_pretrained("no/such/folder")
