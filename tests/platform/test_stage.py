"""Stages whose outputs are computed for several configurations in one pass, each under a key of its own."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcis.platform.config.sections import Config
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.garbage import plan_removal
from mcis.platform.runs.record import recorded
from mcis.platform.runs.results import StageResult, read_result
from mcis.platform.runs.stage import Stage, Together, run_stage, unfinished
from mcis.platform.runs.workspace import Workspace


class Work:
    """A stage that writes the seed of each of its configurations, for the seeds of a range together."""

    def __init__(self, seeds: Sequence[int]):
        self.seeds, self.passes, self.at_once = seeds, list[list[int]](), 0
        module = cast(Any, SimpleNamespace(inputs=lambda config, context: None))
        together = Together(self.configurations, self.run)
        self.stage = Stage(name="work", module=module, sections=("seed",), together=together)

    def configurations(self, config: Config) -> list[Config]:
        others = [seed for seed in self.seeds if seed != config.seed]
        return [config, *(config.model_copy(update={"seed": seed}) for seed in others)]

    def run(self, configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        self.at_once += 1
        assert self.at_once == 1, "another pass holds none of these locks"
        self.passes.append([config.seed for config in configs])
        for config, context in zip(configs, contexts, strict=True):
            (context.part / f"pass-{len(self.passes)}").write_text(str(config.seed))
            time.sleep(0.02)
        self.at_once -= 1
        return [StageResult(counts={"seed": config.seed}) for config in configs]


def a_run(workspace: Workspace, name: str = "a") -> RunContext:
    workspace.run(name)
    return RunContext(workspace=workspace, name=name, part=workspace.root, tracker=cast(Any, None), origins={})


def go(work: Work, context: RunContext, seed: int, *, afresh: bool = False) -> RunContext:
    after = run_stage(work.stage, Config(seed=seed), context, afresh=afresh)
    assert read_result(after.inputs["work"], StageResult).counts == {"seed": seed}
    return after


def test_outputs_of_several_configurations_are_computed_in_one_pass(tmp_path: Path) -> None:
    context, alone, work = a_run(Workspace(tmp_path)), Work([]), Work([1, 2, 3])
    assert go(alone, context, 2).computed == {"work": True}
    assert go(work, context, 3).computed == {"work": True}
    assert work.passes == [[3, 1]], "what is there already is not computed again"
    for seed in (1, 2, 3):
        assert go(work, context, seed).computed == go(alone, context, seed).computed == {"work": False}
    assert not list((tmp_path / "store").glob("*.part"))


def test_to_compute_one_again_leaves_the_others(tmp_path: Path) -> None:
    context, work = a_run(Workspace(tmp_path)), Work([1, 2, 3])
    before = go(work, context, 1).inputs["work"]
    assert go(work, context, 1, afresh=True).computed == {"work": True}
    assert work.passes == [[1, 2, 3], [1]]
    assert [path.name for path in before.glob("pass-*")] == ["pass-2"]
    assert go(work, context, 2).computed == {"work": False}


def test_runs_at_a_time_that_share_a_pass_compute_it_once(tmp_path: Path) -> None:
    """In threads that begin with different ones of them, and with another pass that shares some."""
    workspace, work, other = Workspace(tmp_path), Work([1, 2, 3, 4]), Work([3, 5, 2])
    calls = [(work, 4), (other, 5), (work, 2), (other, 2), (work, 1), (work, 3)]
    runs = [a_run(workspace, f"run-{number}") for number in range(len(calls))]
    threads = [threading.Thread(target=go, args=(of, run, seed)) for (of, seed), run in zip(calls, runs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    computed = [seed for seeds in (*work.passes, *other.passes) for seed in seeds]
    assert sorted(computed) == [1, 2, 3, 4, 5]
    assert len(work.passes) == len(other.passes) == 1


def test_what_is_begun_of_all_of_a_pass_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, work = Workspace(tmp_path), Work([1, 2])
    context = a_run(workspace)

    def killed(configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        for each in contexts:
            (each.part / "begun").write_bytes(bytes(100))
        raise KeyboardInterrupt

    stage = Stage(
        name="work", module=work.stage.module, sections=("seed",), together=Together(work.configurations, killed)
    )
    with pytest.raises(KeyboardInterrupt):
        run_stage(stage, Config(seed=1), context, afresh=False)
    assert unfinished([work.stage], Config(seed=2), context, ()).begun == 200
    go(work, context, 2)
    assert unfinished([work.stage], Config(seed=1), context, ()).stages == ()


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_pass_made_for_others_is_kept_for_them_behind_its_run(tmp_path: Path, whole: bool) -> None:
    workspace, work = Workspace(tmp_path), Work([1, 2, 3])
    with recorded(workspace, "a", whole=whole):
        go(work, a_run(workspace), 2)
    assert plan_removal(workspace, []).garbage == []
    with recorded(workspace, "a", whole=True):
        go(Work([]), a_run(workspace), 2)  # a call that asks for its own alone points to no others
    assert len(plan_removal(workspace, []).garbage) == 2


def test_a_run_whose_output_is_there_waits_for_no_other_of_the_pass(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    go(Work([1]), a_run(workspace), 1)
    both = Work([1, 2])
    begun, end = threading.Event(), threading.Event()

    def long(configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
        begun.set()
        assert end.wait(30)
        return [StageResult(counts={"seed": config.seed}) for config in configs]

    slow = Stage(
        name="work", module=both.stage.module, sections=("seed",), together=Together(both.configurations, long)
    )
    other = threading.Thread(
        target=run_stage, args=(slow, Config(seed=2), a_run(workspace, "b")), kwargs={"afresh": False}
    )
    other.start()
    assert begun.wait(30)
    assert go(both, a_run(workspace, "c"), 1).computed == {"work": False}
    assert other.is_alive()
    end.set()
    other.join(30)
