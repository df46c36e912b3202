"""Disk space and memory that a run needs: estimates next to what a run wrote, and runs that do not fit."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from mcis.datasets.errors import UserError
from mcis.datasets.synthetic import devkit as synthetic
from mcis.platform import pipeline
from mcis.platform.cli import app
from mcis.platform.config.keys import STAGE_NAMES
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.reporting.sizing import Disk, Sizing, check_disks, memory_note, size_run
from mcis.platform.reporting.written_files import Part, count_images, parts_of_run
from mcis.platform.runs.files import bytes_in
from mcis.platform.runs.listing import list_images
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages.localization.workers import Embed, embed_rows

from .conftest import TINY, Localizable, Small


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set of 24 training images."""
    root = tmp_path_factory.mktemp("drawn") / "VOC2012"
    synthetic.draw(root, train=24, val=6, size=64, classes=3)
    return root


def config_of(root: Path, *overrides: str) -> Config:
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    return resolve("voc", "scratch", options, [*TINY, *overrides]).config


HUGE = "classifier.input_size=1048576"
"""An input size at which the features of an image take terabytes."""


def test_sizes_are_within_a_factor_of_two_of_what_a_run_wrote(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = small.settings("compute.shard_rows=64", "classifier.val_every=0")
    workspace = Workspace(tmp_path)
    outputs = pipeline.run(resolved, workspace, "first").context.stage_outputs
    printed = capsys.readouterr().out
    assert printed.count("needs:   ") == 1
    assert "Files of" not in printed, "the table is for large runs"

    config = resolved.config
    parts = parts_of_run(config, count_images(config, list_images(config)), STAGE_NAMES)
    sizes = {(part.stage, part.name): part.size for part in parts}
    written = {
        ("train_classifier", "decoded images in the cache"): bytes_in(workspace.cache),
        ("train_classifier", "weights"): bytes_in(outputs["train_classifier"]),
        ("localize", "localization maps"): bytes_in(outputs["localize"]),
        ("pseudo_masks", "pseudo masks"): bytes_in(outputs["pseudo_masks"] / "masks"),
        ("train_segmenter", "weights"): bytes_in(outputs["train_segmenter"]),
        ("predict", "predictions"): bytes_in(outputs["predict"] / "predictions"),
    }
    ratios = {name: sizes[name] / size for name, size in written.items()}
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios

    # Finished outputs are not counted again.
    pipeline.run(resolved, workspace, "second")
    assert "needs:" not in capsys.readouterr().out


@pytest.mark.parametrize("feature_type", ["float16", "int8"])
def test_features_of_localization_have_the_computed_size(
    localizable: Localizable, tmp_path: Path, feature_type: str
) -> None:
    config = localizable.config("compute.shard_rows=64", f"localize.feature_type={feature_type}")
    context = localizable.context
    rows = split_rows(context, "train", tagged=True)
    embed = Embed(config, context.stage_outputs["train_classifier"], len(context.classes), None, tmp_path)
    embed(embed_rows(rows))

    parts = parts_of_run(config, count_images(config, list_images(config)), ["localize"])
    (features,) = (part for part in parts if part.name == "features of localization")
    assert 0.9 < features.size / bytes_in(tmp_path / "features") < 1.1
    assert ("localize.feature_type=int8" in features.keys) == (feature_type == "float16")


def test_a_run_that_does_not_fit_its_disk_ends_before_the_first_stage(
    small: Small, small_disk: Callable[..., Path]
) -> None:
    workspace = Workspace(small_disk("8m"))
    resolved = small.settings(HUGE, "compute.cache_gb=0")
    with pytest.raises(UserError) as error:
        pipeline.run(resolved, workspace, "large")
    assert str(workspace.store) in error.value.found
    assert "features of localization" in error.value.found
    assert "localize.related=0" in error.value.remedy
    assert not list(workspace.store.glob("index-*/summary.json"))


def test_a_run_that_seems_too_large_starts_if_the_check_is_off(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizing = Sizing(9, [Disk(tmp_path, [], 2, 1)], 1, 1, 1)
    monkeypatch.setattr("mcis.platform.reporting.sizing.size_run", lambda *_args, **_named: sizing)
    with pytest.raises(UserError, match="the run writes"):
        pipeline.run(small.settings(), Workspace(tmp_path), "large", until="train_classifier")
    resolved = small.settings("compute.check_disk=false")
    assert pipeline.run(resolved, Workspace(tmp_path), "large", until="train_classifier").context.stage_outputs


def test_the_cache_is_compared_with_its_own_file_system(
    drawn: Path, small_disk: Callable[..., Path], tmp_path: Path
) -> None:
    """The workspace is on a small disk, and its cache is a link to a folder on a larger one."""
    disk = small_disk("64m")
    cache = tmp_path / "cache"
    cache.mkdir()
    (disk / "cache").symlink_to(cache)
    config = config_of(drawn, "compute.cache_gb=1")
    sizing = size_run(config, Workspace(disk), list_images(config), STAGE_NAMES)
    stored, cached = sizing.disks
    assert stored.folder == disk / "store"
    assert stored.free <= 2**26 < cached.free
    assert [part.name for part in cached.parts if part.size] == ["decoded images in the cache"]

    # What an interrupted call wrote does not count again.
    again = size_run(config, Workspace(disk), list_images(config), STAGE_NAMES, written=1000)
    assert again.disks[0].needed == stored.needed - 1000


def test_copies_of_a_bucket_are_not_compared_on_a_cluster(
    drawn: Path, place: Path, monkeypatch: pytest.MonkeyPatch, bucket: object
) -> None:
    from mcis.datasets.storage.folders import local_path

    config = config_of(drawn)
    workspace = Workspace(local_path(f"s3://{bucket.base_path.rstrip('/')}/work"))  # type: ignore[attr-defined]
    assert size_run(config, workspace, list_images(config), STAGE_NAMES).disks
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    assert not size_run(config, workspace, list_images(config), STAGE_NAMES).disks


def test_an_error_names_the_large_files_and_a_cache_that_fits() -> None:
    parts = [
        Part("train_classifier", "features in the cache", 40 * 2**30, "cache", "compute.cache_gb"),
        Part("localize", "features of localization", 20 * 2**30, "temporary", "localize.related=0"),
        Part("predict", "predictions", 2**20, "output", "predict.split"),
    ]
    sizing = Sizing(9, [Disk(Path("/disk"), parts, 60 * 2**30, 50 * 2**30)], 2, 2**30, 2**32)
    with pytest.raises(UserError) as error:
        check_disks(sizing)
    assert "features in the cache 42.9 GB, features of localization 21.5 GB" in error.value.found
    assert "predictions" not in error.value.found
    assert "compute.cache_gb=30; localize.related=0" in error.value.remedy


def test_too_little_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster, where compute.cpus changes nothing, the note names the memory that a task has to reserve."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert memory_note(Sizing(9, [], 4, 2**30, 4 * 2**30)) == ""
    assert "set compute.cpus=3" in memory_note(Sizing(9, [], 4, 2**30, 4 * 2**30 - 1))
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    assert "set compute.memory_gb=1.3," in memory_note(Sizing(9, [], 4, 5 * 2**28, 4 * 2**30))


def test_reserved_memory_limits_the_processes_of_a_run(drawn: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    config = config_of(drawn, "compute.memory_gb=10000")
    assert size_run(config, workspace, list_images(config), STAGE_NAMES).processes == 1


@pytest.fixture
def table(drawn: Path, tmp_path: Path) -> Path:
    """A table of the images of the small run and one that does not exist."""
    train = list_images(config_of(drawn)).table.filter(pc.field("split") == "train")
    file = tmp_path / "photos.csv"
    lines = [f"{uri},cat,train" for uri in [*train["uri"].to_pylist(), tmp_path / "absent.jpg"]]
    file.write_text("\n".join(["image,tags,split", *lines]))
    return file


def doctor(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "400"})
    return done.exit_code, done.output


def test_doctor_compares_a_run_on_a_table_with_this_machine(table: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "new" / "workspace"
    words = ["--for", str(table), "--workspace", str(workspace), "data.tags.allow_absolute=true"]
    code, printed = doctor(*words)
    assert code == 0, printed
    assert "25 images: " in printed
    assert "features of localization" in printed

    code, printed = doctor(*words, HUGE)
    assert code == 1
    assert "the run writes " in printed
    assert "localize.related=0" in printed
    assert not workspace.parent.exists()


def test_doctor_refuses_values_without_a_table() -> None:
    code, printed = doctor("localize.related=0")
    assert code == 2
    assert "--for" in printed
