"""Memory of processes that compute: what tensors free stays in the process for the next ones, where the allocator can.

glibc gives a large block back to the operating system when it is freed, and asks for it again a moment later; each of
its pages is then zeroed and mapped anew. On CPUs this takes a good part of a training step (benchmarks/allocation.py).
GPUs have torch's own allocator. Only processes that compute are told so, by a call rather than by variables that all of
Ray's processes would inherit, and that a cluster's would not.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_SETTINGS = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}
"""M_MMAP_THRESHOLD: blocks below 1 GiB come from the heap; M_TRIM_THRESHOLD: up to 2 GiB that are free at the heap's
end stay (the largest C int); M_TOP_PAD: the heap grows by at least 64 MiB, which take no memory until they are used."""
_OF_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables by which a user sets the same."""


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, from now on.

    Returns:
        Whether it does: not where the user set the allocator, nor where it is not glibc's.
    """
    libc = ctypes.CDLL(None)
    if any(name in os.environ for name in _OF_USERS) or not hasattr(libc, "mallopt"):
        return False
    return all([libc.mallopt(name, value) for name, value in _SETTINGS.items()])


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Lets this process keep what it frees within the block; behind it, what is free goes back to the system.

    For processes that outlive their work, as Ray's do.
    """
    if not keep_freed_memory():
        yield
        return
    try:
        yield
    finally:
        ctypes.CDLL(None).malloc_trim(0)
