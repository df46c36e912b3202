"""Runs the benchmarks in turn, or those named, and writes their ratios into the table of docs/results.md."""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
HEAD = ["| what | ratio | target | |", "| --- | --- | --- | --- |"]
NOT_BENCHMARKS = ("literal", "machine", "masks", "photos", "run_all", "semi_weak")
FIGURE = re.compile(r"ratio (\S+) target (at most )?(\S+?)(?:: (.+))?")


class Figure(NamedTuple):
    """A ratio, the one that is aimed at, and whether it is to be at most that rather than at least."""

    what: str
    ratio: str
    target: str
    low: bool

    @property
    def missed(self) -> bool:
        """Whether the ratio misses its target."""
        ratio, target = float(self.ratio), float(self.target)
        return ratio > target if self.low else ratio < target

    def row(self) -> str:
        """Its row of the table."""
        side = "at most" if self.low else "at least"
        return f"| {self.what} | {self.ratio} | {side} {self.target} | {'missed' if self.missed else ''} |"


def run(script: Path) -> tuple[list[Figure], str]:
    """The figures of one script, and the machine; its output goes to the terminal as it comes.

    A figure is a line `ratio R target T: what`, or `ratio R target at most T: what` where less is better, the script's
    last one or the last few; of an only one, what it is may be left to the first line of the script.

    Raises:
        RuntimeError: the script failed or did not end in a figure.
    """
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    matches = [match for line in lines if (match := FIGURE.fullmatch(line))]
    if process.returncode or not matches or not FIGURE.fullmatch(lines[-1]):
        raise RuntimeError(f"{script.name} failed or did not end in `ratio R target T`")
    what = (script.read_text().split('"""')[1]).splitlines()[0].rstrip(".")
    machine = next((line.removeprefix("machine: ") for line in lines if line.startswith("machine: ")), "")
    return [Figure(match[4] or what, match[1], match[3], bool(match[2])) for match in matches], machine


def table(rows: dict[str, str], machine: str) -> str:
    """The table's text from its rows by what they are of."""
    return "\n".join([*HEAD, *(rows[what] for what in sorted(rows)), "", f"Measured on {machine}."])


def main() -> None:
    """Runs them and rewrites the table: all of it, or the rows of those that were named."""
    scripts = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in NOT_BENCHMARKS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *scripts], help="benchmarks to run; none = all")
    names = parser.parse_args().names or list(scripts)
    figures, failures, machine, began = [], [], "", time.monotonic()
    for name in names:
        try:
            found, machine = run(scripts[name])
            figures += found
        except RuntimeError as error:
            failures.append(str(error))
    text = RESULTS.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"docs/results.md lacks the lines {BEGIN} and {END} between which the table stands")
    before, rest = text.split(BEGIN, 1)
    old, after = rest.split(END, 1)
    whole = len(names) == len(scripts) and not failures
    kept = [] if whole else [row for row in old.splitlines() if row.startswith("| ")][1:]
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in kept if not row.startswith("| ---")}
    rows |= {figure.what: figure.row() for figure in figures}
    RESULTS.write_text(before + BEGIN + "\n" + table(rows, machine) + "\n" + END + after, encoding="utf-8")
    missed = [figure for figure in figures if figure.missed]
    print(f"{len(figures)} figures in {(time.monotonic() - began) / 60:.0f} min, {len(missed)} miss their target")
    for figure in missed:
        print(f"missed: {figure.what}: {figure.ratio}, {'at most' if figure.low else 'at least'} {figure.target}")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
