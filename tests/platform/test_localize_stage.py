"""Localization as a stage: its maps against pairs one by one, under any bound, after any kill, for each domain."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.related_images import Relations
from mcis.datasets.synthetic import devkit as synthetic
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.backbones import IMAGENET, to_unit
from mcis.models.coattention import affinity, coattend, unshared
from mcis.models.grids import Grid, Grids
from mcis.models.localization import embed, scale_maps
from mcis.models.resampling import resample
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.config.sections import Config
from mcis.platform.engine.mapping import MapResult
from mcis.platform.networks.build import build_classifier, load_classifier
from mcis.platform.networks.checkpoints import WEIGHTS, save
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.outputs.relations import draw_relations
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.files import read_table, write_table
from mcis.platform.runs.workspace import Workspace
from mcis.platform.stages import localization
from mcis.platform.stages.localization.features import FeatureFiles, write_features
from mcis.platform.stages.localization.workers import Embed, Relate, embed_rows, relate_rows

TINY = (
    "classifier.epochs=4",
    "classifier.channels=24",
    "localize.related=3",
    "classifier.head=own",  # a layer of its own for co-attentive features, so that a mistaken one shows
    "segmenter.channels=24",
    "classifier.input_size=64",
    "classifier.batch=8",
    "localize.extra_scales=[0.5]",
    "compute.shard_rows=4",
    "compute.threads=1",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A small data set with a briefly trained classifier, on which the stage is run."""

    root: Path
    context: RunContext

    def config(self, *assignments: str) -> Config:
        options = {"data.voc": str(self.root), "data.classes": str(self.root / "classes.txt")}
        return resolve("voc", "small", options, [*TINY, *assignments]).config

    def into(self, part: Path) -> RunContext:
        part.mkdir(parents=True, exist_ok=True)
        return dataclasses.replace(self.context, part=part)


