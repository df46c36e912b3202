"""The stage `evaluate` on drawn masks against a plain program, and two of its runs compared image by image."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.platform.cli import app
from mcis.platform.config.resolve import resolve
from mcis.platform.reporting.comparison import Difference, compare
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.counts import crc_of_truth, read_counts
from mcis.platform.runs.results import write_result
from mcis.platform.runs.scores import SCORES, read_scores
from mcis.platform.runs.workspace import Workspace, read_json
from mcis.platform.stages import evaluation

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 12


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Iterator[None]:
    """Where the plain program is, and what draws masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    import masks

    return masks.find_or_draw(None, IMAGES, tmp_path_factory.mktemp("truth") / "masks")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


def evaluated(workspace: Workspace, paths: list[Path], name: str, seed: int) -> RunContext:
    """A run that has come to its scores."""
    import masks

    context = masks.evaluable(workspace.root, paths, name=name, seed=seed)
    config = resolve("voc", "small", assignments=["compute.shard_rows=5"]).config
    write_result(context.part, evaluation.run(config, context), stage="evaluate", key=name, seconds=1.0)
    done = dataclasses.replace(context, inputs={**context.inputs, "evaluate": workspace.finish("evaluate", name)})
    workspace.record_outputs(name, done.inputs)
    return done


@pytest.fixture(scope="module")
def first(ray_local: None, workspace: Workspace, paths: list[Path]) -> RunContext:
    return evaluated(workspace, paths, "first", 1)


@pytest.fixture(scope="module")
def second(first: RunContext, workspace: Workspace, paths: list[Path]) -> RunContext:
    return evaluated(workspace, paths, "second", 2)


def differences(workspace: Workspace, *names: str, what: Any = ("segmentation",), **more: Any) -> list[Difference]:
    settings: dict[str, Any] = {"resamples": 300, "seed": 0, "confidence": 0.95}
    return list(compare(workspace, *names, what=what, **settings | more))


def test_scores_are_those_of_a_plain_program_to_the_last_digit(first: RunContext, paths: list[Path]) -> None:
    import agreement

    scores = read_json(first.inputs["evaluate"] / SCORES)
    expected = agreement.plain(paths, first.inputs["predict"] / "predictions")
    assert [score["name"] for score in scores] == ["plain", "with CRF"]
    for score, of_plain in zip(scores, expected, strict=True):
        assert {name: score[name] for name in of_plain} == of_plain
    assert expected[0] != expected[1]
    assert agreement.agreeing(scores, expected) == (2 * (2 + 4 * 21 + 21 * 21),) * 2
    assert agreement.agreeing(scores, expected[::-1])[0] < 2 * (2 + 4 * 21 + 21 * 21)


def test_counts_of_the_images_sum_to_the_scores_matrix(first: RunContext, paths: list[Path]) -> None:
    for score in read_scores(first.inputs["evaluate"] / SCORES):
        counted = read_counts(first.inputs["evaluate"], score)
        assert counted.image_ids == [path.stem for path in paths]
        total = np.zeros((21, 21), int)
        for true, label, _, pixels in zip(*counted.counts, strict=True):
            total[true, label] += pixels
        np.testing.assert_array_equal(total, score.confusion)
        for image, path in enumerate(paths):
            truth = np.array(Image.open(path))
            assert counted.counts.pixels[counted.images == image].sum() == (truth != 255).sum()
            assert counted.truth_crc[image] == crc_of_truth(truth)


def test_another_truth_has_another_checksum() -> None:
    truth = np.zeros((4, 6), np.uint8)
    truth[1, 2] = 1
    others = [truth.reshape(6, 4), truth[:, ::-1], truth.T, np.where(truth == 1, 2, truth).astype(np.uint8)]
    assert len({crc_of_truth(mask) for mask in (truth, *others)}) == 5


