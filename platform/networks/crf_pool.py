"""Runs the dense CRF in processes of its own, next to the network.

pydensecrf holds Python's global lock while it computes, so threads would not run in parallel. The processes load
neither torch nor the network.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.models.crf import CrfParameters, refine, shrunk


class CrfPool:
    """Refines label probabilities by the dense CRF, in the calling process or in others.

    Args:
        processes: Number of processes, which start with the first call and end with this process. Threads may call
            the pool in parallel. 0: the calling process.
    """

    def __init__(self, parameters: CrfParameters, processes: int = 0):
        self.parameters = parameters
        self.pool = None
        if processes:
            # A forked copy of this process could inherit locks that torch's threads hold.
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(processes, context, _end_with_parent)

    def __call__(self, rgb: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
        """Refines the probabilities of an image.

        Args:
            rgb: The image, (H, W, 3).
            probabilities: (L, H, W).

        Returns:
            (L, H', W') at the size at which the CRF runs.

        Raises:
            UserError: A process was killed.
        """
        rgb, probabilities = shrunk(rgb, probabilities, self.parameters.max_side)
        if self.pool is None:
            return refine(rgb, probabilities, self.parameters)
        try:
            return self.pool.submit(refine, rgb, probabilities, self.parameters).result()
        except BrokenProcessPool:
            raise UserError(
                f"a process of the dense CRF was killed at an image of {rgb.shape[1]}x{rgb.shape[0]} pixels",
                "enough memory for the dense CRF",
                "lower predict.crf.max_side or data.max_side",
            ) from None

    def close(self) -> None:
        """Ends the processes and drops work that has not started."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Makes this process end with its parent, which may be killed; it would otherwise wait for work forever.

    Ctrl-C at the terminal reaches both processes and is handled by the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
