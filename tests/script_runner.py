"""Runs the scripts that its standard input names, in one process, because importing torch and Ray takes seconds.

A line of the input is a JSON list: a script and its options. The answer is a line of the output with a JSON list:
whether the script succeeded, and what it printed. With RAY_ADDRESS, the scripts share a connection to that cluster.

    python tests/script_runner.py FOLDER     FOLDER holds modules that the scripts import
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback

from mcis.platform.config.compute import ComputeConfig
from mcis.platform.engine.runtime import ray_session


def run(script: str, *options: str) -> tuple[bool, str]:
    """Runs a script and returns whether it succeeded, and what it printed."""
    sys.argv = [script, *options]
    printed = io.StringIO()
    succeeded = True
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        succeeded = not end.code
        if end.code:
            print(end.code, file=printed)
    except Exception:
        succeeded = False
        traceback.print_exc(file=printed)
    return succeeded, printed.getvalue()


def main() -> None:
    """Answers the lines of the standard input. What libraries print goes to the standard error."""
    sys.path[0] = sys.argv[1]  # instead of this file's folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = ray_session(ComputeConfig()) if "RAY_ADDRESS" in os.environ else contextlib.nullcontext()
    with session:
        for line in sys.stdin:
            print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
