"""Runs every benchmark in turn and writes their last lines as the table in README.md, between its two marks."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
NOT_BENCHMARKS = ("machine.py", "run_all.py")


def run(script: Path) -> tuple[str, str, str, str]:
    """(what, ratio, target, machine) of one script; its output goes to the terminal as it comes.

    Raises:
        SystemExit: the script failed or did not end in `ratio R target T`.
    """
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    found = re.fullmatch(r"ratio (\S+) target (\S+)", lines[-1] if lines else "")
    if process.returncode or not found:
        sys.exit(f"{script.name} failed or did not end in `ratio R target T`")
    what = (script.read_text().split('"""')[1]).splitlines()[0].rstrip(".")
    machine = next((line.removeprefix("machine: ") for line in lines if line.startswith("machine: ")), "")
    return what, found[1], found[2], machine


def main() -> None:
    """Runs all and rewrites the table."""
    rows = [run(script) for script in sorted(HERE.glob("*.py")) if script.name not in NOT_BENCHMARKS]
    table = ["| what | ratio | target |", "| --- | --- | --- |", *(f"| {w} | {r} | {t} |" for w, r, t, _ in rows)]
    table += ["", f"Measured on {rows[0][3]}."]
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"README.md lacks the marks {BEGIN} and {END} between which the table stands")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    README.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
