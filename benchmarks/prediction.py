"""Prediction with the CRF in parallel with the network, relative to the slower of the two alone.

The network has one core and a process of the CRF has another, as if a GPU left the cores to the CRF. The size of the
images of the CRF is chosen so that both take about the same time, because otherwise there is little to gain. Four
variants are timed on all images: the network alone, the CRF alone, both in parallel, and one after the other.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import harness
import jpeg_files
import torch

from mcis.datasets.images.decode import DecodedImage
from mcis.platform.config.resolve import resolve
from mcis.platform.networks.build import build_segmenter
from mcis.platform.networks.crf_pool import CrfPool
from mcis.platform.networks.predictor import Prediction, PredictionInput, Predictor
from mcis.platform.networks.trained_segmenter import TrainedSegmenter
from mcis.platform.networks.weights_files import WEIGHTS, save_weights

TARGET = 0.85
TARGET_OF_LIMIT = 0.9
CLASSES = tuple(f"class {k}" for k in range(20))
SIDES = (100, 120, 140, 160, 180, 200, 220, 240, 260, 280, 300)
"""Sizes of the CRF's images to choose from, in pixels."""
TRIAL_IMAGES = 4
"""Images with which a size is tried."""


def build_predictor(weights: Path, *overrides: str, processes: int = 0) -> Predictor:
    """Builds the predictor of recipe `scratch` with 20 classes and these processes of the CRF."""
    config = resolve("voc", "scratch", overrides=overrides).config
    return Predictor(TrainedSegmenter(config, weights, CLASSES, None), gpu=False, processes=processes)


def build_crf(side: int) -> CrfPool:
    """Builds the CRF of recipe `scratch` for images of this size. It runs in the calling process."""
    return CrfPool(resolve("voc", "scratch", overrides=[f"predict.crf.max_side={side}"]).config.predict.crf)


def predict_all(predictor: Predictor, images: list[DecodedImage]) -> list[Prediction]:
    """Predicts all images."""
    inputs = (PredictionInput(None, image) for image in images)
    return list(predictor.map(inputs, lambda _, prediction: prediction))


def refine_all(crf: CrfPool, predictions: list[Prediction]) -> None:
    """Runs the CRF on all predictions."""
    for prediction in predictions:
        crf(prediction.image.rgb, prediction.plain)


class CrfProcess:
    """A process that runs the CRF on predictions that it has from the start, so that nothing is sent to it."""

    def __init__(self, crf: CrfPool, predictions: list[Prediction]):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, _initialize_process, (crf, predictions))
        self.pool.submit(_refine_first, 1).result()

    def run_with(self, work: Callable[[], object]) -> None:
        """Runs the CRF and some work of this process in parallel, until both are done."""
        refining = self.pool.submit(_refine_first, None)
        work()
        refining.result()

    def close(self) -> None:
        """Ends the process."""
        self.pool.shutdown()


_process_state: list[tuple[CrfPool, list[Prediction]]] = []


def _initialize_process(crf: CrfPool, predictions: list[Prediction]) -> None:
    _process_state.append((crf, predictions))


def _refine_first(count: int | None) -> None:
    """Runs the CRF on the first `count` predictions of this process. None: all."""
    crf, predictions = _process_state[0]
    refine_all(crf, predictions[:count])


def measure_seconds(work: Callable[[], object]) -> float:
    """Measures the wall seconds of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def choose_side(predictor: Predictor, images: list[DecodedImage], predictions: list[Prediction]) -> int:
    """Returns the size at which the CRF takes about as long as the network."""
    network_seconds = measure_seconds(lambda: predict_all(predictor, images[:TRIAL_IMAGES]))
    crf_seconds = {}
    for side in SIDES:
        crf_seconds[side] = measure_seconds(partial(refine_all, build_crf(side), predictions[:TRIAL_IMAGES]))
    chosen = min(SIDES, key=lambda side: abs(crf_seconds[side] - network_seconds))
    print(
        f"an image: network {network_seconds / TRIAL_IMAGES:.3f} s, "
        f"CRF at {chosen} pixels {crf_seconds[chosen] / TRIAL_IMAGES:.3f} s"
    )
    return chosen


def main() -> None:
    """Chooses the size of the CRF's images, measures all variants and prints the ratios of their medians."""
    options = harness.option_parser(__doc__, images=32, rounds=2).parse_args()
    print(harness.describe_machine())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = build_segmenter(resolve("voc", "scratch").config.segmenter, len(CLASSES))
        save_weights(network, folder / WEIGHTS, {})
        without_crf = build_predictor(folder, "predict.crf.iterations=0")
        paths = jpeg_files.write_jpegs(folder / "images", options.images)
        images = [without_crf.read(path) for path in paths]
        predictions = predict_all(without_crf, images)
        side = choose_side(without_crf, images, predictions)

        sequential = build_predictor(folder, f"predict.crf.max_side={side}")
        parallel = build_predictor(folder, f"predict.crf.max_side={side}", processes=1)
        predict_all(parallel, images[:1])  # starts the process
        crf_process = CrfProcess(build_crf(side), predictions)
        variants: dict[str, Callable[[], object]] = {
            "network": lambda: predict_all(without_crf, images),
            "CRF": lambda: refine_all(build_crf(side), predictions),
            "parallel": lambda: predict_all(parallel, images),
            "limit": lambda: crf_process.run_with(lambda: predict_all(without_crf, images)),
            "sequential": lambda: predict_all(sequential, images),
        }
        sides = {variant: partial(measure_seconds, work) for variant, work in variants.items()}
        measured = harness.measure_in_turn(sides, options.rounds)
        parallel.close()
        crf_process.close()

    medians = harness.print_medians(measured, "s")
    share_of_limit = medians["limit"] / medians["parallel"]
    print(
        f"ratio {share_of_limit:.2f} target {TARGET_OF_LIMIT}: "
        "prediction with the CRF, relative to network and CRF in independent processes"
    )
    ratio = max(medians["network"], medians["CRF"]) / medians["parallel"]
    print(
        f"ratio {ratio:.2f} target {TARGET}: prediction with the CRF, relative to the slower of network and CRF alone"
    )


if __name__ == "__main__":
    main()
