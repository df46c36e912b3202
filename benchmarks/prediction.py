"""Prediction with the CRF beside the network, of the slower of the two alone.

The network has one core and one process of the CRF another, as where a GPU leaves the cores to the CRF. The size at
which the CRF runs is chosen so that both take about as long: where one is much faster there is little to gain. Timed
are rounds of all images: the network alone, the CRF alone, both beside each other, both one after the other.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import machine
import photos
import torch

from mcis.datasets.images.decode import Picture
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_segmenter
from mcis.platform.networks.crf_pool import CrfPool
from mcis.platform.networks.predictor import Photo, Prediction, Predictor
from mcis.platform.networks.trained_segmenter import TrainedSegmenter
from mcis.platform.networks.weights_files import WEIGHTS, save_weights

TARGET, OF_LIMIT = 0.85, 0.9
CLASSES = tuple(f"class {k}" for k in range(20))
SIDES = (100, 120, 140, 160, 180, 200, 220, 240, 260, 280, 300)
TRIED = 4
"""Images that a size of the CRF is tried with."""


def predictor(weights: Path, *overrides: str, processes: int = 0) -> Predictor:
    """The network of recipe `scratch` on 20 classes."""
    config = resolve("voc", "scratch", overrides=overrides).config
    return Predictor(TrainedSegmenter(config, weights, CLASSES, None), gpu=False, processes=processes)


def crf(side: int) -> CrfPool:
    """The CRF of recipe `scratch` at some size, in the process that calls it."""
    return CrfPool(resolve("voc", "scratch", overrides=[f"predict.crf.max_side={side}"]).config.predict.crf)


def predicted(labeler: Predictor, pictures: list[Picture]) -> list[Prediction]:
    """The predictions of all pictures."""
    return list(labeler.map((Photo(None, picture) for picture in pictures), lambda _, prediction: prediction))


def refined(refiner: CrfPool, predictions: list[Prediction]) -> None:
    """The CRF alone, in this process."""
    for prediction in predictions:
        refiner(prediction.picture.rgb, prediction.plain)


class Apart:
    """The CRF of predictions that lie ready, in a process of its own that nothing is handed to."""

    def __init__(self, refiner: CrfPool, predictions: list[Prediction]):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, _keep, (refiner, predictions))
        self.pool.submit(_refine_kept, 1).result()

    def beside(self, work: Callable[[], object]) -> None:
        """Both, to the end of the later one."""
        refining = self.pool.submit(_refine_kept, None)
        work()
        refining.result()


_kept: list[tuple[CrfPool, list[Prediction]]] = []


def _keep(refiner: CrfPool, predictions: list[Prediction]) -> None:
    _kept.append((refiner, predictions))


def _refine_kept(count: int | None) -> None:
    refiner, predictions = _kept[0]
    refined(refiner, predictions[:count])


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of some work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Chooses the CRF's size, times the rounds and prints the ratio of the medians."""
    arguments = machine.arguments(__doc__, images=32, rounds=2).parse_args()
    print(machine.describe())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = build_segmenter(resolve("voc", "scratch").config.segmenter, len(CLASSES))
        save_weights(network, folder / WEIGHTS, {})
        plain = predictor(folder, "predict.crf.iterations=0")
        pictures = [plain.read(path) for path in photos.make(folder / "images", arguments.images)]
        predictions = predicted(plain, pictures)
        once = seconds(lambda: predicted(plain, pictures[:TRIED]))
        took = {side: seconds(partial(refined, crf(side), predictions[:TRIED])) for side in SIDES}
        side = min(SIDES, key=lambda side: abs(took[side] - once))
        print(f"an image: network {once / TRIED:.3f} s, CRF at {side} pixels {took[side] / TRIED:.3f} s")
        in_turn = predictor(folder, f"predict.crf.max_side={side}")
        beside = predictor(folder, f"predict.crf.max_side={side}", processes=1)
        predicted(beside, pictures[:1])  # starts the process
        apart = Apart(crf(side), predictions)
        works: dict[str, Callable[[], object]] = {
            "network": lambda: predicted(plain, pictures),
            "CRF": lambda: refined(crf(side), predictions),
            "beside": lambda: predicted(beside, pictures),
            "apart": lambda: apart.beside(lambda: predicted(plain, pictures)),
            "in turn": lambda: predicted(in_turn, pictures),
        }
        measured = machine.in_turn({what: partial(seconds, work) for what, work in works.items()}, arguments.rounds)
        beside.close()
        apart.pool.shutdown()
    medians = machine.medians(measured, "s")
    limit = medians["apart"] / medians["beside"]
    print(f"ratio {limit:.2f} target {OF_LIMIT}: prediction with the CRF, of network and CRF as processes apart")
    ratio = max(medians["network"], medians["CRF"]) / medians["beside"]
    print(f"ratio {ratio:.2f} target {TARGET}: prediction with the CRF, of the slower of network and CRF alone")


if __name__ == "__main__":
    main()
