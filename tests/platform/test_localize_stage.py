"""The stage `localize`: maps do not depend on batches or interruptions, and special cases are counted."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.tables.memory_mapped import CachedRows
from mcis.platform import pipeline
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table
from mcis.platform.runs.stage import output_folder
from mcis.platform.stages import localization
from mcis.platform.stages.localization.workers import Embed, embed_rows, write_rows

VARIANTS = {
    "paper": (),
    "hops": ("localize.hops=3",),
    "released": ("localize.method.name=released", "localize.related_may_repeat=true", "maps.scale=maximum"),
}


def same_tables(one: Path, other: Path) -> None:
    for name in ("single", "maps"):
        assert read_table(one / name).equals(read_table(other / name)), name
        assert sorted(p.name for p in (one / name).iterdir()) == sorted(p.name for p in (other / name).iterdir())


def test_features_of_an_image_do_not_depend_on_its_batch(localizable: Any, tmp_path: Path) -> None:
    """Batches are padded to one size, because libraries choose kernels by shape."""
    context = localizable.context
    table = embed_rows(split_rows(context, "train", tagged=True))
    batch_sizes: set[int] = set()

    def embed(folder: Path, rows_per_call: int) -> tuple[pa.Table, np.ndarray]:
        """The rows of maps and the features of all images, (30, 24, 8, 8)."""
        weights = context.stage_outputs["train_classifier"]
        worker = Embed(localizable.config(), weights, len(context.classes), None, folder)
        worker.model.backbone.register_forward_hook(lambda module, inputs, output: batch_sizes.add(len(inputs[0])))
        parts = [worker(table.slice(first, rows_per_call)) for first in range(0, 30, rows_per_call)]

        cached = CachedRows(folder / "features", (24, 8, 8))
        features = [cached.row(number) for number in range(30)]
        return pa.concat_tables(parts), np.stack([row for row in features if row is not None])

    maps_together, together = embed(tmp_path / "together", 4)
    maps_alone, alone = embed(tmp_path / "alone", 1)
    assert maps_together.equals(maps_alone)
    assert len(together) == 30
    assert together.any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(together, alone)
    assert batch_sizes == {4}


def test_maps_of_int8_features_differ_by_a_tenth_of_their_maximum_at_most(localizable: Any, tmp_path: Path) -> None:
    """The tolerance covers positions whose features are only a few steps of 1/127 of their channel's maximum."""
    tables: dict[str, pa.Table] = {}
    for feature_type in ("float16", "int8"):
        context = localizable.into(tmp_path / feature_type)
        localization.run(localizable.config(f"localize.feature_type={feature_type}"), context)
        tables[feature_type] = read_table(context.output / "maps")
    assert read_table(tmp_path / "int8" / "single").equals(read_table(tmp_path / "float16" / "single"))

    assert tables["int8"].drop_columns("map").equals(tables["float16"].drop_columns("map"))
    of_int8, of_float16 = (activations(tables[feature_type]) for feature_type in ("int8", "float16"))
    differences = np.abs(of_int8 - of_float16).max(axis=1) / np.abs(of_float16).max(axis=1)
    assert 0 < differences.max() < 0.1


def activations(table: pa.Table) -> NDArray[np.float64]:
    """Activations of all maps of a table, (T, 64)."""
    values: NDArray[np.float16] = table["map"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, 64).astype(np.float64)


def test_intermediate_results_of_each_feature_type_have_their_own_folder(localizable: Any) -> None:
    (stage,) = (stage for stage in pipeline.STAGES if stage.name == "localize")
    folders = []
    for overrides in ((), ("localize.feature_type=float16",), ("localize.feature_type=int8",)):
        folders.append(output_folder(stage, localizable.config(*overrides), localizable.context))
    assert folders[0] == folders[1] != folders[2]


class Killed(BaseException):
    """Simulates a kill of the process."""


def computed_by(
    monkeypatch: pytest.MonkeyPatch, config: Config, context: RunContext, *, killed_in: int | None = None
) -> list[tuple[str, int, int]]:
    """Runs the stage.

    Args:
        killed_in: Number of the mapping at whose end the stage is killed, with only every second shard written.

    Returns:
        For each mapping: name of its folder, number of rows that it computed, number of rows.
    """
    real = localization.map_table
    calls: list[tuple[str, int, int]] = []

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
def test_after_a_kill_only_unfinished_shards_are_computed(
    localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, mapping: int
) -> None:
    config = localizable.config(*VARIANTS[variant])
    undisturbed = localizable.into(tmp_path / "undisturbed")
    mappings = ["single", "maps-1", "maps-2", "maps"] if variant == "hops" else ["single", "maps"]
    assert computed_by(monkeypatch, config, undisturbed) == [(name, 30, 30) for name in mappings]

    context = localizable.into(tmp_path / "killed")
    with pytest.raises(Killed):
        computed_by(monkeypatch, config, context, killed_in=mapping)
    computed_rows = [rows for _, rows, _ in computed_by(monkeypatch, config, context)]
    assert computed_rows == [0] * mapping + [16] + [30] * (len(mappings) - mapping - 1)
    same_tables(context.output, undisturbed.output)


