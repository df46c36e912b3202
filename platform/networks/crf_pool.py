"""The dense CRF in processes beside the network: pydensecrf keeps Python's lock meanwhile, so that threads would wait.

The processes load neither torch nor the network.
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
    """Refines probabilities of labels, in this process or, for the threads that call it, in others.

    Args:
        processes: that refine; 0 = the one that calls. They start with the first call, and end with this process.
    """

    def __init__(self, parameters: CrfParameters, processes: int = 0):
        self.parameters = parameters
        self.pool = None
        if processes:
            context = multiprocessing.get_context("spawn")  # a copy of this process may hold locks of torch's threads
            self.pool = ProcessPoolExecutor(processes, context, _end_with_parent)

    def __call__(self, rgb: NDArray[np.uint8], probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
        """An image (H, W, 3) and its probabilities (L, H, W) -> the refined ones at the size at which the CRF runs;
        UserError where a process was killed."""
        rgb, probabilities = shrunk(rgb, probabilities, self.parameters.max_side)
        if self.pool is None:
            return refine(rgb, probabilities, self.parameters)
        try:
            return self.pool.submit(refine, rgb, probabilities, self.parameters).result()
        except BrokenProcessPool:
            raise UserError(
                f"a process of the dense CRF was killed at an image of {rgb.shape[1]}x{rgb.shape[0]} pixels",
                "memory for it",
                "lower predict.crf.max_side or data.max_side",
            ) from None

    def close(self) -> None:
        """Ends the processes; what they are computing is given up."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Lets this process end with the one that started it, which may be killed: it would wait for work for ever.

    An interrupt at the terminal reaches both, and is the other one's to handle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
