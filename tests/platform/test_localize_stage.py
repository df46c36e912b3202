"""Localization as a stage: the same maps in any batch and after any kill; images that lack something are counted."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.tables.memory_mapped import CachedRows
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table
from mcis.platform.stages import localization
from mcis.platform.stages.localization.workers import Embed, embed_rows

VARIANTS = {
    "paper": (),
    "hops": ("localize.hops=3",),
    "released": ("localize.method.name=released", "localize.related_may_repeat=true", "maps.scale=maximum"),
}


def same_tables(one: Path, other: Path) -> None:
    for name in ("single", "maps"):
        assert read_table(one / name).equals(read_table(other / name)), name
        assert sorted(p.name for p in (one / name).iterdir()) == sorted(p.name for p in (other / name).iterdir())


def test_an_images_features_do_not_depend_on_the_other_images_of_its_batch(localizable: Any, tmp_path: Path) -> None:
    """Every batch is filled up: where kernels are chosen by shape, a smaller one would be computed by others."""
    config, context = localizable.config(), localizable.context
    rows = split_rows(context, "train", tagged=True)
    folders, parts = (tmp_path / "together", tmp_path / "alone"), []
    seen: set[int] = set()
    for path, count in zip(folders, (4, 1), strict=True):
        weights, classes = context.inputs["train_classifier"], len(context.classes)
        work = Embed(config, weights, classes, None, path)
        work.model.backbone.register_forward_hook(lambda module, inputs, output: seen.add(len(inputs[0])))
        table = embed_rows(rows)
        parts.append(pa.concat_tables(work(table.slice(first, count)) for first in range(0, 30, count)))
    assert parts[0].equals(parts[1])
    cached = [CachedRows(path / "features", (24, 8, 8)) for path in folders]
    together, alone = (np.stack([row for at in range(30) if (row := rows.row(at)) is not None]) for rows in cached)
    assert len(together) == 30
    assert together.any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(together, alone)
    assert seen == {4}


class Killed(BaseException):
    """Stands for a kill of the process."""


def computed_by(
    monkeypatch: pytest.MonkeyPatch, config: Config, context: RunContext, *, killed_in: int | None = None
) -> list[tuple[str, int, int]]:
    """Runs the stage: of each mapping its folder, the rows that it computed and those that it has.

    Args:
        killed_in: the mapping that ends the stage, when every second shard of it is written.
    """
    real, calls = localization.map_table, list[tuple[str, int, int]]()

    def counted(table: pa.Table, folder: Path, **options: Any) -> int:
        result = real(table, folder, **options)
        if len(calls) == killed_in:
            for shard in sorted(folder.glob("part-*"))[::2]:
                shard.unlink()
            raise Killed
        calls.append((folder.name, result, len(table)))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(localization, "map_table", counted)
        localization.run(config, context)
    return calls


@pytest.mark.parametrize(
    ("variant", "mapping"),
    [("paper", 0), ("paper", 1), ("hops", 2), *(pytest.param("released", n, marks=pytest.mark.slow) for n in (0, 1))],
)
def test_a_kill_in_any_mapping_costs_the_unfinished_shards_alone(
    localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, mapping: int
) -> None:
    config, undisturbed = localizable.config(*VARIANTS[variant]), localizable.into(tmp_path / "undisturbed")
    mappings = ["single", "maps-1", "maps-2", "maps"] if variant == "hops" else ["single", "maps"]
    assert computed_by(monkeypatch, config, undisturbed) == [(name, 30, 30) for name in mappings]
    context = localizable.into(tmp_path / "killed")
    with pytest.raises(Killed):
        computed_by(monkeypatch, config, context, killed_in=mapping)
    again = computed_by(monkeypatch, config, context)
    assert [rows for _, rows, _ in again] == [0] * mapping + [16] + [30] * (len(mappings) - mapping - 1)
    same_tables(context.part, undisturbed.part)


def test_shards_of_another_size_leave_none(localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest, context = "localize.related_by=nearest", localizable.into(tmp_path / "killed")
    with pytest.raises(Killed):
        computed_by(monkeypatch, localizable.config(nearest, "compute.shard_rows=8"), context, killed_in=0)
    undisturbed = localizable.into(tmp_path / "undisturbed")
    for each in (context, undisturbed):
        localization.run(localizable.config(nearest), each)
    same_tables(context.part, undisturbed.part)


def test_lost_shards_alone_are_related_again(localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features were gone by then: images are embedded again, rather than maps made of zeros."""
    config, context = localizable.config(), localizable.into(tmp_path / "part")
    other = localizable.into(tmp_path / "other")
    localization.run(config, context)
    shutil.copytree(context.part, other.part, dirs_exist_ok=True)
    for shard in sorted((context.part / "maps").iterdir())[2:4]:
        shard.unlink()
    assert computed_by(monkeypatch, config, context) == [("single", 30, 30), ("maps", 8, 30)]
    same_tables(context.part, other.part)


def test_controls_of_related_images_are_counted(localizable: Any, tmp_path: Path) -> None:
    """Class 0 is every image's, class 3 that of all but one."""
    made = localizable.with_index(tmp_path, lambda n: {"tags": [0, 3] if n else [0]})
    wrong = localization.run(made.config("localize.related_by=wrong_class"), made.into(tmp_path / "wrong"))
    assert wrong.counts["maps related to images with their class, because all have it"] == 30
    assert wrong.counts["maps whose related images repeat"] == 29
    assert "30 map(s) are related to images with their class, because every image has it" in " ".join(wrong.notes)
    assert "29 map(s) repeat related images, as too few images lack" in " ".join(wrong.notes)
    assert wrong.counts["maps"] == 59
    itself = localization.run(made.config("localize.related_by=itself"), made.into(tmp_path / "itself"))
    assert itself.counts["maps related to their own image alone"] == 59
    assert "maps whose related images repeat" not in itself.counts


def test_images_without_tags_and_classes_with_few_images_are_counted(localizable: Any, tmp_path: Path) -> None:
    """Class 3 is left with one image, class 2 with two, which also have class 0, and one image without a tag."""
    tags = {0: [0, 3], 1: [0, 2], 2: [0, 2], 3: []}
    made = localizable.with_index(tmp_path, lambda n: {"tags": tags.get(n, [0])})
    for related, repeats in ((1, 1), (2, 3)):  # the only image of class 3, and with two those of class 2
        context = made.into(tmp_path / f"r{related}")
        result = localization.run(made.config(f"localize.related={related}"), context)
        assert result.counts["images"] == 29
        assert result.counts["images without tags"] == 1
        assert result.counts["maps"] == 32
        assert result.counts["maps whose related images repeat"] == repeats
        assert f"{repeats} map(s) repeat related images" in " ".join(result.notes)
        assert len(read_table(context.part / "maps")) == 32


def test_without_any_tag_there_is_nothing_to_localize(localizable: Any, tmp_path: Path) -> None:
    made = localizable.with_index(tmp_path, lambda n: {"tags": []})
    with pytest.raises(UserError, match="none of 30 training images has a tag"):
        localization.run(made.config(), made.into(tmp_path / "part"))
