"""Runs all benchmarks, or the named ones, and writes their ratios to the table in docs/reference/benchmarks.md."""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER.parent / "docs" / "reference" / "benchmarks.md"
BEGIN = "<!-- benchmarks -->"
END = "<!-- /benchmarks -->"
HEAD = ["| script | measured | value | target | missed |", "| --- | --- | --- | --- | --- |"]
NOT_BENCHMARKS = (
    "direct_classifier",
    "growth",  # takes hours
    "harness",
    "jpeg_files",
    "mask_files",
    "run_all",
    "saliency",
    "semi_weak",
)
RATIO_LINE = re.compile(r"ratio (\S+) target (at most )?(\S+?)(?:: (.+))?")


class Ratio(NamedTuple):
    """A measured ratio and its target.

    Attributes:
        script: Name of the script that measured it, as in `make bench ONLY=...`.
        subject: What was measured.
        value: Measured value, as printed.
        target: Target, as printed.
        is_upper_bound: Whether the value must be at most the target. Otherwise it must be at least the target.
    """

    script: str
    subject: str
    value: str
    target: str
    is_upper_bound: bool

    @property
    def misses_target(self) -> bool:
        """Whether the value misses the target."""
        value = float(self.value)
        target = float(self.target)
        return value > target if self.is_upper_bound else value < target

    @property
    def target_text(self) -> str:
        """The target with its direction."""
        return f"{'at most' if self.is_upper_bound else 'at least'} {self.target}"

    def row(self) -> str:
        """Returns the row of the table."""
        missed = "yes" if self.misses_target else ""
        return f"| `{self.script}` | {self.subject} | {self.value} | {self.target_text} | {missed} |"


def run_benchmark(script: Path) -> tuple[list[Ratio], str]:
    """Runs a script and shows its output while it runs.

    A ratio is a line `ratio R target T: subject`, or `ratio R target at most T: subject` if lower is better. A script
    ends with one or more of these lines. Without a subject, the first line of the script's docstring is the subject.

    Returns:
        The ratios, and the description of the machine.

    Raises:
        RuntimeError: The script failed or did not end with a ratio.
    """
    lines = []
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    if process.returncode or not lines or not RATIO_LINE.fullmatch(lines[-1]):
        raise RuntimeError(f"{script.name} failed or did not end with `ratio R target T`")

    default_subject = script.read_text().split('"""')[1].splitlines()[0].rstrip(".")
    ratios = []
    machine = ""
    for line in lines:
        match = RATIO_LINE.fullmatch(line)
        if match:
            value, at_most, target, subject = match.groups()
            ratios.append(Ratio(script.stem, subject or default_subject, value, target, at_most is not None))
        elif line.startswith("machine: "):
            machine = line.removeprefix("machine: ")
    return ratios, machine


def run_benchmarks(scripts: list[Path]) -> tuple[list[Ratio], str, list[str]]:
    """Runs scripts in turn. Returns their ratios, the description of the machine, and the messages of failures."""
    ratios = []
    failures = []
    machine = ""
    for script in scripts:
        try:
            script_ratios, machine = run_benchmark(script)
        except RuntimeError as error:
            failures.append(str(error))
        else:
            ratios += script_ratios
    return ratios, machine, failures


def read_rows(table: str) -> dict[tuple[str, str], str]:
    """Returns the rows of a table by script and subject, without its head."""
    rows = {}
    for line in table.splitlines():
        if line.startswith("| ") and line not in HEAD:
            script, subject = line.removeprefix("| ").split(" | ")[:2]
            rows[script.strip("`"), subject] = line
    return rows


def write_table(ratios: list[Ratio], machine: str, *, keep_rows: bool) -> None:
    """Writes the ratios to the table of docs/reference/benchmarks.md.

    Args:
        machine: Description of the machine.
        keep_rows: Whether to keep the table's other rows.
    """
    text = RESULTS.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"docs/reference/benchmarks.md has no lines {BEGIN} and {END}, which enclose the table")
    before, rest = text.split(BEGIN, 1)
    old_table, after = rest.split(END, 1)
    rows = read_rows(old_table) if keep_rows else {}
    for ratio in ratios:
        rows[ratio.script, ratio.subject] = ratio.row()
    sorted_rows = [rows[key] for key in sorted(rows)]
    table = "\n".join([*HEAD, *sorted_rows, "", f"Measured on {machine}."])
    RESULTS.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Runs the benchmarks and writes the table. If only some were named, or some failed, the other rows stay."""
    scripts = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem not in NOT_BENCHMARKS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *scripts], help="benchmarks to run [all]")
    names = parser.parse_args().names or list(scripts)

    start = time.monotonic()
    ratios, machine, failures = run_benchmarks([scripts[name] for name in names])
    write_table(ratios, machine, keep_rows=len(names) < len(scripts) or bool(failures))

    missed = [ratio for ratio in ratios if ratio.misses_target]
    minutes = (time.monotonic() - start) / 60
    print(f"{len(ratios)} ratios in {minutes:.0f} min, {len(missed)} miss their target")
    for ratio in missed:
        print(f"missed: {ratio.subject}: {ratio.value}, {ratio.target_text}")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
