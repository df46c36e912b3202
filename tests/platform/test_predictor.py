"""Images that are read smaller have predictions of their files' size and small masks; truth is no saliency map."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mcis.datasets.errors import UserError
from mcis.datasets.images.decode import fit_picture
from mcis.datasets.images.label_masks import decode_labels
from mcis.datasets.index import INDEX_SCHEMA
from mcis.datasets.tables.shards import Shards
from mcis.models.crf import CrfParameters
from mcis.models.grids import pixel_grids
from mcis.platform.config.resolve import resolve
from mcis.platform.networks import predictor
from mcis.platform.networks.crf_pool import CrfPool
from mcis.platform.outputs.tables import map_rows
from mcis.platform.stages import predict, pseudo_masks
from mcis.platform.stages.pseudo_masks.making import MakeMasks
from mcis.platform.stages.pseudo_masks.needed_files import check_saliency_is_no_truth


class Halves(nn.Module):
    """A segmenter of two labels that says 1 on the left half of its image; keeps the sizes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(tuple(images.shape[2:]))
        left = torch.zeros(len(images), *images.shape[2:])
        left[..., : images.shape[3] // 2] = 9
        return torch.stack([torch.full_like(left, 4.0), left], dim=1)


@pytest.fixture
def rows(tmp_path: Path) -> pa.Table:
    Image.new("RGB", (80, 60), (200, 10, 10)).save(tmp_path / "a.png")
    saliency = np.zeros((60, 80), np.uint8)
    saliency[:, :40] = 255
    Image.fromarray(saliency).save(tmp_path / "saliency.png")
    row = {"image_id": "a", "uri": str(tmp_path / "a.png"), "height": 60, "width": 80, "tags": [0]}
    row["content_hash"] = hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    return pa.Table.from_pylist([row | {"is_negative": False, "saliency_uri": str(tmp_path / "saliency.png")}])


@pytest.mark.parametrize(("max_side", "size"), [(None, (60, 80)), (40, (30, 40)), (80, (60, 80))])
def test_labels_come_back_at_the_files_size(
    rows: pa.Table, monkeypatch: pytest.MonkeyPatch, max_side: int | None, size: tuple[int, int]
) -> None:
    model = Halves()
    monkeypatch.setattr(predictor, "load_trained", lambda *given: model)
    config = resolve("voc", "scratch", overrides=[f"data.max_side={max_side or 'null'}", "predict.hflip=false"]).config
    rows = rows.drop_columns("tags").append_column("tags", pa.array([[0, 1]]))
    (row,) = predict.PredictRows(config, Path("none"), ("a", "b"))(rows).to_pylist()
    assert row["absent_tags"] == [1]
    assert model.sizes == [size]
    for column in ("plain", "crf"):
        labels = decode_labels(row[column])
        assert labels.shape == (60, 80)
        assert (labels[:, :40] == 1).all()
        assert (labels[:, 40:] == 0).all()


def test_images_refined_in_parallel_have_the_labels_of_images_refined_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, of whatever size, and with the same probabilities to the bit."""
    monkeypatch.setattr(predictor, "load_trained", lambda *given: Halves())
    config = resolve("voc", "scratch", overrides=["predict.hflip=false"]).config
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (side, 2 * side, 3), np.uint8) for side in (20, 9, 33, 14, 21)]
    predicted = []
    trained = predictor.TrainedSegmenter(config, Path("none"), ("a",), max_side=48)
    for processes in (0, 2):
        labeler = predictor.Predictor(trained, gpu=False, processes=processes)
        numbered = [predictor.PredictionInput(number, fit_picture(image, 48)) for number, image in enumerate(images)]
        mapped = list(labeler.map(numbered, lambda number, prediction: (number, prediction)))
        assert [number for number, _ in mapped] == list(range(len(images)))
        predicted.append([prediction for _, prediction in mapped])
        assert [p.labels().shape for p in predicted[-1]] == [image.shape[:2] for image in images]
        labeler.close()
    for one, other in zip(*predicted, strict=True):
        np.testing.assert_array_equal(one.plain, other.plain)
        np.testing.assert_array_equal(one.refined, other.refined)


def test_the_processes_of_the_crf_start_in_a_ray_worker(ray_local: None) -> None:
    import ray

    rgb = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    planes = np.random.default_rng(1).dirichlet(np.ones(3), (9, 12)).astype(np.float32).transpose(2, 0, 1)

    def refined(processes: int) -> np.ndarray:
        refiner = CrfPool(CrfParameters(), processes)
        try:
            return refiner(rgb, planes)
        finally:
            refiner.close()

    inside = ray.get(ray.remote(num_cpus=1)(refined).remote(1))
    np.testing.assert_array_equal(inside, refined(0))


def test_few_images_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is at most as many images ahead as there are processes, one that is made ready, and its own."""
    monkeypatch.setattr(predictor, "load_trained", lambda *given: Halves())
    config = resolve("voc", "scratch", overrides=["predict.crf.iterations=0"]).config
    trained = predictor.TrainedSegmenter(config, Path("none"), ("a",), max_side=None)
    labeler = predictor.Predictor(trained, gpu=False, processes=2)
    read = finished = ahead = 0

    def inputs() -> Iterator[predictor.PredictionInput[None]]:
        nonlocal read, ahead
        for _ in range(12):
            read += 1
            ahead = max(ahead, read - finished)
            yield predictor.PredictionInput(None, fit_picture(np.zeros((8, 8, 3), np.uint8), None))

    for _ in labeler.map(inputs(), lambda *given: None):
        finished += 1
    assert (read, finished) == (12, 12)
    assert ahead == 4


def test_a_process_that_is_killed_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    other_processes = set(multiprocessing.active_children())
    refiner = CrfPool(CrfParameters(), 1)
    rgb = np.zeros((4, 4, 3), np.uint8)
    planes = np.full((2, 4, 4), 0.5, np.float32)
    refiner(rgb, planes)
    (process,) = set(multiprocessing.active_children()) - other_processes
    process.kill()
    process.join()
    with pytest.raises(UserError, match="a process of the dense CRF was killed"):
        refiner(rgb, planes)


def test_the_processes_of_the_crf_end_with_theirs_even_where_that_is_killed() -> None:
    code = """if __name__ == "__main__":
    import multiprocessing, time
    import numpy as np
    from mcis.models.crf import CrfParameters
    from mcis.platform.networks.crf_pool import CrfPool
    refiner = CrfPool(CrfParameters(), 1)
    refiner(np.zeros((4, 4, 3), np.uint8), np.full((2, 4, 4), 0.5, np.float32))
    (process,) = multiprocessing.active_children()
    print(process.pid, flush=True)
    time.sleep(600)
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        with subprocess.Popen([sys.executable, script.name], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            parent.kill()
    for _ in range(200):
        if not _runs(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} is still there")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text() if Path("/proc").is_dir() else True


@pytest.mark.parametrize("background", ["saliency", "crf"])
def test_pseudo_masks_have_the_size_of_images_as_read(rows: pa.Table, background: str, tmp_path: Path) -> None:
    overrides = ["data.max_side=40", f"pseudo_masks.rule={background}", "pseudo_masks.crf.iterations=1"]
    config = resolve("voc", "scratch", overrides=overrides).config
    maps = np.zeros((1, 8, 8), np.float32)
    maps[..., :4] = 1000
    pq.write_table(map_rows(["a"], [0], maps, pixel_grids(8, 8)[0]), tmp_path / "part-00000000-00000001.parquet")
    (row,) = MakeMasks(config, 1, Shards(tmp_path), None, False)(rows).to_pylist()
    labels = decode_labels(row["labels"])
    assert labels.shape == (30, 40)
    assert (labels[:, :16] == 1).all()
    assert (labels[:, 24:] == 0).all()


def test_stages_depend_on_the_size_alone_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: pa.Table = INDEX_SCHEMA.empty_table()
    context = cast(Any, None)
    monkeypatch.setattr(pseudo_masks, "split_rows", lambda *given, **named: empty)
    configs = [resolve("voc", "scratch", overrides=[f"data.max_side={side}"]).config for side in ("null", 40)]
    for stage in (predict, pseudo_masks):
        plain, smaller = (stage.inputs(config, context) for config in configs)
        assert plain != smaller


@pytest.mark.parametrize("by", ["the same path", "a link"])
def test_ground_truth_that_is_named_as_saliency_maps_is_refused(tmp_path: Path, by: str) -> None:
    masks, saliency = tmp_path / "masks", tmp_path / "saliency"
    masks.mkdir()
    if by == "a link":
        saliency.symlink_to(masks)
    else:
        saliency = masks / ".." / "masks"

    def rows(folder: Path) -> pa.Table:
        columns = {"image_id": ["a", "b"], "mask_uri": [str(masks / f"{i}.png") for i in "ab"]}
        return pa.table(columns | {"saliency_uri": pa.array([str(folder / "a.png"), None], pa.string())})

    check_saliency_is_no_truth(rows(tmp_path / "others"))
    with pytest.raises(UserError, match="saliency maps of 1 of 2 training images are their ground-truth masks: a"):
        check_saliency_is_no_truth(rows(saliency))
