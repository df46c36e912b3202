"""The table of faults names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (?!fault|---)(.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_fault_names_a_test_that_there_is() -> None:
    rows = ROW.findall((ROOT / "docs" / "FAULTS.md").read_text(encoding="utf-8"))
    assert len(rows) > 40
    for fault, _, tests in rows:
        names = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`(\*?)", tests)
        assert names, fault
        for file, name, slow in names:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            if name:
                found = re.search(rf"((?:^[@ )].*\n)*)^def {name}\(", text, re.MULTILINE)
                assert found, f"{fault}: {file} has no {name}"
                assert ("pytest.mark.slow" in found[1]) == bool(slow), f"{fault}: whether {name} is slow"
