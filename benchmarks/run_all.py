"""Runs every benchmark in turn and writes their ratios into docs/RESULTS.md, between its two marker lines."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "RESULTS.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
NOT_BENCHMARKS = ("literal.py", "machine.py", "masks.py", "photos.py", "run_all.py")


def run(script: Path) -> tuple[list[tuple[str, str, str]], str]:
    """(what, ratio, target) of each figure of one script, and the machine; its output goes to the terminal as it comes.

    A figure is a line `ratio R target T: what`, the script's last one or the last few; of an only one, what it is may
    be left to the first line of the script.

    Raises:
        SystemExit: the script failed or did not end in `ratio R target T`.
    """
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    pattern = re.compile(r"ratio (\S+) target (\S+?)(?:: (.+))?")
    figures = [match for line in lines if (match := pattern.fullmatch(line))]
    if process.returncode or not figures or not pattern.fullmatch(lines[-1]):
        sys.exit(f"{script.name} failed or did not end in `ratio R target T`")
    what = (script.read_text().split('"""')[1]).splitlines()[0].rstrip(".")
    machine = next((line.removeprefix("machine: ") for line in lines if line.startswith("machine: ")), "")
    return [(match[3] or what, match[1], match[2]) for match in figures], machine


def main() -> None:
    """Runs all and rewrites the table."""
    done = [run(script) for script in sorted(HERE.glob("*.py")) if script.name not in NOT_BENCHMARKS]
    rows = [f"| {what} | {ratio} | {target} |" for figures, _ in done for what, ratio, target in figures]
    table = ["| what | ratio | target |", "| --- | --- | --- |", *rows, "", f"Measured on {done[0][1]}."]
    text = RESULTS.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"docs/RESULTS.md lacks the lines {BEGIN} and {END} between which the table stands")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    RESULTS.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