def test_a_comparison_tells_both_scores_and_an_interval_of_their_difference(
    first: RunContext, second: RunContext, workspace: Workspace
) -> None:
    scores = [read_scores(run.inputs["evaluate"] / SCORES) for run in (first, second)]
    compared = differences(workspace, "first", "second")
    names = [f"segmentation, {name}" for name in ("plain", "plain", "with CRF", "with CRF")]
    assert [each.what for each in compared] == names
    assert [each.figure for each in compared] == ["mIoU", "boundary mIoU"] * 2
    for number, each in enumerate(compared):
        own, other = (of_run[number // 2] for of_run in scores)
        figure = "boundary_miou" if number % 2 else "miou"
        assert each.first == pytest.approx(getattr(own, figure), abs=0.00501)
        assert each.second == pytest.approx(getattr(other, figure), abs=0.00501)
        assert each.difference == each.second - each.first
        assert each.low < each.high
        assert (each.split, each.images) == ("val", IMAGES)
    narrower = differences(workspace, "first", "second", confidence=0.5)
    assert all(a.low < b.low < b.high < a.high for a, b in zip(compared, narrower, strict=True))
    assert differences(workspace, "first", "second") == compared
    for each in differences(workspace, "first", "first"):
        assert (each.difference, each.low, each.high) == (0, 0, 0)


def test_a_comparison_is_printed(first: RunContext, second: RunContext, workspace: Workspace) -> None:
    command = ["compare", "first", "second", "--workspace", str(workspace.root), "--resamples", "100"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "second - first" in done.output
    assert "95 % interval" in done.output
    assert done.output.count("boundary mIoU") == 2
    assert "drawn for both runs alike" in done.output
    wrong = CliRunner().invoke(app, [*command, "--what", "maps"])
    assert wrong.exit_code == 1
    assert "expected: one of localization_maps, pseudo_masks, segmentation" in wrong.output


def test_runs_that_cannot_be_compared_are_refused(
    first: RunContext, workspace: Workspace, paths: list[Path], tmp_path: Path
) -> None:
    evaluated(workspace, paths[:-2], "fewer", 1)
    found = (
        r"run 'first' is scored on 12 images of val, run 'fewer' on 10 of val: 2 of 'first' alone \(000010, 000011\)"
    )
    with pytest.raises(UserError, match=found):
        differences(workspace, "first", "fewer")
    copies = [Path(shutil.copy(path, tmp_path)) for path in paths]
    Image.open(copies[4]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(copies[4])
    evaluated(workspace, copies, "mirrored", 1)
    found = "1 of 12 images have another ground truth in run 'mirrored' than in run 'first': 000004"
    with pytest.raises(UserError, match=found):
        differences(workspace, "first", "mirrored")
    with pytest.raises(UserError, match="run 'absent' has no scores in ") as caught:
        differences(workspace, "first", "absent")
    assert "first" in caught.value.remedy
    with pytest.raises(UserError, match="runs 'first' and 'mirrored' have no score in common: 'first' has none"):
        differences(workspace, "first", "mirrored", what=("pseudo_masks",))


def test_runs_of_other_classes_are_refused(first: RunContext, workspace: Workspace, tmp_path: Path) -> None:
    shutil.copytree(workspace.root, tmp_path / "workspace")
    copied = Workspace(tmp_path / "workspace")
    shutil.copytree(copied.finished("evaluate", "first"), copied.finished("evaluate", "renamed"))
    file = copied.finished("evaluate", "renamed") / SCORES
    file.write_text(file.read_text().replace('"cat"', '"lynx"'))
    copied.record_outputs("renamed", {"evaluate": file.parent})
    with pytest.raises(UserError, match=r"run 'first' has the classes .*, cat, .* run 'renamed' .*, lynx, "):
        differences(copied, "first", "renamed")


def test_the_matrix_is_written_a_row_on_a_line(first: RunContext) -> None:
    text = (first.inputs["evaluate"] / SCORES).read_text()
    (score, _) = json.loads(text)
    assert all(f"[{', '.join(map(str, row))}]" in text for row in score["confusion"])
