"""A trained network as MLflow's logged model: with a signature, loaded as tensors alone, registered on request."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import get_model_info
from mlflow.tracking import MlflowClient

from mcis.datasets.errors import UserError
from mcis.platform.networks.predictor import Predictor, trained_run
from mcis.platform.networks.served import log_segmenter, write_network
from mcis.platform.runs.files import bytes_in
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import RunFolder, Workspace

PREDICT = ("predict.scales=[1.0]", "predict.mirror=false", "predict.crf.iterations=1")


def test_a_logged_network_labels_as_the_run_does(
    trained: Callable[..., Path], tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(2, *PREDICT, sides=(64, 80, 96))
    workspace = Workspace(tmp_path / "workspace")
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
    assert not [path for path in folder.iterdir() if path.name.startswith(".model-")]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
    signature: Any = get_model_info(f"models:/{logged.model_id}").signature
    assert [(str(t.type), t.shape) for t in signature.inputs.inputs] == [("uint8", (-1, -1, 3))]
    assert [(str(t.type), t.shape) for t in signature.outputs.inputs] == [("uint8", (-1, -1))]
    model = mlflow.pyfunc.load_model(f"models:/{logged.model_id}")
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    labels = model.predict(image)
    assert labels.shape == (60, 90)
    assert labels.max() > 0
    np.testing.assert_array_equal(labels, Predictor.load(folder)(image))
    with pytest.raises(MlflowException, match="shape"):
        model.predict(image[..., :1])


def test_weights_that_would_run_something_are_refused(trained: Callable[..., Path], tmp_path: Path) -> None:
    run = RunFolder(trained(2, *PREDICT))
    folder = tmp_path / "model"
    folder.mkdir()
    write_network(trained_run(run.path), run, folder)
    weights = folder / "weights.pt"
    assert weights.is_symlink(), "nothing is copied twice"
    assert bytes_in(folder) > weights.stat().st_size
    assert not [path for path in folder.iterdir() if path.suffix in (".pkl", ".py")]

    class Hostile:
        def __reduce__(self) -> Any:
            return shutil.copy, (__file__, str(tmp_path / "ran"))

    weights.unlink()
    weights.write_bytes(pickle.dumps(Hostile()))
    from mcis.platform.networks.served import _load_pyfunc

    with pytest.raises(UserError, match="no file of tensors alone"):
        _load_pyfunc(str(folder))
    assert not (tmp_path / "ran").exists()
    (folder / "about.json").write_text('{"classes": [], "max_side": 0}')
    with pytest.raises(UserError, match="no network of mcis"):
        _load_pyfunc(str(folder))
