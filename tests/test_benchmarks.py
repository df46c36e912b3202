"""Every benchmark can be imported and parses its options, so that a changed signature or name is noticed."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

ASK_FOR_HELP = """
import contextlib, io, json, runpy, sys

helps = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, script
        helps[script] = printed.getvalue()
print(json.dumps(helps))
"""
"""Runs the scripts in one process, because importing torch and Ray takes seconds."""


def test_every_benchmark_parses_its_options() -> None:
    scripts = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
    names = [str(script) for script in scripts]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{ASK_FOR_HELP}", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    helps = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 20
    assert list(helps) == names
    assert all(text.startswith("usage: ") for text in helps.values())