def test_shards_of_another_size_are_replaced(localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = "localize.related_by=nearest"
    context = localizable.into(tmp_path / "killed")
    with pytest.raises(Killed):
        computed_by(monkeypatch, localizable.config(nearest, "compute.shard_rows=8"), context, killed_in=0)
    undisturbed = localizable.into(tmp_path / "undisturbed")
    localization.run(localizable.config(nearest), context)
    localization.run(localizable.config(nearest), undisturbed)
    same_tables(context.output, undisturbed.output)


def test_features_of_shards_of_another_size_are_removed(localizable: Any, tmp_path: Path) -> None:
    """A call with one image per shard was killed after it had written the features of image 2, but no maps."""
    context = localizable.into(tmp_path / "killed")
    features = context.output / localization.EMBEDDED / "features"
    write_rows(features, 2, np.zeros((1, 24, 8, 8), np.float16))
    undisturbed = localizable.into(tmp_path / "undisturbed")
    localization.run(localizable.config(), context)
    localization.run(localizable.config(), undisturbed)
    same_tables(context.output, undisturbed.output)


def test_only_lost_shards_are_computed_again(localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features were removed, so the images are embedded again."""
    config = localizable.config()
    context = localizable.into(tmp_path / "part")
    other = localizable.into(tmp_path / "other")
    localization.run(config, context)
    shutil.copytree(context.output, other.output, dirs_exist_ok=True)
    for shard in sorted((context.output / "maps").iterdir())[2:4]:
        shard.unlink()
    assert computed_by(monkeypatch, config, context) == [("single", 30, 30), ("maps", 8, 30)]
    same_tables(context.output, other.output)


@pytest.mark.parametrize("variant", [(), ("localize.related_by=nearest",), ("localize.related=0",)])
def test_maps_are_not_made_again_after_a_kill_while_intermediate_results_are_removed(
    localizable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: tuple[str, ...]
) -> None:
    config = localizable.config(*variant)
    context = localizable.into(tmp_path / "part")
    finished = localization.run(config, context)
    shard = sorted((context.output / "maps").iterdir())[0]
    before = shard.stat().st_mtime_ns
    (context.output / localization.EMBEDDED / "features").mkdir(parents=True)  # killed before it was renamed

    assert computed_by(monkeypatch, config, context) == []

    assert localization.run(config, context) == finished
    assert shard.stat().st_mtime_ns == before
    assert not (context.output / localization.EMBEDDED).exists()


def test_controls_of_related_images_are_counted(localizable: Any, tmp_path: Path) -> None:
    """All images have class 0, and all but one have class 3."""
    dataset = localizable.with_index(tmp_path, lambda n: {"tags": [0, 3] if n else [0]})
    wrong = localization.run(dataset.config("localize.related_by=wrong_class"), dataset.into(tmp_path / "wrong"))
    assert wrong.counts["maps related to images with their class, because all have it"] == 30
    assert wrong.counts["maps whose related images repeat"] == 29
    assert "the related images of 30 map(s) have the map's class, because every image has it" in " ".join(wrong.notes)
    assert "29 map(s) repeat related images, as too few images lack" in " ".join(wrong.notes)
    assert wrong.counts["maps"] == 59

    itself = localization.run(dataset.config("localize.related_by=itself"), dataset.into(tmp_path / "itself"))
    assert itself.counts["maps related to their own image alone"] == 59
    assert "maps whose related images repeat" not in itself.counts


def test_images_without_tags_and_classes_with_few_images_are_counted(localizable: Any, tmp_path: Path) -> None:
    """Class 3 is in one image, class 2 in two images, which also have class 0, and one image has no tag."""
    tags = {0: [0, 3], 1: [0, 2], 2: [0, 2], 3: []}
    dataset = localizable.with_index(tmp_path, lambda n: {"tags": tags.get(n, [0])})
    for related, repeats in (
        (1, 1),
        (2, 3),
    ):  # class 3 has one image; with 2 related images, those of class 2 repeat too
        context = dataset.into(tmp_path / f"r{related}")
        result = localization.run(dataset.config(f"localize.related={related}"), context)
        assert result.counts["images"] == 29
        assert result.counts["images without tags"] == 1
        assert result.counts["maps"] == 32
        assert result.counts["maps whose related images repeat"] == repeats
        assert f"{repeats} map(s) repeat related images" in " ".join(result.notes)
        assert len(read_table(context.output / "maps")) == 32


def test_localize_refuses_images_without_any_tag(localizable: Any, tmp_path: Path) -> None:
    dataset = localizable.with_index(tmp_path, lambda n: {"tags": []})
    with pytest.raises(UserError, match="none of 30 training images has a tag"):
        localization.run(dataset.config(), dataset.into(tmp_path / "part"))
