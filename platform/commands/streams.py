"""Prepares the standard streams of a command: closed ones, and ones that cannot encode every character."""

import os
import sys


def prepare_streams() -> None:
    """Opens the standard streams that are closed, and makes the others replace characters that they cannot encode.

    If Python's encoding of file names is not UTF-8, the process is replaced by one in Python's UTF-8 mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        _restart_in_utf8_mode()
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _restart_in_utf8_mode() -> None:
    """Starts the same command in Python's UTF-8 mode. The streams keep the encoding that the terminal expects."""
    encoding = getattr(sys.stdout, "encoding", "ascii")
    environment = os.environ | {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{encoding}:replace"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def _open_closed_streams() -> None:
    """Connects closed standard streams, as a daemon has them, to the null device.

    Otherwise, the next files that the process opens would get the numbers of the streams, and everything that a
    library or child process prints would be written into these files.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue

        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)  # by child processes
        stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
