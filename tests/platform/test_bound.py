"""The upper bound that stands beside a run's scores: the same network, trained on the truth of the same images."""

import shutil
from typing import Any

from mcis.platform.reporting.bound import upper_bound
from mcis.platform.reporting.losses import Bound


def test_the_bound_is_a_run_of_the_same_network_on_the_truth(small: Any) -> None:
    workspace, first = small.workspace, small.first
    full = small.run("bound", "supervision=full", "segmenter.init=pretrained")
    assert upper_bound(workspace, "bound", full.scores) == (None, [])
    other = shutil.copytree(workspace.runs / "bound", workspace.runs / "another-network") / "config.toml"
    other.write_text(other.read_text().replace("steps = 6", "steps = 7"))
    assert upper_bound(workspace, "first", first.scores) == (Bound("bound", full.scores), [])
    scores = workspace.outputs("bound")["evaluate"] / "scores.json"
    text = scores.read_text()
    scores.write_text(text.replace('"seed"', '"seeds"'))
    try:
        found, (note,) = upper_bound(workspace, "first", first.scores)
    finally:
        scores.write_text(text)
        shutil.rmtree(other.parent)
    assert found is None
    assert "run bound may be an upper bound but is left out" in note