@pytest.fixture(scope="module")
def trained(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("localize")
    root = folder / "VOC2012"
    synthetic.draw(root, train=30, val=4, size=64, classes=4)
    options = {"data.voc": str(root), "data.classes": str(root / "classes.txt")}
    resolved = resolve("voc", "small", options, list(TINY))
    result = pipeline.run(resolved, Workspace(folder / "workspace"), "run", until="train_classifier")
    return Trained(root, result.context)


def with_index(trained: Trained, folder: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Trained:
    """The same with another index: `change` gives the values that each row, by its number, has in place of its own."""
    index = trained.context.inputs["index"]
    table = read_table(index / "index.parquet")
    rows = [row | change(number, row) for number, row in enumerate(table.to_pylist())]
    write_table(folder / "index.parquet", pa.Table.from_pylist(rows, schema=table.schema))
    shutil.copy(index / "summary.json", folder)
    return Trained(trained.root, reading(trained.context, "index", folder))


def reading(context: RunContext, stage: str, folder: Path) -> RunContext:
    """The same with another output of a stage before."""
    return dataclasses.replace(context, inputs={**context.inputs, stage: folder})


def state_of(context: RunContext) -> dict[str, torch.Tensor]:
    return dict(torch.load(context.inputs["train_classifier"] / WEIGHTS, weights_only=True)["state_dict"])


def relations_of(config: Config, context: RunContext) -> tuple[Relations, NDArray[np.bool_]]:
    rows = split_rows(context, "train", tagged=True)
    source = np.array(rows["domain"].to_pylist()) == "source"
    tags = Tags.of_index(rows["tags"], len(context.classes))
    return draw_relations(config.localize, config.seed, tags, source), source


def literal_maps(config: Config, context: RunContext) -> list[torch.Tensor]:
    """All maps pair by pair, (T, H, W): both images embedded, the whole affinity, features, then the class layer."""
    model = load_classifier(config.classifier, context.inputs["train_classifier"], len(context.classes))
    uris = split_rows(context, "train", tagged=True)["uri"].to_pylist()
    relations, source = relations_of(config, context)
    method = config.localize.method
    layer = model.common_head if model.own_head else model.phi

    @functools.cache
    def features(image: int) -> torch.Tensor:
        pixels = torch.from_numpy(read_rgb(uris[image], config.classifier.input_size))[None]
        how = config.localize
        return embed(
            model.backbone,
            model.embedding,
            IMAGENET(to_unit(pixels)),
            extra_scales=how.extra_scales,
            mirror=how.mirror,
        )

    def activation(image: int, other: int, tag: int, contrastive: bool) -> torch.Tensor:
        target, seen = features(image), features(other)
        kind = [[0, 2], [2, 1]][int(source[image])][int(source[other])]
        if method.affinity == "identity":
            w_p = torch.eye(24)
        else:
            w_p = model.w_p if model.w_p.ndim == 2 else model.w_p[kind]
        form, scale = model.affinity.form, model.affinity.scale
        # Of two domains, m is the target's.
        if (source[image] and not source[other]) or (source[image] == source[other] and method.target == "n"):
            common = coattend(seen, target, affinity(seen, target, w_p, form=form, scale=scale)).n
        else:
            common = coattend(target, seen, affinity(target, seen, w_p, form=form, scale=scale)).m
        if contrastive:
            common = unshared(target, model.w_b(common))
        return layer(common)[0, tag]

    out = []
    with torch.inference_mode():
        for number, (image, tag) in enumerate(zip(relations.image.tolist(), relations.tag.tolist(), strict=True)):
            first, last = relations.others_start[number : number + 2]
            parts = [activation(image, other, tag, False) for other in relations.related[number].tolist()]
            parts += [activation(image, other, tag, True) for other in relations.others[first:last].tolist()]
            out.append(torch.stack(parts).mean(dim=0))
    return out


def literal_released(config: Config, context: RunContext) -> tuple[list[torch.Tensor], int]:
    """The released maps of all tags, unrounded, (T, H, W), and how many of their five parts each were left out."""
    model = load_classifier(config.classifier, context.inputs["train_classifier"], len(context.classes))
    layer = model.common_head if model.own_head else model.phi
    uris = split_rows(context, "train", tagged=True)["uri"].to_pylist()
    relations, _ = relations_of(config, context)
    out, dropped = [], 0

    def part(activation: torch.Tensor, *, first: bool = False) -> torch.Tensor:
        nonlocal dropped
        if not first and 1 / (1 + np.exp(-activation.mean().item())) <= 0.1:
            dropped += 1
            return torch.zeros_like(activation)
        return activation.clamp(min=0) / activation.max().clamp(min=1e-6)

    def moved(seen: torch.Tensor, first: float, step: float) -> torch.Tensor:
        """A map whose positions lie at pixels first + n * step of the image, at pixels 0, 8, .. 56."""
        source, target = (Grid((at + 0.5) / 64, by / 64, len(seen)) for at, by in ((first, step), (0, 8)))
        onto = target._replace(positions=8)
        return resample(seen, Grids(source, source), Grids(onto, onto), "bicubic").clamp(0, 1)

    def mirrored(seen: torch.Tensor) -> torch.Tensor:
        """A map of the mirror image, whose rows lie where they did and whose columns lie at pixels 7, 15, .. 63."""
        rows, columns = Grid(0.5 / 64, 8 / 64, 8), Grid(7.5 / 64, 8 / 64, 8)
        return resample(seen.flip(1), Grids(rows, columns), Grids(rows, rows), "bicubic").clamp(0, 1)

    def pair(m: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = affinity(m, n, model.w_p, form=model.affinity.form, scale=model.affinity.scale)
        common = coattend(m, n, p)
        return layer(common.m)[0], layer(common.n)[0]

    with torch.inference_mode():
        pictures = [IMAGENET(to_unit(torch.from_numpy(read_rgb(uri, 64))[None])) for uri in uris]
        features = [model.backbone(picture) for picture in pictures]
        scaled = [
            [torch.nn.functional.interpolate(picture, size=side, mode="bilinear") for side in (48, 128)]
            for picture in pictures
        ]
        for number, (image, tag) in enumerate(zip(relations.image.tolist(), relations.tag.tolist(), strict=True)):
            f = features[image]
            of_m, of_flip = pair(f, model.backbone(pictures[image].flip(3)))
            parts = [part(of_m[tag], first=True), mirrored(part(of_flip[tag]))]
            for picture, factor in zip(scaled[image], (0.75, 2), strict=True):
                seen = part(pair(f, model.backbone(picture))[1][tag])
                parts.append(moved(seen, 0.5 / factor - 0.5, 8 / factor))
            related = [pair(f, features[other])[0][tag] for other in relations.related[number].tolist()]
            parts.append(part(torch.stack(related).mean(dim=0)))
            out.append(torch.stack(parts).sum(dim=0) / 5)
    return out, dropped


def maps_of(folder: Path, context: RunContext) -> list[torch.Tensor]:
    """The stage's maps in the order of the index, after a check that every tag of every image has one."""
    shards, out = Shards(folder / "maps"), []
    for row in split_rows(context, "train", tagged=True).to_pylist():
        of_image = image_maps(shards, row["image_id"])
        assert of_image is not None
        assert of_image.classes.tolist() == row["tags"]
        out += list(torch.from_numpy(of_image.maps))
    return out


def same_tables(one: Path, other: Path) -> None:
    for name in ("single", "maps"):
        assert read_table(one / name).equals(read_table(other / name)), name
        assert sorted(p.name for p in (one / name).iterdir()) == sorted(p.name for p in (other / name).iterdir())


# --- against pairs one by one


@pytest.mark.parametrize(
    "assignments",
    [
        (),
        ("localize.method.contrastive=true", "localize.related=2"),
        ("localize.method.target=n",),
        ("localize.method.affinity=identity", "localize.related_by=wrong_class"),
        ("localize.related_by=itself",),
    ],
    ids=str,
)
def test_maps_are_those_of_pairs_one_by_one(trained: Trained, tmp_path: Path, assignments: tuple[str, ...]) -> None:
    """With float16 features and trained weights, on maps scaled to [0, 1]."""
    config, context = trained.config(*assignments), trained.into(tmp_path / "part")
    result = localization.run(config, context)
    got, expected = maps_of(context.part, context), literal_maps(config, context)
    assert len(got) == len(expected) == result.counts["maps"]
    for ours, theirs in zip(got, expected, strict=True):
        assert theirs.max() - theirs.min() > 0.01
        difference = scale_maps(ours, "range") - scale_maps(theirs, "range")
        assert difference.abs().max() < 5e-3
    relations, _ = relations_of(config, context)
    with_part = int((np.diff(relations.others_start) > 0).sum())
    assert with_part == result.counts.get("maps with a contrastive part", 0)
    assert (0 < with_part < len(got)) == config.localize.method.contrastive


def test_controls_of_related_images_are_counted(trained: Trained, tmp_path: Path) -> None:
    """Class 0 is every image's, class 3 that of all but one."""
    made = with_index(trained, tmp_path, lambda n, row: {"tags": [0, 3] if n else [0]})
    wrong = localization.run(made.config("localize.related_by=wrong_class"), made.into(tmp_path / "wrong"))
    assert wrong.counts["maps related to images of their class for want of others"] == 30
    assert wrong.counts["maps whose related images repeat"] == 29
    assert "30 map(s) are related to images of their class although" in " ".join(wrong.notes)
    assert "29 map(s) of classes that too few images lack repeat" in " ".join(wrong.notes)
    assert wrong.counts["maps"] == 59
    itself = localization.run(made.config("localize.related_by=itself"), made.into(tmp_path / "itself"))
    assert itself.counts["maps related to their own image alone"] == 59
    assert "maps whose related images repeat" not in itself.counts


@pytest.mark.parametrize("head", ["own", "shared"])
def test_released_maps_are_those_of_pairs_one_by_one(trained: Trained, tmp_path: Path, head: str) -> None:
    """To a level of 8 bits, at few positions; also where the bound on a map's mean leaves some of the parts out."""
    released = ("localize.method.name=released", "localize.related_may_repeat=true", "maps.scale=maximum")
    as_it_is = ("localize.extra_scales=[]", "localize.mirror=false", f"classifier.head={head}")
    config, context = trained.config(*released, *as_it_is), trained.into(tmp_path / "part")
    state = state_of(context)
    if head == "shared":
        state = {**state, "phi.bias": state["phi.bias"] - 2}
        state.pop("common_head.weight")
    save(state, tmp_path / WEIGHTS)
    context = reading(context, "train_classifier", tmp_path)
    localization.run(config, context)
    got, (expected, dropped) = maps_of(context.part, context), literal_released(config, context)
    assert len(got) == len(expected)
    if head == "shared":
        assert 0.1 < dropped / (4 * len(expected)) < 0.9
    ours, theirs = torch.stack(got).float(), torch.stack(expected)
    assert (ours * 255 - (ours * 255).round()).abs().max() < 0.1  # kept as float16
    levels = (ours * 255).round() - (theirs * 255).round()
    assert levels.abs().max() <= 1
    assert levels.abs().mean() < 0.05
    assert (theirs.amax(dim=(1, 2)) > 0.1).float().mean() > 0.1


def test_in_float32_maps_differ_by_rounding_alone(trained: Trained, tmp_path: Path) -> None:
    """The stage's arithmetic on float32 features: attention over activations, a query that all maps share."""
    config, context = trained.config("localize.method.contrastive=true"), trained.into(tmp_path / "part")
    rows = split_rows(context, "train", tagged=True)
    relations, source = relations_of(config, context)
    weights, classes = context.inputs["train_classifier"], len(context.classes)
    model = load_classifier(config.classifier, weights, classes)
    size, how = config.classifier.input_size, config.localize
    pixels = torch.from_numpy(np.stack([read_rgb(uri, size) for uri in rows["uri"].to_pylist()]))
    with torch.inference_mode():
        images = IMAGENET(to_unit(pixels))
        features = embed(model.backbone, model.embedding, images, extra_scales=how.extra_scales, mirror=how.mirror)
    write_features(tmp_path / "features", 0, features.numpy())
    relate = Relate(config, weights, classes, False, tmp_path, source)
    expected = literal_maps(config, context)
    taken: list[torch.Tensor] = []
    for row in relate_rows(rows, relations).to_pylist():
        taken += list(relate.maps(row))
    assert len(taken) == len(expected)
    difference = max((a - b).abs().max().item() for a, b in zip(taken, expected, strict=True))
    assert difference < 1e-5


def test_a_control_needs_no_training_of_co_attention(trained: Trained, tmp_path: Path) -> None:
    """The control of the study of effects: a classifier without W_P, related images all the same."""
    plain = ("classifier.attention=none", "localize.method.affinity=identity")
    config, context = trained.config(*plain), trained.into(tmp_path / "part")
    model = build_classifier(config.classifier, len(context.classes))
    state = state_of(context)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    save(model.state_dict(), tmp_path / WEIGHTS)
    context = reading(context, "train_classifier", tmp_path)
    localization.run(config, context)
    for ours, theirs in zip(maps_of(context.part, context), literal_maps(config, context), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3 * float(theirs.abs().max()), rtol=0)


def test_rows_are_written_at_their_positions(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float16).reshape(2, 2, 3)
    write_features(tmp_path, 3, rows)
    write_features(tmp_path, 0, rows[1:])
    files = FeatureFiles(tmp_path)
    assert files.rows([4]).dtype == np.float32
    np.testing.assert_array_equal(files.rows([4, 0, 3]), rows[[1, 1, 0]])


# --- any batch, any interruption


VARIANTS = {
    "paper": (),
    "released": ("localize.method.name=released", "localize.related_may_repeat=true", "maps.scale=maximum"),
}


def test_an_images_features_do_not_depend_on_the_other_images_of_its_batch(trained: Trained, tmp_path: Path) -> None:
    """Every batch is filled up: where kernels are chosen by shape, a smaller one would be computed by others."""
    config, context = trained.config(), trained.context
    rows = split_rows(context, "train", tagged=True)
    folders, parts = (tmp_path / "together", tmp_path / "alone"), []
    seen: set[int] = set()
    for path, count in zip(folders, (4, 1), strict=True):
        weights, classes = context.inputs["train_classifier"], len(context.classes)
        work = Embed(config, weights, classes, False, None, path, features=True, selves=False)
        work.model.backbone.register_forward_hook(lambda module, inputs, output: seen.add(len(inputs[0])))
        table = embed_rows(rows)
        parts.append(pa.concat_tables(work(table.slice(first, count)) for first in range(0, 30, count)))
    assert parts[0].equals(parts[1])
    together, alone = (FeatureFiles(path / "features").rows(list(range(30))) for path in folders)
    assert together.shape == (30, 24, 8, 8)
    assert together.any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(together, alone)
    assert seen == {4}


class Killed(BaseException):
    """Stands for a kill of the process."""


def killed_in(mapping: int, monkeypatch: pytest.MonkeyPatch, config: Config, context: RunContext) -> None:
    """Runs the stage and ends it in its `mapping`-th mapping, when every second shard of it is written."""
    real, calls = localization.map_table, iter(range(100))

    def dies(table: pa.Table, make: Any, arguments: Any, folder: Path, **options: Any) -> MapResult:
        result = real(table, make, arguments, folder, **options)
        if next(calls) == mapping:
            for shard in sorted(folder.glob("part-*"))[::2]:
                shard.unlink()
            raise Killed
        return result

    with monkeypatch.context() as patched:
        patched.setattr(localization, "map_table", dies)
        with pytest.raises(Killed):
            localization.run(config, context)


def computed_by(monkeypatch: pytest.MonkeyPatch, config: Config, context: RunContext) -> list[tuple[str, int, int]]:
    """Runs the stage: of each mapping its folder, the rows that it computed and those that it has."""
    real, calls = localization.map_table, []

    def counted(table: pa.Table, make: Any, arguments: Any, folder: Path, **options: Any) -> MapResult:
        result = real(table, make, arguments, folder, **options)
        calls.append((folder.name, result.rows, len(table)))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(localization, "map_table", counted)
        localization.run(config, context)
    return calls


@pytest.mark.parametrize("variant", ["paper", pytest.param("released", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mapping", [0, 1])
def test_a_kill_in_any_mapping_costs_the_unfinished_shards_alone(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, mapping: int
) -> None:
    config, undisturbed = trained.config(*VARIANTS[variant]), trained.into(tmp_path / "undisturbed")
    assert computed_by(monkeypatch, config, undisturbed) == [("single", 30, 30), ("maps", 30, 30)]
    context = trained.into(tmp_path / "killed")
    killed_in(mapping, monkeypatch, config, context)
    again = computed_by(monkeypatch, config, context)
    assert again == [("single", 16 if mapping == 0 else 0, 30), ("maps", 30 if mapping == 0 else 16, 30)]
    same_tables(context.part, undisturbed.part)


def test_after_a_loss_of_shards_only_these_are_related_again(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features were gone by then: images are embedded again, rather than maps made of zeros."""
    config, context, other = trained.config(), trained.into(tmp_path / "part"), trained.into(tmp_path / "other")
    localization.run(config, context)
    shutil.copytree(context.part, other.part, dirs_exist_ok=True)
    for shard in sorted((context.part / "maps").iterdir())[2:4]:
        shard.unlink()
    assert computed_by(monkeypatch, config, context) == [("single", 30, 30), ("maps", 8, 30)]
    same_tables(context.part, other.part)


# --- several numbers of related images

NUMBERS = {
    "contrastive": ((0, 2, 4), ("localize.method.contrastive=true",)),
    "released": ((4, 0, 1), VARIANTS["released"]),
    "nearest": ((1, 4), ("localize.related_by=nearest",)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "contrastive" else pytest.mark.slow) for name in NUMBERS]
)
def test_images_are_embedded_once_for_several_numbers_where_features_are_kept(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And the maps of each number are those of a run with it alone, to the bit."""
    numbers, assignments = NUMBERS[name]
    shutil.rmtree(trained.context.workspace.cache)
    trained.context.workspace.cache.mkdir()
    embedded = 0
    for number in numbers:
        plain = ["localize.method.contrastive=false"] if not number and name == "contrastive" else []
        own = *assignments, f"localize.related={number}", *plain
        alone, kept = trained.into(tmp_path / f"alone-{number}"), trained.into(tmp_path / f"kept-{number}")
        localization.run(trained.config(*own), alone)
        done = computed_by(monkeypatch, trained.config(*own, "localize.keep_features=true"), kept)
        embedded += sum(rows for folder, rows, _ in done if folder == "single")
        same_tables(kept.part, alone.part)
    assert embedded == (60 if name == "released" else 30), "the maps of self pairs come with related images alone"


# --- domains


def test_related_images_of_either_domain_are_met_by_their_affinity(trained: Trained, tmp_path: Path) -> None:
    """Every third image is of the source domain; the three W_P are far from each other."""
    made = with_index(trained, tmp_path, lambda n, row: {"domain": "target" if n % 3 else "source"})
    config = made.config("classifier.kinds=3", "localize.method.contrastive=true")
    model, state = build_classifier(config.classifier, len(made.context.classes)), state_of(trained.context)
    noise = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(0)) * 0.3
    model.load_state_dict({**state, "w_p": state["w_p"] + noise})
    save(model.state_dict(), tmp_path / WEIGHTS)
    context = reading(made.into(tmp_path / "part"), "train_classifier", tmp_path)
    localization.run(config, context)
    relations, source = relations_of(config, context)
    assert 0 < source[relations.related].mean() < 1
    for ours, theirs in zip(maps_of(context.part, context), literal_maps(config, context), strict=True):
        assert (scale_maps(ours, "range") - scale_maps(theirs, "range")).abs().max() < 5e-3


# --- classes and images that lack something


def test_images_without_tags_and_classes_with_few_images_are_counted(trained: Trained, tmp_path: Path) -> None:
    """Class 3 is left with one image, class 2 with two, which also have class 0, and one image without a tag."""
    tags = {0: [0, 3], 1: [0, 2], 2: [0, 2], 3: []}
    made = with_index(trained, tmp_path, lambda n, row: {"tags": tags.get(n, [0])})
    for related, repeats in ((1, 1), (2, 3)):  # the only image of class 3, and with two those of class 2
        context = made.into(tmp_path / f"r{related}")
        result = localization.run(made.config(f"localize.related={related}"), context)
        assert result.counts["images"] == 29
        assert result.counts["images without tags"] == 1
        assert result.counts["maps"] == 32
        assert result.counts["maps whose related images repeat"] == repeats
        assert f"{repeats} map(s) of classes with too few images" in " ".join(result.notes)
        assert len(maps_of(context.part, context)) == 32
    relations, _ = relations_of(made.config("localize.related=2"), context)
    assert relations.related[relations.tag == 3].tolist() == [[0, 0]]
    assert relations.related[relations.tag == 2].tolist() == [[2, 2], [1, 1]]


def test_without_any_tag_there_is_nothing_to_localize(trained: Trained, tmp_path: Path) -> None:
    made = with_index(trained, tmp_path, lambda n, row: {"tags": []})
    with pytest.raises(UserError, match="none of 30 training images has a tag"):
        localization.run(made.config(), made.into(tmp_path / "part"))
